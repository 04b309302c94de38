"""Sizes at their ends, and kernels that write only one side."""

import pytest
import torch
from kernel.calls import E4M3, Call, make, values
from kernel.checks import check, expected, run
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec


def query_only(call: Call) -> Call:
    left_out = dict.fromkeys(("k_nope", "k_rope", "loc", "pool", "kv_scale_inv", "reserved_slot"))
    return Call(**{**vars(call), **left_out})


def cache_only(call: Call) -> Call:
    return Call(**{**vars(call), **dict.fromkeys(("q_nope", "q_rope", "q_scale_inv", "out"))})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rope_dim", [0, 8, 16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("pdl", [True, False])
def test_every_combination_of_types(
    device: KernelDevice, dtype: str, loc_dtype: torch.dtype, rope_dim: int, heads: int, pdl: bool
) -> None:
    loc = [4, -1, 0, 17, 9, 2, 15]
    check(make(7, heads, 32, rope_dim, loc=loc, loc_dtype=loc_dtype, dtype=dtype, fields={"pdl": pdl}), device)


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 96, 128, 256])
def test_head_counts_of_models(device: KernelDevice, heads: int) -> None:
    check(make(3, heads, 512, 64), device)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 257])
def test_batch_sizes_share_one_kernel(device: KernelDevice, tokens: int) -> None:
    call = make(tokens, 5, 128, 64, rows=300)
    assert call.spec == make(1, 5, 128, 64).spec
    check(call, device)


def test_B009_an_empty_batch_launches_nothing(device: KernelDevice) -> None:
    call = make(0, 12, 512, 64)
    before = device.launches()
    result = check(call, device)
    assert device.launches() == before
    assert result.query is not None
    assert result.query.shape == (0, 12, 576)
    check(make(2, 12, 512, 64), device)


def test_B009_an_empty_batch_of_freshly_made_tensors(device: KernelDevice) -> None:
    """Their data_ptr() is 0."""
    place = device.device
    query = device.handle(make(1, 12, 512, 64).spec)(
        *(torch.empty(0, *shape, dtype=torch.bfloat16, device=place) for shape in ((12, 512), (12, 64), (512,), (64,))),
        torch.empty(0, 576, dtype=torch.uint8, device=place),
        torch.empty(0, dtype=torch.int64, device=place),
    )
    assert query.shape == (0, 12, 576)
    assert query.dtype == E4M3


def test_B009_no_heads_is_no_kernel_and_still_right_in_the_chain(device: KernelDevice) -> None:
    with pytest.raises(SpecError):
        KernelSpec(num_heads=0)
    call = make(3, 0, 32, 16)
    handle = device.handle(make(1, 1, 32, 16).spec)
    tensors = [tensor.to(device.device) for tensor in (call.q_nope, call.q_rope, call.k_nope, call.k_rope)]
    cache = call.pool.allocate(device.device)[1]
    with pytest.raises(NotCovered, match="0 heads"):
        handle(*tensors, cache, call.loc.to(device.device))
    result = run(call, device, fused=False)
    assert result.query.shape == (3, 0, 48)
    assert torch.equal(result.pool, expected(call).pool)


@pytest.mark.parametrize("rope_dim", [0, 8, 16])
def test_query_only(device: KernelDevice, rope_dim: int) -> None:
    check(query_only(make(6, 3, 32, rope_dim, q_scale_inv=torch.tensor(0.5))), device)


@pytest.mark.parametrize("rope_dim", [0, 8, 16])
def test_cache_only(device: KernelDevice, rope_dim: int) -> None:
    loc = [3, -1, 0, 7, 99, 4]
    call = make(6, 3, 32, rope_dim, loc=loc, kv_scale_inv=torch.tensor(0.5), reserved_slot=7, dcp_world=2, dcp_rank=1)
    check(cache_only(call), device)


def test_one_sided_kernels_refuse_nothing_they_do_not_read(device: KernelDevice) -> None:
    call = make(2, 3, 32, 8)
    place = device.device
    q_nope, q_rope, k_nope, k_rope = (
        tensor.to(place) for tensor in (call.q_nope, call.q_rope, call.k_nope, call.k_rope)
    )
    cache, loc = call.pool.allocate(place)[1], call.loc.to(place)
    with device.memory([q_nope, q_rope], []):
        query = device.handle(query_only(call).spec)(q_nope, q_rope, "no tensor", None, None, None)
    assert torch.equal(query.view(torch.uint8).cpu(), expected(call).query)
    with device.memory([k_nope, k_rope, loc], [cache]):
        assert device.handle(cache_only(call).spec)(None, object(), k_nope, k_rope, cache, loc) is None
    assert torch.equal(cache.cpu(), call.pool.inside(expected(call).pool))


def test_nothing_to_write_is_refused() -> None:
    call = make(1)
    with pytest.raises(ValueError, match=r"^write_q: "):
        prepare_chain(call.q_nope, None, call.k_nope, None, None, call.loc, write_kv=False, write_q=False)
    with pytest.raises(ValueError, match=r"^out: "):
        prepare_chain(None, None, call.k_nope, None, None, call.loc, write_q=False, out=torch.zeros(1).to(E4M3))


def test_outputs_do_not_keep_what_was_there(device: KernelDevice) -> None:
    """Two poisons, one result: every byte of a query is written, none of a skipped row."""
    for poison in (0x00, 0xFF):
        pool = Guarded.pool(16, 48, 64, poison=poison)
        out = Guarded.packed(4, 3, 48, poison=poison)
        check(make(4, 3, 32, 16, loc=[1, -1, 16, 15], pool=pool, out=out), device)


def test_calls_leave_their_inputs_alone(device: KernelDevice) -> None:
    call = make(4)
    inputs = {name: getattr(call, name).clone() for name in ("q_nope", "q_rope", "k_nope", "k_rope", "loc")}
    check(call, device)
    for name, before in inputs.items():
        assert torch.equal(before.view(torch.uint8), getattr(call, name).view(torch.uint8))


def test_a_batch_larger_than_the_chains_chunk(monkeypatch: pytest.MonkeyPatch, device: KernelDevice) -> None:
    monkeypatch.setattr("mlaprep.clients.reference._CHUNK_ELEMENTS", 3 * 3 * 32)
    check(make(10), device)


def test_many_tokens_of_many_heads(device: KernelDevice) -> None:
    call = make(0, 128, 16, 0, rows=600)
    tokens = 509
    many = {
        "q_nope": values(tokens, 128, 16, seed=50),
        "k_nope": values(tokens, 16, seed=51),
        "loc": torch.randperm(600, generator=torch.Generator().manual_seed(52))[:tokens],
    }
    check(Call(**{**vars(call), **many}), device)
