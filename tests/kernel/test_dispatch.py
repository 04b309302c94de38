"""prepare and fused_prepare: one kernel for every batch size, and the chain's bytes where there is none."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel.calls import E4M3, Call, expected, make, moved, values
from kernel.devices import Gpu
from kernel.memory import Guarded

from mlaprep.clients import fused_prepare, prepare
from mlaprep.clients.dispatch import _spec
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.operands import check_operands
from mlaprep.templates.spec import KernelSpec

T, H, R, D = 5, 3, 32, 16


def given(call: Call, place: torch.device) -> tuple[tuple[Any, ...], torch.Tensor, dict[str, Any]]:
    """Positional operands on a device, the pool's whole buffer, and the options."""
    whole, cache = call.pool.allocate(place)
    sources = [moved(getattr(call, name), place) for name in ("q_nope", "q_rope", "k_nope", "k_rope", "loc")]
    scales = {name: moved(getattr(call, name), place) for name in ("q_scale_inv", "kv_scale_inv")}
    rules = {name: getattr(call, name) for name in ("reserved_slot", "dcp_world", "dcp_rank", "dcp_interleave")}
    return (*sources[:4], cache, sources[4]), whole, scales | rules


def spec_of(call: Call) -> KernelSpec | None:
    operands, _, options = given(call, torch.device("cpu"))
    scales = {name: options[name] for name in ("q_scale_inv", "kv_scale_inv")}
    reserved = call.reserved_slot is not None
    return _spec(check_operands(*operands, **scales), reserved, call.dcp_world, call.dcp_interleave)


def test_on_the_cpu_the_chain_answers() -> None:
    call = make(T, H, R, D, loc=[3, -1, 8, 99, 0], q_scale_inv=torch.tensor(2.0), dcp_world=2, dcp_rank=1)
    operands, whole, options = given(call, torch.device("cpu"))
    assert fused_prepare(*operands, **options) is None
    assert (whole == call.pool.poison).all()
    query = prepare(*operands, **options)
    assert query.dtype == E4M3
    assert torch.equal(query.view(torch.uint8), expected(call).query)
    assert torch.equal(whole, expected(call).pool)


def test_B017_one_kernel_for_every_batch_size_and_every_stride() -> None:
    specs = {spec_of(make(tokens, H, R, D, rows=64)) for tokens in (0, 1, 2, 17, 64)}
    one = make(1, H, R, D)
    specs.add(spec_of(replace(one, k_nope=values(R, seed=1).as_strided((1, R), (7, 1)))))
    specs.add(spec_of(replace(one, q_nope=values(4096, seed=2).as_strided((1, H, R), (9, 1000, 1)))))
    specs.add(spec_of(make(T, H, R, D, pitch=64)))
    assert len(specs) == 1


def test_the_spec_of_a_call_names_what_it_needs() -> None:
    call = make(T, H, R, D, loc_dtype=torch.int32, dtype="fp16", kv_scale_inv=torch.tensor(1.0), reserved_slot=0)
    assert spec_of(call) == call.spec
    sharded = make(T, H, R, D, dcp_world=4, dcp_interleave=64)
    assert spec_of(sharded) == sharded.spec
    assert spec_of(replace(make(T, H, R, D), dcp_interleave=64)) == make(T, H, R, D).spec


@pytest.mark.parametrize("pitch", [56, 64])
def test_the_spec_follows_what_stores_the_pool_allows(pitch: int) -> None:
    spec = spec_of(make(T, H, R, D, pitch=pitch))
    assert spec is not None
    assert spec.elements_per_thread == (16 if pitch % 16 == 0 else 8)


def test_shapes_of_no_kernel_have_no_spec() -> None:
    for shape in ((0, R, D), (257, R, D), (H, 20, D), (H, R, 4), (H, 1040, D)):
        assert spec_of(make(T, *shape)) is None


@dataclass
class Supply:
    """Stands for a client: hands out the test device's kernels and counts."""

    gpu: Gpu
    asked: int = 0

    def serving_handle(self, spec: KernelSpec, device: int) -> KernelHandle:
        assert device == self.gpu.device.index
        self.asked += 1
        return self.gpu.handle(spec)


CALLS = {
    "packed": (make(T, H, R, D), True),
    "sharded, scaled, reserved": (
        make(4, H, R, D, loc=[0, 5, 6, 9], dcp_world=4, dcp_rank=1, reserved_slot=5, q_scale_inv=torch.tensor(3.0)),
        True,
    ),
    "pitch of 8": (make(T, H, R, D, pitch=56), True),
    "pitch of 1": (make(T, H, R, D, pitch=49), False),
    "pool off 8 bytes": (replace(make(T, H, R, D), pool=Guarded((16, 48), (48, 1), offset=3)), False),
    "last stride 2": (replace(make(T, H, R, D), q_nope=values(T, H, 2 * R)[..., ::2]), False),
    "strided loc": (replace(make(T, H, R, D), loc=torch.arange(2 * T)[::2]), False),
    "width of no kernel": (make(T, H, 20, D), False),
    "empty": (make(0, H, R, D), True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_prepare_gives_the_same_bytes_fused_or_not(gpu: Gpu, name: str) -> None:
    call, covered = CALLS[name]
    wanted = expected(call)
    operands, whole, options = given(call, gpu.device)
    query = fused_prepare(*operands, **options, client=Supply(gpu))
    assert (query is not None) == covered
    if not covered:
        assert (whole == call.pool.poison).all()
    query = prepare(*operands, **options, client=Supply(gpu))
    assert torch.equal(query.view(torch.uint8).cpu(), wanted.query)
    assert torch.equal(whole.cpu(), wanted.pool)
