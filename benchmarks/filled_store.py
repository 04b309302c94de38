"""A cache directory with as many entries as wanted: real sources, one cubin an architecture."""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import cache_key, request_key
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec

ARCHS = tuple(map(Arch, ("sm_90a", "sm_100a", "sm_103a", "sm_120a")))


def specs() -> Iterator[KernelSpec]:
    """Different specs, one after the other, as many as anybody wants."""
    for rank, rope, heads in itertools.product(range(512, 64, -16), (64, 32, 96, 128, 48, 16), range(1, 257)):
        yield KernelSpec(num_heads=heads, kv_lora_rank=rank, rope_dim=rope)


def fill(root: Path, entries: int, compiled: dict[Arch, KernelArtifact], max_bytes: int = 2**40) -> None:
    """Publish and link ``entries`` entries, as a builder does, but do not force them to the medium: that takes long."""
    store = DiskStore(root, max_bytes)
    with mock.patch.object(os, "fsync"):
        for spec, arch in itertools.islice(itertools.product(specs(), compiled), entries):
            artifact = like(compiled[arch], spec, arch)
            store.publish(artifact)
            request = request_key(arch=arch.name, spec=spec.to_dict(), generator=templates_fingerprint())
            store.link(request, artifact.key)


def like(artifact: KernelArtifact, spec: KernelSpec, arch: Arch) -> KernelArtifact:
    """An entry for another spec with the cubin of this one: whatever lists and serves it cannot tell."""
    source = render(spec)
    manifest = artifact.manifest
    key = cache_key(source=source.text, options=manifest.options, arch=arch.name, nvrtc_version=manifest.nvrtc_version)
    changed = dataclasses.replace(
        manifest,
        spec=spec.to_dict(),
        variant_id=spec.variant_id,
        key=key,
        source_sha256=hashlib.sha256(source.text.encode()).hexdigest(),
    )
    return KernelArtifact(changed, artifact.cubin, source.text)
