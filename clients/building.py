"""KernelBuilder: what compiles on this machine; and Obtained: a kernel with the place that had it."""

from dataclasses import dataclass
from typing import Protocol

from mlaprep.clients.stats import Tier
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


class Built(Protocol):
    @property
    def artifact(self) -> KernelArtifact: ...
    @property
    def cached(self) -> bool: ...


class KernelBuilder(Protocol):
    """What compiles on this machine; :class:`mlaprep.service.builder.Builder` does."""

    def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Obtained:
    """A verified kernel and where it came from.

    ``cached`` is false where it had to be compiled for this call, here or in the service.
    """

    artifact: KernelArtifact
    tier: Tier
    cached: bool
