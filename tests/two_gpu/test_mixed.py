"""Operands on several devices in one call: refused by name, before anything is loaded or written."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact

from mlaprep.clients import KernelClient, fused_prepare, prepare
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.spec import KernelSpec

SPEC = KernelSpec(num_heads=3, rope="neox", q_scale="scalar", kv_scale="scalar")
T, H, R, D, S = 4, 3, 512, 64, 16
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
OPERANDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "q_nope": ((T, H, R), BF16),
    "q_rope": ((T, H, D), BF16),
    "k_nope": ((T, R), BF16),
    "k_rope": ((T, D), BF16),
    "kv_cache": ((S, R + D), torch.uint8),
    "loc": ((T,), torch.int64),
    "positions": ((T,), torch.int64),
    "cos_sin_cache": ((8, D), F32),
    "q_scale_inv": ((), F32),
    "kv_scale_inv": ((), F32),
    "out": ((T, H, R + D), E4M3),
}


class Untouched:
    """A driver that nothing may reach."""

    device_type = "cuda"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the driver was asked for {name}")


@dataclass(frozen=True)
class Devices:
    rest: torch.device
    odd: torch.device
    memory: bool
    """False where tensors have a device and no memory, as on a machine without a GPU."""


@pytest.fixture(
    params=[
        pytest.param(("cuda:1", "cuda:0", False), id="fake"),
        pytest.param(("cuda:0", "cuda:1", False), id="fake-swapped"),
        pytest.param(("cuda:0", "cpu", True), id="one", marks=pytest.mark.gpu),
        pytest.param(("cuda:1", "cuda:0", True), id="two", marks=pytest.mark.two_gpu),
        pytest.param(("cuda:0", "cuda:1", True), id="two-swapped", marks=pytest.mark.two_gpu),
    ]
)
def devices(request: pytest.FixtureRequest) -> Devices:
    rest, odd, memory = request.param
    if not memory:
        request.getfixturevalue("no_memory")
    return Devices(torch.device(rest), torch.device(odd), memory)


@pytest.mark.parametrize("entry", ["handle", "covers", "prepare", "fused_prepare", "chain"])
@pytest.mark.parametrize("name", OPERANDS)
def test_B058_mixed_devices_are_refused_by_name(devices: Devices, name: str, entry: str) -> None:
    odd, rest = devices.odd, devices.rest
    tensors = {
        other: torch.empty(shape, dtype=dtype, device=odd if other == name else rest)
        for other, (shape, dtype) in OPERANDS.items()
    }
    handle = KernelHandle(emulated_artifact(SPEC), Untouched())  # type: ignore[arg-type]
    client = KernelClient(on_miss="error", offline=True)
    cache = tensors["kv_cache"]
    if devices.memory:
        cache.fill_(7)
    # With q_nope elsewhere it is the first of the others that differs from it.
    if name == "q_nope":
        words = f"^q_rope: found on {rest}; q_nope is on {odd};"
    elif name.endswith("scale_inv"):
        words = f"^{name}: found on {odd}; pass it on {rest}"
    else:
        words = f"^{name}: found on {odd}; q_nope is on {rest};"
    call, options = {
        "handle": (handle, {}),
        "covers": (handle.covers, {}),
        "prepare": (prepare, {"rope": "neox", "client": client}),
        "fused_prepare": (fused_prepare, {"rope": "neox", "client": client}),
        "chain": (prepare_chain, {"rope": "neox"}),
    }[entry]
    positional = [tensors.pop(key) for key in ("q_nope", "q_rope", "k_nope", "k_rope", "kv_cache", "loc")]
    with pytest.raises(ValueError, match=words):
        call(*positional, **tensors, **options)  # type: ignore[operator]
    assert client.stats() == KernelClient(offline=True).stats()
    if devices.memory:
        assert (cache == 7).all()
