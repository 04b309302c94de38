"""Builds: every kernel that the store holds of a variant on an architecture, those no longer given out among them."""

from dataclasses import dataclass
from typing import Any

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.store import only_key
from mlaprep.service.builder import Builder
from mlaprep.service.errors import KernelRevoked
from mlaprep.service.inspect import Inspection, diff, inspect_all
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class StoredBuild:
    """One kernel of the store, and whether whoever asks for its variant is given this one."""

    manifest: Manifest
    serves: bool

    def to_dict(self) -> dict[str, Any]:
        """What tells two builds apart, as JSON types."""
        manifest = self.manifest
        return {
            "digest": manifest.cubin_sha256,
            "key": manifest.key,
            "variant_id": manifest.variant_id,
            "arch": manifest.arch,
            "nvrtc_version": manifest.nvrtc_version,
            "source_sha256": manifest.source_sha256,
            "created_at": manifest.created_at,
            "size": manifest.cubin_size,
            "registers": manifest.registers,
            "spill_stores": manifest.spill_stores,
            "spill_loads": manifest.spill_loads,
            "stack_bytes": manifest.stack_bytes,
            "shared_bytes": manifest.shared_bytes,
            "serves": self.serves,
        }


def builds_of(builder: Builder, spec: KernelSpec, arch: Arch) -> list[StoredBuild]:
    """Each build that is not revoked, the latest first. Looks at every manifest of the architecture."""
    version = builder.serving_version()
    alike = [manifest for manifest in builder.store.list(arch.name) if manifest.variant_id == spec.variant_id]
    return [
        StoredBuild(manifest, builder.would_serve(manifest, spec, arch, version))
        for manifest in sorted(alike, key=lambda manifest: (manifest.created_at, manifest.key), reverse=True)
        if builder.revocations.of(manifest) is None
    ]


def find_build(builder: Builder, prefix: str) -> KernelArtifact | None:
    """The kernel whose digest starts so, of any variant and architecture; None where the store has none.

    Raises:
        AmbiguousKeyError: several digests start so.
        KernelRevoked: it is not to be used.
    """
    keys: dict[str, str] = {}
    for manifest in builder.store.list():
        if manifest.cubin_sha256.startswith(prefix):
            keys[manifest.cubin_sha256] = manifest.key
    digest = only_key(prefix, iter(keys))
    artifact = None if digest is None else builder.store.get(keys[digest])
    if artifact is not None and (revoked := builder.revocations.of(artifact.manifest)) is not None:
        raise KernelRevoked(revoked)
    return artifact


def compare(one: KernelArtifact, other: KernelArtifact) -> dict[str, Any]:
    """How ``one`` became ``other``, as JSON types; errors as for :func:`mlaprep.service.inspect.inspect`."""
    before, after = inspect_all([one, other])
    found = diff(before, after)
    sides = (one, before), (other, after)
    sizes = [len(one.cubin), len(other.cubin)]
    return {
        "from": _side(*sides[0]),
        "to": _side(*sides[1]),
        "same": one.digest == other.digest,
        "source_same": one.manifest.source_sha256 == other.manifest.source_sha256,
        "figures": {name: list(pair) for name, pair in found.figures.items()}
        | ({"size": sizes} if sizes[0] != sizes[1] else {}),
        "opcodes": {name: list(pair) for name, pair in found.opcodes.items()},
        "sass": "".join(f"{line}\n" for line in found.sass),
    }


def _side(artifact: KernelArtifact, inspection: Inspection) -> dict[str, Any]:
    manifest = artifact.manifest
    named = ("variant_id", "arch", "key", "nvrtc_version", "source_sha256", "created_at")
    head = {"digest": artifact.digest, "size": len(artifact.cubin)} | {n: getattr(manifest, n) for n in named}
    return head | inspection.resources.to_dict()
