"""Origin: whether an artifact was made from the source that this release generates, launch parameters included.

An artifact proves that its parts belong together. It cannot prove that they are the ones wanted: the same spec
compiled from an altered source, or by another release, is as whole as the right one. Whoever follows a link or
reads a reply therefore compares it with the source it would compile itself.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.key import canonical_json
from mlaprep.kernels_cache.store import KernelStore

FOREIGN: Final = frozenset({"source", "launch", "entry", "variant-id"})
"""Reasons of an artifact that is whole but not of this release."""

# A head line with a backslash would pull the next line into the comment, and so would a trigraph.
_HEAD: Final = re.compile(r"(?://[ ->@-\[\]-~]*\n)*", re.ASCII)


class GeneratedSpec(Protocol):
    """The part of a specification that a manifest repeats."""

    @property
    def variant_id(self) -> str: ...
    def to_dict(self) -> Mapping[str, Any]: ...


class GeneratedSource(Protocol):
    """What a generator gives for a spec; :class:`mlaprep.templates.render.KernelSource` does."""

    @property
    def spec(self) -> GeneratedSpec: ...
    @property
    def text(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def launch(self) -> Mapping[str, Any]: ...


def require_own(artifact: KernelArtifact, source: GeneratedSource, arch: str, *, key: str | None = None) -> None:
    """Prove that an artifact is whole and was made from ``source``, for its spec and for ``arch``.

    The head comment may differ: it names the versions of what generated the text.

    Raises:
        ArtifactError: as :meth:`KernelArtifact.verify` does, or with one of :data:`FOREIGN` as its reason.
    """
    spec, manifest = source.spec, artifact.manifest
    artifact.verify(key=key, arch=arch, spec=spec.to_dict())
    require_own_call(manifest, source)
    if manifest.variant_id != spec.variant_id:
        raise ArtifactError("variant-id", f"asked for {spec.variant_id}, found it named {manifest.variant_id}")
    if manifest.source_sha256 != source.sha256 and _code(artifact.source) != _code(source.text):
        raise ArtifactError("source", f"asked for {spec.variant_id}, found it compiled from another source")


def require_own_call(manifest: Manifest, source: GeneratedSource) -> None:
    """Prove that a kernel is called as ``source`` is: its entry point and what a launcher must know.

    Raises:
        ArtifactError: reason ``entry`` or ``launch``.
    """
    if manifest.entry != source.entry:
        raise ArtifactError("entry", f"asked for the entry point {source.entry}, found {manifest.entry}")
    if manifest.launch.text != canonical_json(source.launch):
        raise ArtifactError("launch", f"found other launch parameters than those of {source.spec.variant_id}")


def find_own(
    store: KernelStore, source: GeneratedSource, arch: str, check: Callable[[Manifest], None] | None = None
) -> KernelArtifact | None:
    """The latest kernel of ``source`` for ``arch`` in a store, whichever compiler it came from.

    Reads every manifest of the architecture: for where a link is lost. One for which ``check`` raises
    ArtifactError is left out.
    """
    spec = canonical_json(source.spec.to_dict())
    alike = [manifest for manifest in store.list(arch) if manifest.spec.text == spec]
    for manifest in sorted(alike, key=lambda manifest: manifest.created_at, reverse=True):
        artifact = store.get(manifest.key)
        if artifact is None:
            continue
        try:
            require_own(artifact, source, arch)
            if check is not None:
                check(artifact.manifest)
        except ArtifactError:
            continue
        return artifact
    return None


def _code(text: str) -> str:
    """A source without its head comment."""
    head = _HEAD.match(text)
    return text if head is None else text[head.end() :]
