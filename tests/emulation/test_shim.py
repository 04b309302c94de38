"""The shim itself: its conversions against other implementations, and that it notices what a kernel must not do."""

import ctypes
import re
from typing import Any

import numpy as np
import pytest
import torch
from emulation.artifact import carried_source, emulated_artifact
from emulation.compile import compile_source
from emulation.driver import EmulationFault
from kernel import oracle
from kernel.calls import DTYPES, Call, make
from kernel.checks import compare, expected, run
from kernel.devices import Emulation

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.plan import LaunchConfig
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

PRIMITIVES = {
    "load_words8",
    "load_words4",
    "load_words2",
    "load_words1",
    "load_element",
    "load_index",
    "load_float",
    "store_words4",
    "store_words2",
    "store_words1",
    "store_half_word",
    "wait_for_predecessors",
    "release_dependents",
    "element_to_float",
    "float_to_e4m3x4",
    "float_to_elements",
    "tile_max",
}


def library(dtype: str = "bf16") -> ctypes.CDLL:
    loaded = compile_source(render(make(1, dtype=dtype).spec).text, dtype)
    loaded.emulated_e4m3.argtypes, loaded.emulated_e4m3.restype = (ctypes.c_float,), ctypes.c_uint
    loaded.emulated_element.argtypes, loaded.emulated_element.restype = (ctypes.c_float,), ctypes.c_uint
    loaded.emulated_float.argtypes, loaded.emulated_float.restype = (ctypes.c_ushort,), ctypes.c_float
    return loaded


def test_the_encoder_gives_the_literal_table() -> None:
    encode = library().emulated_e4m3
    for value, code in oracle.LITERAL.items():
        assert encode(value) == code, value
        assert encode(-value) == code | 0x80, value
    assert encode(float("nan")) == 0x7F
    assert encode(-float("nan")) == 0x7F


