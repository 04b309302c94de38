"""Every preset builds at every tensor-parallel degree for every architecture, without a spill."""

import pytest
from sass.checks import faults
from sass.kernels import Kernel, build
from sass.variants import ARCHS, preset_specs

from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.spec import KernelSpec


@pytest.fixture(scope="module")
def kernels(compiler: Compiler) -> dict[tuple[KernelSpec, Arch], Kernel]:
    wanted = [(spec, arch) for spec in preset_specs() for arch in ARCHS]
    return dict(zip(wanted, build(compiler, wanted), strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_everywhere(name: str, kernels: dict[tuple[KernelSpec, Arch], Kernel]) -> None:
    preset = PRESETS[name]
    for tp in preset.tp_degrees:
        spec = preset.spec(tp)
        assert spec.rope == preset.rope
        for arch in ARCHS:
            kernel = kernels[spec, arch]
            manifest = kernel.artifact.manifest
            assert (manifest.spill_stores, manifest.spill_loads, manifest.stack_bytes) == (0, 0, 0)
            assert faults(kernel) == [], str(kernel)
