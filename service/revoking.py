"""Revoking: take a kernel out of use, so that it is neither given out nor built again under its key."""

import logging

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.revocation import Revocation
from mlaprep.service.builder import Builder
from mlaprep.service.errors import KernelRevoked
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

_log = logging.getLogger(__name__)


def revoke(builder: Builder, spec: KernelSpec, arch: Arch, reason: str, key: str | None = None) -> Revocation | None:
    """Revoke the kernel that is given out for a spec, or that of another key; None where the store has none.

    The revocation is kept before the entry goes: a process that is killed in between leaves a kernel that nobody uses.

    Raises:
        SpecError: the architecture cannot run the spec.
        StoreError: it could not be kept; it holds in this process.
    """
    held: Revocation | None = None
    artifact: KernelArtifact | None = None
    try:
        if key is None:
            artifact = builder.get(spec, arch)
        elif (held := builder.revocations.find(key=key)) is None:
            artifact = builder.store.get(key)
    except KernelRevoked as error:
        held = error.revocation
    if held is not None:
        held = builder.revocations.add(held)  # which writes one that could not be written at first
    else:
        if artifact is None or (artifact.manifest.variant_id, artifact.manifest.arch) != (spec.variant_id, str(arch)):
            return None
        held = builder.revocations.add(Revocation.of(artifact.manifest, reason))
        _log.warning("%s for %s is %s", held.variant_id, held.arch, held)
    builder.store.delete(held.key)
    return held
