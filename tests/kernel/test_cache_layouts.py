"""Cache layouts: rows of every kind, on every rank, in pages that lie where they may, and heads that are padding."""

import itertools
from dataclasses import replace

import pytest
import torch
from kernel import oracle
from kernel.calls import Call, make, paged_pool, pool_of, values
from kernel.checks import check, compare, every_width, expected, run
from kernel.devices import Emulation, KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.reference import write_rows

LAYOUTS = pytest.mark.parametrize("layout", ["fp8", "fp8-q16", "same", "ds_mla"])
R, D = 128, 16


@LAYOUTS
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pdl", [True, False])
def test_every_layout_and_dtype(device: KernelDevice, layout: str, dtype: str, pdl: bool) -> None:
    loc = [4, -1, 0, 17, 9, 2, 15]
    check(make(7, 3, R, D, layout=layout, dtype=dtype, loc=loc, fields={"pdl": pdl}), device)


@LAYOUTS
@pytest.mark.parametrize("side", ["query", "cache"])
@pytest.mark.parametrize("rope_dim", [0, 4, 16])
def test_every_layout_one_side_at_a_time(device: KernelDevice, layout: str, side: str, rope_dim: int) -> None:
    call = make(5, 3, R, rope_dim, layout=layout)
    absent = ("k_nope", "k_rope", "loc", "pool") if side == "query" else ("q_nope", "q_rope")
    check(replace(call, **dict.fromkeys(absent)), device)


