"""Upkeep of a disk store's root: what is there, what goes for room, and what killed writers left."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.entries import MANIFEST, measure, read_manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.files import TEMPORARY, Folder, Identity, descend, new_name
from mlaprep.kernels_cache.hints import BLOBS, LINKS, drop_hint, iterate_hints, read_hint
from mlaprep.kernels_cache.key import is_arch, is_digest
from mlaprep.kernels_cache.locks import LOCKS, remove_free_lock, try_lock_folder

QUARANTINE: Final = "quarantine"
_KEPT_IN_QUARANTINE: Final = 16
_FEW_ENTRIES: Final = 64
_SURELY_STALE_S: Final = 3600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Usage:
    """One entry: when it was last used (seconds since 1970), what it is, and its bytes."""

    used: float
    arch: str
    key: str
    size: int


def entry_names(root: Folder, prefix: str = "") -> list[tuple[str, str]]:
    """(arch, key) of every directory in an entry's place, of those whose key starts with ``prefix``."""
    found = []
    for arch in filter(is_arch, root.names()):
        with contextlib.suppress(OSError), root.open(arch) as shelves:
            for shelf_name in shelves.names():
                if not shelf_name.startswith(prefix[:2]):
                    continue
                with contextlib.suppress(OSError), shelves.open(shelf_name) as shelf:
                    found += [(arch, key) for key in shelf.names() if is_digest(key) and key.startswith(prefix)]
    return found


def usage(root: Folder) -> list[Usage]:
    """Every entry, the least recently used first."""
    found = []
    for arch, key in entry_names(root):
        with contextlib.suppress(OSError), descend(root, arch, key[:2], key) as entry:
            used, size = measure(entry)
            found.append(Usage(used, arch, key, size))
    return sorted(found)


def replace_manifest(root: Folder, artifact: KernelArtifact) -> None:
    """Give the entry of a kernel this manifest; cubin and source stay, being the same. Raises OSError."""
    text = artifact.manifest.to_json().encode()
    with root.make(TEMPORARY) as temporary, staged(temporary) as (_, stage):
        stage.write(MANIFEST, text)
        with descend(root, artifact.manifest.arch, artifact.key[:2]) as shelf, shelf.open(artifact.key) as entry:
            stage.move(MANIFEST, entry, MANIFEST)
            entry.sync()
            os.utime(shelf.descriptor)  # or an index that knows the shelf would not look at it again


def evict(root: Folder, limit: int) -> tuple[int, int]:
    """Remove entries, the least recently used first, until ``limit`` bytes are left, and the hints to them.

    Returns how many were removed and the bytes that are left. Raises OSError.
    """
    entries = usage(root)
    left = sum(entry.size for entry in entries)
    if left <= limit:
        return 0, left
    if len(entries) > _FEW_ENTRIES:
        limit -= limit // 16  # room for the next ones, so that not every publication measures everything
    evicted = 0
    for entry in entries:
        if left <= limit:
            break
        evicted += discard(root, entry.arch, entry.key)
        left -= entry.size
    drop_lost_hints(root)
    return evicted, left


def discard(root: Folder, arch: str, key: str) -> bool:
    """Remove an entry at one stroke; False where there was none. Raises OSError."""
    name = new_name("gone-")
    with root.make(TEMPORARY) as temporary:
        try:
            with descend(root, arch, key[:2]) as shelf:
                shelf.move(key, temporary, name)
        except FileNotFoundError:
            return False
        _clear(temporary, name)
    return True


def remove_entry(root: Folder, arch: str, key: str) -> bool:
    """Remove an entry and the hints to it; False where there was none. Raises OSError."""
    digest = ""
    with contextlib.suppress(OSError, ArtifactError), descend(root, arch, key[:2], key) as entry:
        digest = read_manifest(entry, arch, key).cubin_sha256
    removed = discard(root, arch, key)
    if digest and read_hint(root, BLOBS, digest) == f"{arch}/{key}":
        drop_hint(root, BLOBS, digest)
    drop_links(root, key)
    return removed