@pytest.mark.parametrize("kind", ["e4m3", "bf16", "fp16"])
def test_the_encoders_agree_with_the_oracle_around_midpoints(kind: str) -> None:
    loaded = library("bf16" if kind == "e4m3" else kind)
    encode = loaded.emulated_e4m3 if kind == "e4m3" else loaded.emulated_element
    middle = oracle.midpoints(kind)
    centre = torch.from_numpy(np.concatenate([middle[:: 1 + len(middle) // 1024], middle[-3:]])).float()
    near = torch.cat([centre, centre.nextafter(torch.tensor(torch.inf)), centre.nextafter(torch.tensor(0.0))])
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(7)).int().view(torch.float32)
    values = torch.cat([near, -near, bits, torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])])
    assert [encode(value) for value in values.tolist()] == oracle.codes(values.double().numpy(), kind).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_elements_become_the_floats_that_torch_has(dtype: str) -> None:
    decode = library(dtype).emulated_float
    patterns = torch.arange(0, 2**16, 7, dtype=torch.int32)
    wanted = patterns.to(torch.int16).view(DTYPES[dtype]).float()
    found = torch.tensor([decode(pattern) for pattern in patterns.tolist()])
    assert torch.equal(found.isnan(), wanted.isnan())
    tame = ~wanted.isnan()
    assert torch.equal(found[tame].view(torch.int32), wanted[tame].view(torch.int32))


def test_the_shim_supplies_primitives_and_nothing_of_the_kernel() -> None:
    """All that __CUDACC__ hides is the primitives by name: no address, slot or grid arithmetic."""
    names = set()
    for fields in (
        {"reserved_slot": True, "dcp_world": 4, "q_scale": "token", "kv_scale": "scalar"},
        {"pdl": False, "layout": "same", "rope": "neox", "dtype": "fp16", "pad_heads_to": 8},
        {"layout": "ds_mla", "rope": "interleaved", "page_size": 4, "load_bytes": 32},
        {"rope_dim": 2, "rope": "neox", "write_q": False},
    ):
        source = render(KernelSpec(num_heads=3, **fields)).text  # type: ignore[arg-type]
        blocks = re.compile(r"^#ifdef __CUDACC__$(.*?)^#endif$", re.DOTALL | re.MULTILINE)
        hidden, visible = "".join(blocks.findall(source)), blocks.sub("", source)
        names |= set(re.findall(r"__forceinline__ [\w ]+? (\w+)\(", hidden))
        assert "asm" not in visible
        assert "mla_prepare(" in visible
    assert names == PRIMITIVES


def test_artifacts_of_the_emulation_verify_and_carry_the_rendered_source() -> None:
    spec = make(1).spec
    artifact = emulated_artifact(spec)
    artifact.verify(arch="sm_90a", spec=spec.to_dict())
    assert carried_source(artifact.cubin) == ("bf16", render(spec).text)


def grid(spec: KernelSpec, tokens: int, *, surplus: bool, threads: int | None) -> LaunchConfig:
    """A grid for exactly these rows of these tokens, or one that reaches past both."""
    launch = render(spec).launch
    rows, threads = launch["rows_per_token"], threads or launch["threads_per_row"]
    if not surplus:
        return LaunchConfig((rows, tokens, 1), (threads, 1, 1))
    return LaunchConfig((rows // 2 + 1, tokens // 3 + 1, 1), (threads, 2, 3))


def launch_sabotaged(
    patch: pytest.MonkeyPatch, call: Call, line: str, instead: str, *, surplus: bool = True, threads: int | None = None
) -> None:
    """Run a kernel with one line changed; it must be a fault, or right."""
    source = render(call.spec)
    assert source.text.count(line) == 1, f"{line!r} stands {source.text.count(line)} times in the source"
    changed = KernelSource(call.spec, source.text.replace(line, instead))
    device = Emulation()
    device.handle = lambda spec: KernelHandle(emulated_artifact(spec, changed), device.driver)  # type: ignore[assignment]
    config = grid(call.spec, len(call.lead), surplus=surplus, threads=threads)
    patch.setattr("mlaprep.clients.handle.plan_launch", lambda *_: config)
    compare(run(call, device, fused=True), expected(call), "kernel")


WAIT = "  wait_for_predecessors(source, target);\n"
GUARD = "  if (head >= kRowsPerToken || token >= tokens) return;\n"
STORE = "store_codes(target,"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "far": {"loc": [3, 2**20, 1, 0]},
    "negative": {"loc": [3, -400, 1, 0]},
    "turned": {"rope": "neox", "positions": torch.tensor([0, 2**40, -7, 1])},
    "padded": {"pad_heads_to": 5},
    "tiled": {"layout": "ds_mla", "rank": 128},
}


def small(options: str) -> Call:
    chosen = {"rank": 16, "rope_dim": 8, "heads": 2, **OPTIONS[options]}
    return make(4, chosen.pop("heads"), chosen.pop("rank"), chosen.pop("rope_dim"), **chosen)


@pytest.mark.parametrize(
    ("options", "line", "instead", "fault"),
    [
        ("plain", WAIT, "", "memory touched ahead of the wait"),
        ("plain", WAIT, "  release_dependents();\n" + WAIT, "release of dependents ahead of the wait"),
        ("plain", WAIT, WAIT + "  release_dependents();\n", "load behind the release of dependents"),
        ("plain", GUARD, "", "outside every buffer"),
        ("plain", GUARD, "  if (head >= kRowsPerToken) return;\n", "outside every buffer"),
        ("far", "return row < cache_rows ? row : -1;", "return row;", "store outside every buffer"),
        ("negative", "if (row < 0) return;", "", "store outside every buffer"),
        ("plain", "load_elements(source);", "load_elements(source + 1);", "misaligned load"),
        ("plain", STORE, "store_codes(target + 4,", "misaligned store"),
        ("plain", STORE, "store_codes((unsigned char*)source,", "store into an input"),
        ("turned", "position < 0 ? 0 :", "", "load outside every buffer"),
        ("turned", "position < cos_sin_rows ? position : cos_sin_rows - 1", "position", "load outside every buffer"),
        ("padded", "head >= kNumHeads && is_query", "false", "load outside every buffer"),
        ("tiled", "    if (column < kLoraRank) {\n", "    if (column < kLoraRank - 8) {\n", "not all of its threads"),
        ("tiled", "column / kTile * 4, &bits", "column / kTile * 4 + 1, &bits", "misaligned store"),
        ("tiled", " || column >= kRowWidth", "", "outside every buffer"),
    ],
)
def test_a_wrong_kernel_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, options: str, line: str, instead: str, fault: str
) -> None:
    with pytest.raises(EmulationFault, match=fault):
        launch_sabotaged(monkeypatch, small(options), line, instead)


@pytest.mark.parametrize("surplus", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_right_kernel_is_none(monkeypatch: pytest.MonkeyPatch, options: str, surplus: bool) -> None:
    launch_sabotaged(monkeypatch, small(options), "  // One address and one load", "  //", surplus=surplus)


def test_a_tile_that_straddles_two_warps_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmulationFault, match="straddles two warps"):
        launch_sabotaged(monkeypatch, small("tiled"), "  // One address and one load", "  //", threads=17)


def test_a_source_that_does_not_compile_says_so() -> None:
    with pytest.raises(AssertionError, match="g\\+\\+ refuses the rendered source"):
        compile_source("no C++", "bf16")
