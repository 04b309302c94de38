"""The checks see what they are for: a source broken on purpose is caught, by the check that is meant to."""

import dataclasses
from collections.abc import Callable

import pytest
from sass.checks import CHECKS, budget, faults
from sass.kernels import Kernel, build

from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

ARCHS = (Arch("sm_90a"), Arch("sm_120a"))
SPECS = {
    "interleaved": KernelSpec(num_heads=16, rope="interleaved"),
    "neox": KernelSpec(num_heads=16, rope="neox"),
    "without-pdl": KernelSpec(num_heads=16, pdl=False),
    "same": KernelSpec(num_heads=16, layout="same"),
}
Edit = tuple[str, str]
WAIT = "  wait_for_predecessors(source, target);\n"
LOAD = "  const Elements elements = load_elements(source);\n"
LEAVE = "  if (head >= kRowsPerToken || token >= tokens) return;\n"
RELEASE = "  release_dependents();\n"
MUTATIONS: dict[str, tuple[str, str, list[Edit]]] = {
    # what is done: the check that must see it, the spec, the edits
    "the wait removed": ("wait", "interleaved", [(WAIT, "")]),
    "the wait behind the first load": ("wait", "interleaved", [(WAIT, ""), (LOAD, LOAD + WAIT)]),
    "an exit ahead of the wait": ("wait", "interleaved", [(LEAVE, ""), (WAIT, LEAVE + WAIT)]),
    "the wait in some threads only": ("wait", "interleaved", [(WAIT, "  if (is_query)" + WAIT)]),
    "a store ahead of the wait": ("wait", "interleaved", [(WAIT, "  store_codes(target, {});\n" + WAIT)]),
    "a release ahead of the wait": ("wait", "interleaved", [(RELEASE, ""), (WAIT, RELEASE + WAIT)]),
    "the release removed": ("release", "interleaved", [(RELEASE, "")]),
    "a release in some threads only": ("release", "interleaved", [(RELEASE, "  if (is_query)" + RELEASE)]),
    "a wait where there is no PDL": (
        "wait",
        "without-pdl",
        [(LEAVE, 'asm volatile("griddepcontrol.wait;");\n' + LEAVE)],
    ),
    "non-coherent inputs": ("coherence", "interleaved", [("ld.global.v4.u32", "ld.global.nc.v4.u32")]),
    "non-coherent slots": ("coherence", "interleaved", [("ld.global.s64", "ld.global.nc.s64")]),
    "8-byte loads": (
        "loads",
        "interleaved",
        [
            (
                "load_words4(source + 2 * i, v.words + i)",
                "load_words2(source + 2 * i, v.words + i), load_words2(source + 2 * i + 4, v.words + i + 2)",
            )
        ],
    ),
    "a load beside the others": (
        "loads",
        "interleaved",
        [("slot = load_index(loc + token)", "slot = load_index(loc + token) + load_index(loc)")],
    ),
    "8-byte stores": (
        "stores",
        "interleaved",
        [
            (
                "store_words4(target, v.words)",
                "store_words2(target, v.words), store_words2(target + 8, v.words + 2)",
            )
        ],
    ),
    "8-byte stores of elements": (
        "stores",
        "same",
        [
            (
                "store_words4(target + 4 * i, v.words + i)",
                "store_words2(target + 4 * i, v.words + i), store_words2(target + 4 * i + 8, v.words + i + 2)",
            )
        ],
    ),
    "another 8-bit float": ("conversions", "interleaved", [("satfinite.e4m3x2.f32 low", "satfinite.e5m2x2.f32 low")]),
    "half of the conversions": (
        "conversions",
        "interleaved",
        [("mov.b32 %0, {low, high}", "mov.b32 %0, {low, low}")],
    ),
    "a narrowed stride": (
        "addresses",
        "interleaved",
        [("token * q_nope_token_stride", "token * static_cast<unsigned>(q_nope_token_stride)")],
    ),
    "a narrowed row": (
        "addresses",
        "interleaved",
        [("row * cache_row_stride", "static_cast<unsigned>(row * cache_row_stride)")],
    ),
    "a narrowed slot": (
        "loads",
        "interleaved",
        [("slot = load_index(loc + token)", "slot = static_cast<int>(load_index(loc + token))")],
    ),
    "a fused rotation": (
        "rotation",
        "interleaved",
        [("__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine))", "a * cosine - b * sine")],
    ),
    "a fused neox rotation": (
        "rotation",
        "neox",
        [
            ("__fsub_rn(", "__fmaf_rn(-rotation.other.v[i], rotation.sine[i], "),
            (",\n                             __fmul_rn(rotation.other.v[i], rotation.sine[i]))", ")"),
        ],
    ),
    "registers that spill": (
        "memory spaces",
        "neox",
        [("__launch_bounds__(576)", "__launch_bounds__(1024, 2)")],
    ),
    "an array in local memory": (
        "memory spaces",
        "interleaved",
        [
            (LOAD, LOAD + "  volatile unsigned turn[64];\n  turn[threadIdx.x % 64] = column;\n"),
            ("load_index(loc + token)", "load_index(loc + token + turn[threadIdx.y % 64])"),
        ],
    ),
    "shared memory": (
        "memory spaces",
        "interleaved",
        [
            (LOAD, LOAD + "  __shared__ volatile unsigned held[1];\n  held[0] = column;\n"),
            ("load_index(loc + token)", "load_index(loc + token + held[0])"),
        ],
    ),
    "an atomic": (
        "memory spaces",
        "same",
        [(RELEASE, RELEASE + "  atomicAdd(reinterpret_cast<unsigned*>(target), 1u);\n")],
    ),
}


