"""Audit: look at every entry of a directory, damaged ones too, and change nothing there.

A store sets damage aside and notes each use; who only wants to see what is there reads it here.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlaprep.kernels_cache import housekeeping
from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.entries import read_entry, read_manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.files import Folder, descend


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry: its manifest where that can be read, and what is wrong with it, "" where nothing is."""

    arch: str
    key: str
    manifest: Manifest | None
    damage: str = ""


def audit(root: Path, *, whole: bool = True) -> Iterator[Finding]:
    """Every entry below a cache directory, none where there is no directory; never raises.

    Args:
        whole: verify cubin and source as a store does before it gives them out, not the manifest alone.
    """
    with contextlib.suppress(OSError), Folder.at(root) as folder:
        for arch, key in housekeeping.entry_names(folder):
            yield examine(folder, arch, key, whole=whole)


def examine(root: Folder, arch: str, key: str, *, whole: bool = True) -> Finding:
    """One entry, as :func:`audit` tells it; never raises."""
    manifest = None
    try:
        with descend(root, arch, key[:2], key) as entry:
            manifest = read_manifest(entry, arch, key)
            if whole:
                read_entry(entry, arch, key)
    except ArtifactError as error:
        return Finding(arch, key, manifest, str(error))
    except OSError as error:
        return Finding(arch, key, manifest, error.strerror or "it cannot be read")
    return Finding(arch, key, manifest)
