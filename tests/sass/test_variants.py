"""Every kind of kernel, for every architecture: the machine code shows what the source was written for."""

import pytest
from sass.checks import faults
from sass.kernels import Kernel, build
from sass.variants import ARCHS, KINDS, kind, targets

from mlaprep.service.compiler import Compiler


@pytest.fixture(scope="module")
def kernels(compiler: Compiler) -> dict[str, list[Kernel]]:
    wanted = [(name, arch) for name in KINDS for arch in targets(kind(name))]
    built = build(compiler, [(kind(name), arch) for name, arch in wanted])
    found: dict[str, list[Kernel]] = {name: [] for name in KINDS}
    for (name, _), kernel in zip(wanted, built, strict=True):
        found[name].append(kernel)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_machine_code(name: str, kernels: dict[str, list[Kernel]]) -> None:
    assert len(kernels[name]) >= len(ARCHS) - 1
    assert {str(kernel): found for kernel in kernels[name] if (found := faults(kernel))} == {}


def test_every_kind_of_spec_is_among_them() -> None:
    specs = [kind(name) for name in KINDS]
    for field, values in {
        "layout": ("fp8", "fp8-q16", "same", "ds_mla"),
        "rope": ("none", "interleaved", "neox"),
        "elements_per_thread": (16, 8, 4, 2),
        "dtype": ("bf16", "fp16"),
        "tile_scale": ("none", "raw", "pow2"),
        "q_scale": ("none", "scalar", "token"),
        "kv_scale": ("none", "scalar"),
        "load_bytes": (16, 32),
        "pdl": (True, False),
        "write_q": (True, False),
        "write_kv": (True, False),
        "loc_dtype": ("i32", "i64"),
        "position_dtype": ("i32", "i64"),
        "reserved_slot": (True, False),
    }.items():
        assert {getattr(spec, field) for spec in specs} == set(values), field


def test_wide_loads_are_wide(kernels: dict[str, list[Kernel]]) -> None:
    for kernel in kernels["32-byte-loads"]:
        assert kernel.inspection.listing.opcodes()["LDG.E.ENL2.256"] == 1
