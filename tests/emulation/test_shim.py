"""The shim itself: its conversions against other implementations, and that it notices what a kernel must not do."""

import ctypes
import re
from typing import Any

import pytest
import torch
from emulation.artifact import carried_source, emulated_artifact
from emulation.compile import compile_source
from emulation.driver import TYPES, EmulatedDriver, EmulatedLauncher, EmulationFault
from kernel import oracle
from kernel.calls import DTYPES, make

from mlaprep.clients.plan import LaunchConfig
from mlaprep.templates.render import render
from mlaprep.templates.signature import kernel_parameters

PRIMITIVES = {
    "load_words4",
    "load_index",
    "load_float",
    "store_words2",
    "store_words4",
    "wait_for_predecessors",
    "release_dependents",
    "element_to_float",
    "float_to_e4m3x4",
}


def library(dtype: str = "bf16") -> ctypes.CDLL:
    loaded = compile_source(render(make(1, dtype=dtype).spec).text, dtype)
    loaded.emulated_e4m3.argtypes, loaded.emulated_e4m3.restype = (ctypes.c_float,), ctypes.c_uint
    loaded.emulated_element.argtypes, loaded.emulated_element.restype = (ctypes.c_ushort,), ctypes.c_float
    return loaded


def test_the_encoder_gives_the_literal_table() -> None:
    encode = library().emulated_e4m3
    for value, code in oracle.LITERAL.items():
        assert encode(value) == code, value
        assert encode(-value) == code | 0x80, value
    assert encode(float("nan")) == 0x7F
    assert encode(-float("nan")) == 0x7F


def test_the_encoder_agrees_with_the_oracle_around_every_midpoint() -> None:
    encode = library().emulated_e4m3
    centre = oracle._midpoints().float()
    near = torch.cat([centre, centre.nextafter(torch.tensor(torch.inf)), centre.nextafter(torch.tensor(0.0))])
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(7)).int().view(torch.float32)
    values = torch.cat([near, -near, bits])
    assert [encode(value) for value in values.tolist()] == oracle.e4m3(values).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_elements_become_the_floats_that_torch_has(dtype: str) -> None:
    decode = library(dtype).emulated_element
    patterns = torch.arange(0, 2**16, 7, dtype=torch.int32)
    wanted = patterns.to(torch.int16).view(DTYPES[dtype]).float()
    found = torch.tensor([decode(pattern) for pattern in patterns.tolist()])
    assert torch.equal(found.isnan(), wanted.isnan())
    tame = ~wanted.isnan()
    assert torch.equal(found[tame].view(torch.int32), wanted[tame].view(torch.int32))


@pytest.mark.parametrize("pdl", [True, False])
def test_the_shim_supplies_primitives_and_nothing_of_the_kernel(pdl: bool) -> None:
    """All that __CUDACC__ hides is the primitives by name: no address, slot or grid arithmetic."""
    scales = {"q_scale_inv": torch.tensor(1.0), "kv_scale_inv": torch.tensor(1.0)}
    source = render(make(1, reserved_slot=0, dcp_world=4, **scales, fields={"pdl": pdl}).spec).text
    blocks = re.compile(r"^#ifdef __CUDACC__$(.*?)^#endif$", re.DOTALL | re.MULTILINE)
    hidden, visible = "".join(blocks.findall(source)), blocks.sub("", source)
    names = set(re.findall(r"__forceinline__ [\w ]+? (\w+)\(", hidden))
    assert names == PRIMITIVES - (set() if pdl else {"wait_for_predecessors", "release_dependents"})
    assert "asm" not in visible
    assert "mla_prepare(" in visible


def test_artifacts_of_the_emulation_verify_and_carry_the_rendered_source() -> None:
    spec = make(1).spec
    artifact = emulated_artifact(spec)
    artifact.verify(arch="sm_90a", spec=spec.to_dict())
    assert carried_source(artifact.cubin) == ("bf16", render(spec).text)


EXACT = LaunchConfig((3, 4, 1), (3, 1, 1))
SURPLUS = LaunchConfig((2, 2, 1), (3, 2, 3))
"""A grid for 3 rows of 4 tokens, and one that reaches past both."""


def launch_sabotaged(line: str, instead: str, config: LaunchConfig, **options: Any) -> None:
    """Launch a kernel with one line changed, on buffers of its own."""
    call, driver = make(4, 2, 16, 8, **options), EmulatedDriver()
    source = render(call.spec).text
    assert source.count(line) == 1, f"{line!r} stands {source.count(line)} times in the source"
    cache = call.pool.allocate(torch.device("cpu"))[1]
    out = torch.empty(4, 2, 24, dtype=torch.uint8)
    tensors = {name: getattr(call, name) for name in ("q_nope", "q_rope", "k_nope", "k_rope", "loc")}
    values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values |= {"q_out": out.data_ptr(), "kv_cache": cache.data_ptr()}
    values |= {"tokens": 4, "cache_rows": 16, "cache_row_stride": 24}
    values |= {f"{name}_token_stride": tensors[name].stride(0) for name in ("q_nope", "q_rope", "k_nope", "k_rope")}
    values |= {f"{name}_head_stride": tensors[name].stride(1) for name in ("q_nope", "q_rope")}
    parameters = [(parameter.name, parameter.type) for parameter in kernel_parameters(call.spec)]
    launcher = EmulatedLauncher(
        driver, compile_source(source.replace(line, instead), "bf16"), [TYPES[kind] for _, kind in parameters], pdl=True
    )
    with driver.memory(list(tensors.values()), [out, cache]):
        launcher(config, 0, [values[name] for name, _ in parameters])


WAIT = "  wait_for_predecessors(source, target);\n"
GUARD = "  if (head >= kRowsPerToken || token >= tokens) return;\n"
STORE = "store_codes(target,"


@pytest.mark.parametrize(
    ("line", "instead", "options", "fault"),
    [
        (WAIT, "", {}, "memory touched ahead of the wait"),
        (WAIT, "  release_dependents();\n" + WAIT, {}, "release of dependents ahead of the wait"),
        (WAIT, WAIT + "  release_dependents();\n", {}, "load behind the release of dependents"),
        (GUARD, "", {}, "outside every buffer"),
        (GUARD, "  if (head >= kRowsPerToken) return;\n", {}, "outside every buffer"),
        ("return row < cache_rows ? row : -1;", "return row;", {"loc": [3, 2**20, 1, 0]}, "store outside every buffer"),
        ("if (row < 0) return;", "", {"loc": [3, -400, 1, 0]}, "store outside every buffer"),
        ("load_elements(source);", "load_elements(source + 1);", {}, "misaligned load"),
        (STORE, "store_codes(target + 4,", {}, "misaligned store"),
        (STORE, "store_codes((unsigned char*)source,", {}, "store into an input"),
    ],
)
def test_a_wrong_kernel_is_a_fault(line: str, instead: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(EmulationFault, match=fault):
        launch_sabotaged(line, instead, SURPLUS, **options)


@pytest.mark.parametrize("config", [EXACT, SURPLUS])
def test_a_right_kernel_is_none(config: LaunchConfig) -> None:
    launch_sabotaged(WAIT, WAIT, config)


def test_a_source_that_does_not_compile_says_so() -> None:
    with pytest.raises(AssertionError, match="g\\+\\+ refuses the rendered source"):
        compile_source("no C++", "bf16")