def mutated(spec: KernelSpec, edits: list[Edit]) -> KernelSource:
    text = render(spec).text
    for old, new in edits:
        assert old in text, f"the source no longer has {old!r}"
        text = text.replace(old, new)
    return KernelSource(spec, text)


@pytest.fixture(scope="module")
def kernels(compiler: Compiler) -> dict[tuple[str, Arch], Kernel]:
    wanted: dict[tuple[str, Arch], KernelSource] = {}
    for arch in ARCHS:
        wanted |= {(name, arch): render(spec) for name, spec in SPECS.items()}
        wanted |= {(what, arch): mutated(SPECS[spec], edits) for what, (_, spec, edits) in MUTATIONS.items()}
    built = build(compiler, [(source, arch) for (_, arch), source in wanted.items()])
    return dict(zip(wanted, built, strict=True))


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_whole_sources_pass(name: str, arch: Arch, kernels: dict[tuple[str, Arch], Kernel]) -> None:
    assert faults(kernels[name, arch]) == []


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_broken_source_is_caught(what: str, arch: Arch, kernels: dict[tuple[str, Arch], Kernel]) -> None:
    check = MUTATIONS[what][0]
    assert list(CHECKS[check](kernels[what, arch]))


def test_every_check_is_tried() -> None:
    assert {check for check, _, _ in MUTATIONS.values()} | {"registers"} == set(CHECKS)


@pytest.mark.parametrize(
    "change",
    [
        lambda kernel: dataclasses.replace(kernel.inspection.resources, registers=budget(kernel.spec) + 1),
        lambda kernel: dataclasses.replace(kernel.inspection.resources, registers=1),
    ],
    ids=["over the budget", "not the compiler's"],
)
def test_registers_are_counted(change: Callable[[Kernel], object], kernels: dict[tuple[str, Arch], Kernel]) -> None:
    kernel = kernels["interleaved", ARCHS[0]]
    inspection = dataclasses.replace(kernel.inspection, resources=change(kernel))  # type: ignore[arg-type]
    assert list(CHECKS["registers"](dataclasses.replace(kernel, inspection=inspection)))