@LAYOUTS
@pytest.mark.parametrize("rope_dim", [4, 8, 12, 16, 20])
def test_every_width_of_thread(device: KernelDevice, layout: str, rope_dim: int) -> None:
    pitch = -(-(R + 4 + 2 * rope_dim) // 16) * 16
    call = make(4, 3, R, rope_dim, layout=layout, pitch=pitch)
    check(call, device, *every_width(call))


@pytest.mark.parametrize("layout", ["fp8", "fp8-q16", "same"])
@pytest.mark.parametrize("rope_dim", [2, 6])
def test_two_elements_a_thread(device: KernelDevice, layout: str, rope_dim: int) -> None:
    call = make(4, 3, 48, rope_dim, layout=layout, pad_heads_to=5)
    assert every_width(call) == [2]
    check(call, device)


@LAYOUTS
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4), (4, 64)])
def test_B012_ranks_together_write_each_slot_once_in_every_layout(
    device: KernelDevice, layout: str, world: int, interleave: int
) -> None:
    tokens = 40
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(world)).tolist()
    local = -(-tokens // (world * interleave)) * interleave
    whole = make(tokens, 1, R, D, rows=tokens, loc=slots, layout=layout)
    unsharded = expected(whole)
    for rank in range(world):
        sharded = {"dcp_world": world, "dcp_rank": rank, "dcp_interleave": interleave}
        call = replace(whole, pool=pool_of(layout, local, R, D), **sharded)
        result = check(call, device) if rank in (0, world - 1) else expected(call)
        assert torch.equal(result.query, unsharded.query)
        for slot in range(tokens):
            row = oracle.cache_row(slot, local, None, world, rank, interleave)
            if row is not None:
                assert torch.equal(call.pool.row(result.pool, row), whole.pool.row(unsharded.pool, slot))


@LAYOUTS
def test_slots_that_write_nothing_in_every_layout(device: KernelDevice, layout: str) -> None:
    loc = [-1, 3, 16, 2**31, 2**40 + 3, 0, 5]
    check(make(7, 2, R, D, layout=layout, loc=loc, reserved_slot=0), device)
    narrow = torch.tensor([-1, 3, 16, 2**31 - 1, -(2**31), 0, 5], dtype=torch.int32)
    check(replace(make(7, 2, R, D, layout=layout), loc=narrow), device)
    for rows in (0, 1):
        check(make(3, 2, R, D, layout=layout, rows=rows, loc=[1, 0, -1]), device)


@LAYOUTS
@pytest.mark.parametrize("page", [2, 5, 64])
def test_pages_that_lie_apart(device: KernelDevice, layout: str, page: int) -> None:
    """Poison between pages and between rows stays."""
    pool = paged_pool(layout, 3, page, R, D, pad=16, gap=48)
    loc = [0, page - 1, page, 3 * page - 1, 3 * page, -1, page + 1]
    call = replace(make(7, 2, R, D, layout=layout, loc=loc), pool=pool)
    assert call.spec.page_size == page
    check(call, device)
    strides = {"cache_page_stride": pool.stride[0], "cache_row_stride": pool.stride[1]}
    check(call.with_fields(**strides), device)
    with pytest.raises(NotCovered, match="kv_cache with a page stride"):
        run(call.with_fields(cache_page_stride=pool.stride[0] + 16), device, fused=True)


@LAYOUTS
def test_pages_whose_rows_alternate(device: KernelDevice, layout: str) -> None:
    """Rows of a page further apart than pages: the pool of one layer out of several."""
    base = pool_of(layout, 1, R, D)
    width = -(-base.shape[1] // 16) * 16
    pool = Guarded((4, 5, base.shape[1]), (width, 4 * width, 1), itemsize=base.itemsize)
    check(replace(make(4, 2, R, D, layout=layout, loc=[0, 19, 7, 12]), pool=pool), device)


def test_pages_on_ranks(device: KernelDevice) -> None:
    for rank in range(2):
        call = make(6, loc=[0, 3, 5, 9, 14, 40], dcp_world=2, dcp_rank=rank, dcp_interleave=2)
        check(replace(call, pool=paged_pool("fp8", 3, 4, 32, 16, gap=16)), device)


def test_an_interleave_that_breaks_a_page_is_refused(device: KernelDevice) -> None:
    call = replace(make(2, dcp_world=2, dcp_interleave=3), pool=paged_pool("fp8", 3, 4, 32, 16, gap=16))
    with pytest.raises(ValueError, match=r"^dcp_interleave: found 3, which does not divide .* 4 rows"):
        run(call, device, fused=False)


@pytest.mark.parametrize("layout", ["fp8", "same"])
def test_a_kernel_of_pages_takes_evenly_spaced_rows(device: KernelDevice, layout: str) -> None:
    for page in (0, 4, 8):
        check(make(5, layout=layout, page=page, fields={"page_size": 4}), device)
    single = replace(make(3, layout=layout, rows=4), pool=paged_pool(layout, 1, 4, 32, 16, gap=7))
    check(single, device)


def test_another_page_than_the_kernels_is_not_covered(device: KernelDevice) -> None:
    call = replace(make(3), pool=paged_pool("fp8", 4, 4, 32, 16, gap=16))
    with pytest.raises(NotCovered, match="pages of 4 rows, the kernel takes 8"):
        run(call.with_fields(page_size=8), device, fused=True)
    with pytest.raises(NotCovered, match="pages with gaps"):
        run(call.with_fields(page_size=1), device, fused=True)


@pytest.mark.parametrize("gap", [8, 4, 2, 1])
def test_pages_are_accessed_in_pieces_that_they_start_on(device: KernelDevice, gap: int) -> None:
    call = replace(make(4, loc=[0, 5, 6, 15]), pool=paged_pool("fp8", 4, 4, 32, 16, gap=gap))
    if gap > 1:
        assert call.spec.elements_per_thread == gap
        check(call, device)
    with pytest.raises(NotCovered, match="kv_cache with a page stride"):
        run(call.with_fields(elements_per_thread=16), device, fused=True)
    compare(run(call, device, fused=False), expected(call), "chain")


@LAYOUTS
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("written", [[], [1], [0, 1, 2, 3, 4]])
def test_rows_are_written_the_same_without_a_mask(layout: str, itemsize: int, written: list[int]) -> None:
    """The chain's way on a GPU, run here on the CPU: pages, odd strides, elements of either size."""
    for gap, pad in itertools.product((0, 3, 8), (0, 5, 8)):
        pool = Guarded.paged(3, 4, 24, 24 + pad, gap, itemsize=itemsize)
        whole, cache = pool.allocate(torch.device("cpu"))
        wanted, _ = pool.allocate(torch.device("cpu"))
        new = values(5, 24, seed=gap).view(torch.int16)
        new = new if itemsize == 2 else new.view(torch.uint8)[:, :24].contiguous()
        loc, mask = torch.tensor([2, 11, 0, 7, 5]), torch.zeros(5, dtype=torch.bool)
        mask[written] = True
        for token in written:
            pool.row(wanted, int(loc[token])).copy_(new[token])
        write_rows(cache, torch.where(mask, loc, 2**40 + 17), mask, new)
        assert torch.equal(whole, wanted)


@LAYOUTS
@pytest.mark.parametrize("pad", [4, 7, 16])
def test_padding_heads_are_zero(device: KernelDevice, layout: str, pad: int) -> None:
    for query_dtype in ("e4m3", "input") if layout == "ds_mla" else (None,):
        check(make(5, 3, R, D, layout=layout, pad_heads_to=pad, query_dtype=query_dtype), device)


@pytest.mark.parametrize("layout", ["fp8", "same"])
@pytest.mark.parametrize("poison", [0x00, 0xFF])
def test_padding_heads_of_the_callers_result(device: KernelDevice, layout: str, poison: int) -> None:
    itemsize = 2 if layout == "same" else 1
    out = Guarded((4, 6, 48), (6 * 64, 64, 1), poison=poison, itemsize=itemsize)
    fields = {"out_token_stride": "dynamic", "out_head_stride": "dynamic"}
    options = {"rope": "neox", "q_scale_inv": torch.tensor(0.5), "pad_heads_to": 6}
    call = make(4, 3, layout=layout, out=out, fields=fields, **options)
    wanted = check(call, device)
    assert (wanted.query[:, 3:] == 0).all()
    assert (wanted.query[:, :3] != 0).any()


def test_padding_of_one_head_of_one_token_and_of_none(device: KernelDevice) -> None:
    check(make(1, 1, pad_heads_to=2), device)
    check(make(0, 1, pad_heads_to=2), device)
    check(make(3, 3, pad_heads_to=3), device)
    check(replace(make(4, 1, pad_heads_to=256), k_nope=None, k_rope=None, loc=None, pool=None), device)
    without_heads = make(2, 0, pad_heads_to=4)
    assert (run(without_heads, device, fused=False).query == 0).all()


def out_of(layout: str, tokens: int, heads: int, offset: int, step: int) -> Call:
    width = 48 + step
    itemsize = 1 if layout == "fp8" else 2
    out = Guarded((tokens, heads, 48), (heads * width, width, 1), offset=offset, itemsize=itemsize)
    fields = {"out_token_stride": "dynamic", "out_head_stride": "dynamic"}
    return make(tokens, heads, layout=layout, out=out, fields=fields)


@pytest.mark.parametrize("layout", ["fp8", "fp8-q16", "same"])
@pytest.mark.parametrize(("offset", "step"), [(8, 0), (4, 0), (2, 0), (0, 8), (0, 4), (0, 2)])
def test_results_are_stored_in_pieces_that_they_start_on(
    device: KernelDevice, layout: str, offset: int, step: int
) -> None:
    call = out_of(layout, 4, 3, offset, step)
    piece = offset or step
    assert call.spec.elements_per_thread == (16 if layout != "fp8" and piece == 8 else piece)
    check(call, device)


@pytest.mark.parametrize(("offset", "step"), [(1, 0), (0, 1)])
def test_results_off_a_pair_are_left_to_the_chain(device: KernelDevice, offset: int, step: int) -> None:
    for layout in ("fp8", "same"):
        call = out_of(layout, 4, 3, offset, step)
        with pytest.raises(NotCovered, match="out "):
            run(call, device, fused=True)
        compare(run(call, device, fused=False), expected(call), "chain")


@LAYOUTS
def test_loads_of_32_bytes(emulation: Emulation, layout: str) -> None:
    """Nothing here runs them but the emulation; sources must then start on 32 bytes."""
    call = make(4, 3, R, 16, layout=layout, rope="interleaved", pitch=-(-(R + 36) // 16) * 16)
    call = replace(
        call, **{name: on_32_bytes(getattr(call, name)) for name in ("q_nope", "q_rope", "k_nope", "k_rope")}
    )
    check(call.with_fields(load_bytes=32), emulation, 16)
    shifted = replace(call, k_nope=on_32_bytes(call.k_nope, 8))
    with pytest.raises(NotCovered, match="k_nope at an address that is no multiple of 32 bytes"):
        run(shifted.with_fields(load_bytes=32), emulation, fused=True)


def on_32_bytes(tensor: torch.Tensor, elements: int = 0) -> torch.Tensor:
    """A copy that starts ``elements`` behind a multiple of 32 bytes."""
    room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    start = -room.data_ptr() % 32 // tensor.element_size() + elements
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
