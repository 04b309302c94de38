"""Kernel: a compiled variant taken apart, many of them at a time."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from sass.flow import Flow

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.compiler import Compiler
from mlaprep.service.inspect import Inspection, inspect_all
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec


@dataclass(frozen=True)
class Kernel:
    """One variant for one architecture."""

    spec: KernelSpec
    arch: Arch
    artifact: KernelArtifact
    inspection: Inspection

    def __str__(self) -> str:
        return f"{self.spec.variant_id} {self.arch}"

    @functools.cached_property
    def flow(self) -> Flow:
        return Flow(self.inspection.listing)


def build(compiler: Compiler, wanted: Iterable[tuple[KernelSpec | KernelSource, Arch]]) -> list[Kernel]:
    """Compiled in every process of the compiler at once, never from a cache, and disassembled together."""
    targets = [(render(what) if isinstance(what, KernelSpec) else what, arch) for what, arch in wanted]
    artifacts = [future.result() for future in [compiler.submit(source, arch) for source, arch in targets]]
    return [
        Kernel(source.spec, arch, artifact, inspection)
        for (source, arch), artifact, inspection in zip(targets, artifacts, inspect_all(artifacts), strict=True)
    ]