def quarantine(root: Folder, folder: Folder, name: str, identity: Identity | None) -> bool:
    """Set something damaged aside, where the last of its kind are kept for a look.

    False where the name stands for something else than ``identity`` by now. Raises OSError.
    """
    with root.make(QUARANTINE) as aside:
        if identity is not None and not folder.holds(name, identity):
            return False
        folder.move(name, aside, f"{time.time_ns():020d}-{name}-{new_name()[:8]}")
        for old in aside.names()[:-_KEPT_IN_QUARANTINE]:
            with contextlib.suppress(FileNotFoundError):
                aside.remove(old)
    return True


def empty_quarantine(root: Folder) -> None:
    """Remove everything that was set aside. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), root.open(QUARANTINE) as aside:
        for name in aside.names():
            with contextlib.suppress(FileNotFoundError):
                aside.remove(name)


@contextlib.contextmanager
def staged(temporary: Folder) -> Iterator[tuple[str, Folder]]:
    """A new folder to fill and move away, with its name. It is gone afterwards even if it stays unmoved."""
    name = new_name("entry-")
    try:
        with temporary.make(name) as stage:
            try_lock_folder(stage)
            yield name, stage
    finally:
        _clear(temporary, name)


def prove_writable(root: Folder) -> None:
    """Write a page and remove it. Raises OSError where that cannot be done."""
    with root.make(TEMPORARY) as temporary:
        name = new_name("probe-")
        try:
            temporary.write(name, bytes(4096))
        finally:
            _clear(temporary, name)


def drop_lost_hints(root: Folder) -> None:
    """Drop the hints that lead to no entry."""
    names = entry_names(root)
    keys = {key for _, key in names}
    places = {f"{arch}/{key}" for arch, key in names}
    for kind, targets in ((LINKS, keys), (BLOBS, places)):
        for digest, text in iterate_hints(root, kind):
            # Looked for once more: it may have been published since.
            if text not in targets and not leads_somewhere(root, kind, text):
                drop_hint(root, kind, digest)


def drop_links(root: Folder, key: str) -> None:
    """Drop the links that lead to a key."""
    for digest, text in iterate_hints(root, LINKS):
        if text == key:
            drop_hint(root, LINKS, digest)


def leads_somewhere(root: Folder, kind: str, text: str) -> bool:
    """Whether there is an entry where a hint's text leads. Raises OSError."""
    arch, _, key = text.rpartition("/")
    if not is_digest(key) or (kind == BLOBS and not is_arch(arch)):
        return False
    return any(arch in ("", found) for found, _ in entry_names(root, key))


def sweep(root: Folder, min_age_s: float) -> int:
    """Remove what is ``min_age_s`` old and belongs to no living writer or holder of a lock; how many it was."""
    swept = 0
    with contextlib.suppress(FileNotFoundError), root.open(TEMPORARY) as temporary:
        for name in temporary.names():
            with contextlib.suppress(OSError):
                if _is_stale(temporary, name, min_age_s):
                    temporary.remove(name)
                    swept += 1
    with contextlib.suppress(FileNotFoundError), root.open(LOCKS) as locks:
        swept += sum(_is_old(locks, name, min_age_s) and remove_free_lock(locks, name) for name in locks.names())
    return swept


def _clear(temporary: Folder, name: str) -> None:
    try:
        temporary.remove(name)
    except FileNotFoundError:
        pass  # moved to its place, or swept by somebody else
    except OSError as error:
        _log.warning("kernel cache: %s/%s is left for a later sweep: %s", temporary.where, name, error)


def _is_old(folder: Folder, name: str, min_age_s: float) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - folder.status(name).st_mtime >= min_age_s
    return False


def _is_stale(temporary: Folder, name: str, min_age_s: float) -> bool:
    age = time.time() - temporary.status(name).st_mtime
    if age < min_age_s:
        return False
    if age >= _SURELY_STALE_S or not temporary.is_folder(name):
        return True
    with temporary.open(name) as folder:
        return try_lock_folder(folder) is True
