"""What only a GPU shows of the variants: graphs, no waiting, batches too large for the oracle, far addresses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel.calls import E4M3, NAMES, TENSORS, Call, angles, make, moved, paged_pool, values
from kernel.checks import Result, chain_options, compare, expected
from kernel.devices import Gpu

from mlaprep.clients.reference import prepare_chain

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

T, H, R, D, S = 6, 12, 512, 64, 64
SLOTS = [[5, 0, 9, 63, 17, 1], [-1, 64, 2**40 + 17, 3, -9, 62], [-1] * 6, [11, 10, 9, 8, 7, 6]]


def variant(layout: str, rope: str, **options: Any) -> Call:
    return make(T, H, R, D, rows=S, layout=layout, rope=rope, **options)


VARIANTS = {
    "fp8, neox": variant("fp8", "neox", kv_scale_inv=torch.tensor(0.5)),
    "fp8-q16, a scale a token": variant("fp8-q16", "interleaved", q_scale_inv=torch.linspace(0.1, 3, T)),
    "same, fp16, padded": variant("same", "neox", dtype="fp16", pad_heads_to=16),
    "same, ranks": variant("same", "none", dcp_world=2, dcp_rank=1, dcp_interleave=2),
    "ds_mla": variant("ds_mla", "interleaved", reserved_slot=9),
    "ds_mla, pages": replace(
        variant("ds_mla", "neox", tile_scale="pow2", query_dtype="input"),
        pool=paged_pool("ds_mla", 4, 16, R, D, gap=656),
    ),
    "fp8, pages": replace(variant("fp8", "none"), pool=paged_pool("fp8", 4, 16, R, D, gap=64)),
}
NAMED = pytest.mark.parametrize("name", VARIANTS)


class Bound:
    """A call's operands on the device, and one way to make it."""

    def __init__(self, gpu: Gpu, call: Call, way: str) -> None:
        self.call = call
        self.tensors = {name: moved(getattr(call, name), gpu.device) for name in TENSORS}
        self.whole, self.cache = self.pool(gpu.device)
        self.make = gpu.handle(call.spec) if way == "kernel" else prepare_chain
        self.options: dict[str, Any] = {"reserved_slot": call.reserved_slot, "dcp_rank": call.dcp_rank}
        self.options |= {} if way == "kernel" else chain_options(call)

    def pool(self, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.call.pool is not None
        whole, view = self.call.pool.allocate(place)
        return whole, view.view(E4M3 if self.call.pool.itemsize == 1 else self.call.lead.dtype)

    def __call__(self, cache: torch.Tensor | None = None) -> torch.Tensor:
        cache = self.cache if cache is None else cache
        query = self.make(kv_cache=cache, **self.tensors, **self.options)
        assert query is not None
        return query

    def refill(self, call: Call) -> None:
        """The values of another call of the same shapes, in place."""
        for name, tensor in self.tensors.items():
            if tensor is not None:
                tensor.copy_(getattr(call, name))
        self.whole.fill_(call.pool.poison)


def reseeded(call: Call, turn: int) -> Call:
    other = make(T, H, R, D, dtype=NAMES[call.lead.dtype], rope=call.rope, seed=100 * turn)
    changes = {name: getattr(other, name) for name in ("q_nope", "q_rope", "k_nope", "k_rope")}
    if call.rope != "none":
        changes["positions"] = torch.tensor([turn, 5, -1, 2**40, 3, 0])
    return replace(call, loc=torch.tensor(SLOTS[turn]), **changes)


@NAMED
@pytest.mark.parametrize("way", ["kernel", "chain"])
def test_a_captured_graph_follows_values_changed_in_place(gpu: Gpu, name: str, way: str) -> None:
    bound = Bound(gpu, VARIANTS[name], way)
    with torch.cuda.stream(torch.cuda.Stream()):
        bound(bound.pool(gpu.device)[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = bound()
    for turn in range(len(SLOTS)):
        call = reseeded(bound.call, turn)
        bound.refill(call)
        query.view(torch.uint8).fill_(0x5A)
        graph.replay()
        torch.cuda.synchronize()
        compare(Result(query.view(torch.uint8).cpu(), None, bound.whole.cpu()), expected(call), way)


@NAMED
def test_the_chain_never_waits_for_the_device(gpu: Gpu, name: str) -> None:
    bound = Bound(gpu, VARIANTS[name], "chain")
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NAMED
@pytest.mark.parametrize("tokens", [133, 4097])
def test_batches_too_large_for_the_oracle(gpu: Gpu, name: str, tokens: int) -> None:
    """Kernel against chain on the device, both proved on small batches."""
    call = VARIANTS[name]
    dtype, rows = NAMES[call.lead.dtype], (tokens // 16 + 1) * 16
    large = {
        "q_nope": values(tokens, H, R, dtype=dtype, seed=1),
        "q_rope": values(tokens, H, D, dtype=dtype, seed=2),
        "k_nope": values(tokens, R, dtype=dtype, seed=3),
        "k_rope": values(tokens, D, dtype=dtype, seed=4),
        "loc": torch.randperm(rows, generator=torch.Generator().manual_seed(5))[:tokens] - 3,
    }
    if call.rope != "none":
        large["positions"] = torch.randint(-2, 300, (tokens,), generator=torch.Generator().manual_seed(6))
        large["cos_sin_cache"] = angles(256, D)
    if call.q_scale_inv is not None:
        large["q_scale_inv"] = torch.linspace(0.01, 4, tokens)
    width = call.pool.shape[-1]
    pool = replace(call.pool, shape=(rows, width))
    if len(call.pool.shape) == 3:
        pool = replace(call.pool, shape=(rows // 16, 16, width))
    call = replace(call, pool=pool, **large)
    kernel, chain = Bound(gpu, call, "kernel"), Bound(gpu, call, "chain")
    assert torch.equal(kernel().view(torch.uint8), chain().view(torch.uint8))
    assert torch.equal(kernel.whole, chain.whole)
    assert (kernel.whole != call.pool.poison).any()


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("layout", ["fp8", "same"])
def test_pools_beyond_32_bits(gpu: Gpu, layout: str, gap: int) -> None:
    """Rows whose offsets pass 2**32 elements, evenly spaced or in pages; every other byte stays as it was."""
    page, width = 64, R + D
    pages = 2**32 // (page * width) + 16
    rows = pages * page
    if torch.cuda.mem_get_info()[0] < 2**35:
        pytest.skip("needs 32 GiB of free GPU memory")
    near = make(3, 2, R, D, rows=4, layout=layout, loc=[3, 1, 2])
    wanted = expected(near)
    fields = {"page_size": page if gap else 1}
    far = replace(near, loc=torch.tensor([rows - 1, 1, rows - page]), fields=fields)
    dtype = torch.bfloat16 if layout == "same" else torch.uint8
    flat = torch.zeros(pages * (page * width + gap), dtype=dtype, device=gpu.device)
    cache = flat.as_strided((pages, page, width), (page * width + gap, width, 1))
    sources = {name: moved(getattr(far, name), gpu.device) for name in ("q_nope", "q_rope", "k_nope", "k_rope", "loc")}
    for way, options in ((gpu.handle(far.spec), {}), (prepare_chain, {"layout": layout})):
        query = way(kv_cache=cache, **sources, **options)
        assert torch.equal(query.view(torch.uint8).cpu(), wanted.query)
        for row, slot in zip(far.loc.tolist(), near.loc.tolist(), strict=True):
            place = cache[row // page, row % page]
            assert torch.equal(place.view(torch.uint8).cpu(), near.pool.row(wanted.pool, slot).view(torch.uint8))
            place.zero_()
        assert not flat.any()
