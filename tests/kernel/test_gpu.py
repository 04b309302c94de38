"""What only a GPU shows: streams, graphs, memory that is never touched, many layouts, the driver's own refusals."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from kernel.calls import DTYPES, E4M3, Call, make, values
from kernel.checks import compare, expected, run
from kernel.devices import Gpu

from mlaprep.clients.errors import DriverError, KernelNotReady
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.plan import MAX_TOKENS, plan_launch
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

T, H, R, D, S = 6, 12, 512, 64, 64
POISON = 0x5A


class Batch:
    """Device buffers that a captured graph may hold on to."""

    def __init__(self, gpu: Gpu, tokens: int = T, seed: int = 0) -> None:
        call = make(tokens, H, R, D, rows=S, seed=seed)
        self.q_nope, self.q_rope, self.k_nope, self.k_rope, self.loc = (
            tensor.to(gpu.device) for tensor in (call.q_nope, call.q_rope, call.k_nope, call.k_rope, call.loc)
        )
        self.cache = torch.full((S, R + D), POISON, dtype=torch.uint8, device=gpu.device)
        self.spec = call.spec

    def refill(self, seed: int, loc: list[int]) -> None:
        call = make(len(self.loc), H, R, D, rows=S, seed=seed)
        for name in ("q_nope", "q_rope", "k_nope", "k_rope"):
            getattr(self, name).copy_(getattr(call, name))
        self.loc.copy_(torch.tensor(loc))

    def operands(self, cache: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        cache = self.cache if cache is None else cache
        return self.q_nope, self.q_rope, self.k_nope, self.k_rope, cache, self.loc

    def chain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query bytes and pool as the chain makes them, from a pool of poison."""
        cache = torch.full_like(self.cache, POISON)
        return prepare_chain(*self.operands(cache)).view(torch.uint8), cache


SLOTS = [[5, 0, 9, 63, 17, 1], [-1, 64, 2**40 + 17, 3, -9, 62], [-1] * 6, [11, 10, 9, 8, 7, 6]]


@pytest.fixture
def batch(gpu: Gpu) -> Batch:
    return Batch(gpu)


@pytest.mark.parametrize("way", ["kernel", "chain"])
def test_a_captured_graph_follows_slots_and_sources_changed_in_place(gpu: Gpu, batch: Batch, way: str) -> None:
    call = gpu.handle(batch.spec) if way == "kernel" else prepare_chain
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        call(*batch.operands(torch.empty_like(batch.cache)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = call(*batch.operands())
    for seed, loc in enumerate(SLOTS):
        batch.refill(seed, loc)
        batch.cache.fill_(POISON)
        query.view(torch.uint8).fill_(POISON)
        graph.replay()
        wanted_query, wanted_cache = batch.chain()
        assert torch.equal(query.view(torch.uint8), wanted_query)
        assert torch.equal(batch.cache, wanted_cache)


def test_B022_capture_and_warm_up_write_no_pool(gpu: Gpu, batch: Batch) -> None:
    handle = KernelHandle(gpu.artifact(batch.spec)).load(gpu.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle(*batch.operands())
    torch.cuda.synchronize()
    assert (batch.cache == POISON).all()


def test_B020_a_cold_handle_refuses_a_capture_that_stays_valid(gpu: Gpu, batch: Batch) -> None:
    cold = KernelHandle(gpu.artifact(batch.spec))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(KernelNotReady):
            cold(*batch.operands())
        query = prepare_chain(*batch.operands())
    graph.replay()
    wanted_query, wanted_cache = batch.chain()
    assert torch.equal(query.view(torch.uint8), wanted_query)
    assert torch.equal(batch.cache, wanted_cache)


def test_B020_a_handle_loads_while_another_stream_captures(gpu: Gpu, batch: Batch) -> None:
    side = torch.cuda.Stream()
    artifact = gpu.artifact(batch.spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        marker = torch.zeros(4, device=gpu.device)
        with torch.cuda.stream(torch.cuda.default_stream()):
            handle = KernelHandle(artifact).load(gpu.device)
        marker += 1
    graph.replay()
    assert (marker == 1).all()
    handle(*batch.operands())
    assert torch.equal(batch.cache, batch.chain()[1])


def test_B009_an_empty_batch_in_a_capture(gpu: Gpu, batch: Batch) -> None:
    empty = Batch(gpu, tokens=0)
    handle = gpu.handle(batch.spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nothing = handle(*empty.operands())
        query = handle(*batch.operands())
    graph.replay()
    assert nothing.shape == (0, H, R + D)
    assert torch.equal(query.view(torch.uint8), batch.chain()[0])
    torch.cuda.synchronize()


def test_B057_launches_on_torchs_current_stream(gpu: Gpu, batch: Batch) -> None:
    handle = gpu.handle(batch.spec)
    side = torch.cuda.Stream()
    wanted_query, wanted_cache = batch.chain()
    fresh = [tensor.clone() for tensor in (batch.q_nope, batch.k_nope)]
    torch.cuda.synchronize()
    for turn in range(100):
        with torch.cuda.stream(side if turn % 10 else torch.cuda.default_stream()):
            batch.q_nope.zero_()
            batch.k_nope.zero_()
            batch.cache.fill_(POISON)
            torch.cuda._sleep(200_000)
            batch.q_nope.copy_(fresh[0])
            batch.k_nope.copy_(fresh[1])
            query = handle(*batch.operands())
            # Read on the same stream at once: right only if the launch stood between copy and read.
            ok = (query.view(torch.uint8) == wanted_query).all() & (batch.cache == wanted_cache).all()
        torch.cuda.synchronize()
        assert bool(ok), f"turn {turn}"


def test_B057_inside_a_capture_on_a_side_stream(gpu: Gpu, batch: Batch) -> None:
    handle, side = gpu.handle(batch.spec), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        query = handle(*batch.operands())
        copy = query.view(torch.uint8).clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(copy, batch.chain()[0])


@pytest.mark.parametrize("pdl", [True, False])
def test_chained_launches_see_what_came_before(gpu: Gpu, pdl: bool) -> None:
    """Each launch reads keys that the kernel ahead of it has just written, forty deep, in one graph."""
    call = make(T, H, R, D, rows=S, fields={"pdl": pdl})
    batch, handle = Batch(gpu), gpu.handle(call.spec)
    steps = torch.randint(-3, 4, (40, *batch.k_nope.shape), device=gpu.device).to(torch.bfloat16)
    pools = torch.full((40, S, R + D), POISON, dtype=torch.uint8, device=gpu.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(40):
            batch.k_nope.copy_(steps[step])
            handle(*batch.operands(pools[step]))
    for _ in range(5):
        pools.fill_(POISON)
        graph.replay()
        for step in (0, 1, 17, 39):
            batch.k_nope.copy_(steps[step])
            assert torch.equal(pools[step], batch.chain()[1])


def test_the_current_device_and_stream_stay_as_they_were(gpu: Gpu, batch: Batch) -> None:
    handle = gpu.handle(batch.spec)
    before = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    handle(*batch.operands())
    assert (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream) == before


def test_a_thread_without_a_context_may_call(gpu: Gpu, batch: Batch) -> None:
    import threading

    handle = gpu.handle(batch.spec)
    torch.cuda.synchronize()
    results = []
    thread = threading.Thread(target=lambda: results.append(handle(*batch.operands())))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(results[0].view(torch.uint8), batch.chain()[0])


def test_the_chain_never_waits_for_the_device(gpu: Gpu, batch: Batch) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare_chain(*batch.operands(), reserved_slot=3)
        prepare_chain(*batch.operands(), dcp_world=4, dcp_rank=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [508, 509, 8192])
def test_B010_many_rows_of_128_heads(gpu: Gpu, tokens: int) -> None:
    check_large(gpu, 128, R, D, tokens)


@pytest.mark.parametrize("tokens", [65_535, 65_536])
def test_B010_many_tokens_of_one_head(gpu: Gpu, tokens: int) -> None:
    check_large(gpu, 1, R, D, tokens)


def check_large(gpu: Gpu, heads: int, rank: int, rope_dim: int, tokens: int) -> None:
    """Kernel against chain, on the device: too large for the oracle's loop over slots."""
    call = make(0, heads, rank, rope_dim)
    place, width = gpu.device, rank + rope_dim
    q, k = torch.randn(2, tokens, heads, width, device=place).to(torch.bfloat16)
    loc = torch.randperm(tokens, device=place)
    pools = torch.full((2, tokens, width), POISON, dtype=torch.uint8, device=place)
    operands = (q[..., :rank], q[..., rank:], k[:, 0, :rank], k[:, 0, rank:])
    mine = gpu.handle(call.spec)(*operands, pools[0], loc)
    chains = prepare_chain(*operands, pools[1], loc)
    assert torch.equal(mine.view(torch.uint8), chains.view(torch.uint8))
    assert torch.equal(pools[0], pools[1])


@pytest.mark.slow
def test_B010_more_threads_than_32_bits_number(gpu: Gpu) -> None:
    """462,422 tokens of 128 heads: 34 GB of queries from sources of stride 0."""
    tokens, heads = 462_422, 128
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of free GPU memory")
    one = make(1, heads, R, D)
    place = gpu.device
    q_nope, q_rope = (tensor.to(place).expand(tokens, -1, -1) for tensor in (one.q_nope, one.q_rope))
    k_nope, k_rope = (tensor.to(place).expand(tokens, -1) for tensor in (one.k_nope, one.k_rope))
    pool = torch.full((tokens, R + D), POISON, dtype=torch.uint8, device=place)
    loc = torch.randperm(tokens, device=place)
    out = torch.full((tokens, heads, R + D), POISON, dtype=torch.uint8, device=place).view(E4M3)
    gpu.handle(one.spec)(q_nope, q_rope, k_nope, k_rope, pool, loc, out=out)
    wanted = expected(one)
    row = wanted.query[0].to(place)
    assert all(bool((part == row).all()) for part in out.view(torch.uint8).split(20_000))
    written = one.pool.inside(wanted.pool)[15].to(place)
    assert bool((pool == written).all())


def test_B005_canaries_and_huge_slots(gpu: Gpu) -> None:
    loc = [23, 24, 2**31, 2**40 + 17]
    call = make(4, H, R, D, rows=24, loc=loc)
    for fused in (True, False):
        compare(run(call, gpu, fused=fused), expected(call), "kernel" if fused else "chain")
    torch.cuda.synchronize()


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_120a"])
def test_B046_the_driver_refuses_another_architectures_cubin(gpu: Gpu, batch: Batch, target: str) -> None:
    if target == gpu.arch.name:
        pytest.skip("this GPU's own target")
    if Arch(target) not in gpu.compiler.archs():
        pytest.skip("not a target of this compiler")
    foreign = gpu.compiler.compile(render(batch.spec), Arch(target))
    with pytest.raises(DriverError, match="compute capability"):
        KernelHandle(foreign).load(gpu.device)
    with pytest.raises(DriverError, match="NO_BINARY_FOR_GPU") as caught:
        gpu.driver.load(foreign.cubin, foreign.manifest.entry, gpu.device.index)
    assert caught.value.code == 209
    gpu.handle(batch.spec)(*batch.operands())
    assert torch.equal(batch.cache, batch.chain()[1])


def test_B018_loc_on_the_cpu_is_refused_by_name(gpu: Gpu, batch: Batch) -> None:
    for call in (gpu.handle(batch.spec), prepare_chain):
        with pytest.raises(ValueError, match=r"^loc: found on cpu; q_nope is on cuda"):
            call(*batch.operands()[:-1], batch.loc.cpu())


def test_B060_only_addresses_cross_over(gpu: Gpu, batch: Batch) -> None:
    """bf16 and fp8 tensors, one that wants a gradient, a parameter, a subclass."""

    class Subclass(torch.Tensor):
        pass

    handle = gpu.handle(batch.spec)
    dressed = (
        torch.nn.Parameter(batch.q_nope),
        batch.q_rope.clone().requires_grad_(),
        batch.k_nope.as_subclass(Subclass),
        batch.k_rope,
        batch.cache.view(E4M3),
        batch.loc,
    )
    query = handle(*dressed)
    assert not query.requires_grad
    wanted_query, wanted_cache = batch.chain()
    assert torch.equal(query.view(torch.uint8), wanted_query)
    assert torch.equal(batch.cache, wanted_cache)


def random_layouts(generator: torch.Generator) -> Iterator[tuple[int, dict[str, tuple[tuple[int, ...], int]]]]:
    """Tokens, and for each operand strides and an offset, in elements; without end."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def strides(outer: list[int], width: int, step: int, expand: bool) -> tuple[int, ...]:
        order = torch.randperm(len(outer), generator=generator).tolist()
        chosen, extent = [0] * len(outer), width
        for dim in order:
            if expand and pick(0, 7) == 0:
                continue
            chosen[dim] = extent + step * pick(0, 3)
            extent = chosen[dim] * outer[dim]
        return (*chosen, 1)

    while True:
        tokens = pick(1, 64)
        yield (
            tokens,
            {
                "q_nope": (strides([tokens, H], R, 8, True), 8 * pick(0, 3)),
                "q_rope": (strides([tokens, H], D, 8, True), 8 * pick(0, 3)),
                "k_nope": (strides([tokens], R, 8, True), 8 * pick(0, 3)),
                "k_rope": (strides([tokens], D, 8, True), 8 * pick(0, 3)),
                "out": (strides([tokens, H], R + D, 8, False), 8 * pick(0, 3)),
                "cache": (strides([S], R + D, 8, False), 8 * pick(0, 3)),
            },
        )


@pytest.mark.slow
def test_5000_random_layouts_against_the_chain(gpu: Gpu) -> None:
    """One kernel a pair of dtypes, every stride a launch scalar; whole buffers compared."""
    place = gpu.device
    generator = torch.Generator().manual_seed(2026)
    layouts = random_layouts(generator)
    kinds = list(itertools.product(("bf16", "fp16"), (torch.int32, torch.int64)))
    dynamic = {"out_token_stride": "dynamic", "out_head_stride": "dynamic", "elements_per_thread": 8}
    span = 64 * H * (R + D) * 2
    sources = {dtype: values(2 * span, dtype=dtype, seed=3).to(place) for dtype in DTYPES}
    buffers = torch.empty(2, 2, 2 * span, dtype=torch.uint8, device=place)
    bad = torch.zeros((), dtype=torch.int64, device=place)
    for number in range(5000):
        dtype, loc_dtype = kinds[number % len(kinds)]
        tokens, layout = next(layouts)
        shapes = {"q_nope": (tokens, H, R), "q_rope": (tokens, H, D), "k_nope": (tokens, R), "k_rope": (tokens, D)}
        operands = [sources[dtype].as_strided(shape, *layout[name]) for name, shape in shapes.items()]
        loc = (torch.randperm(S + 24, generator=generator)[:tokens] - 8).to(place, loc_dtype)
        spec = Call(*(operand[:1] for operand in operands), loc=loc, pool=None, fields=dynamic).spec
        buffers.fill_(number % 251)
        for side, way in enumerate((gpu.handle(spec), prepare_chain)):
            out = buffers[side, 0].view(E4M3).as_strided((tokens, H, R + D), *in_buffer(layout["out"], side, 0, span))
            cache = buffers[side, 1].as_strided((S, R + D), *in_buffer(layout["cache"], side, 1, span))
            way(*operands, cache, loc, out=out)
        bad += (buffers[0] != buffers[1]).any()
        if number % 250 == 249:
            assert int(bad) == 0, f"a layout of number {number - 249} to {number} differs"


def in_buffer(layout: tuple[tuple[int, ...], int], side: int, which: int, span: int) -> tuple[tuple[int, ...], int]:
    """The layout's strides, its offset counted from the start of all buffers, as as_strided counts."""
    return layout[0], layout[1] + (2 * side + which) * 2 * span


def test_the_grid_of_every_batch_up_to_300_is_right(gpu: Gpu) -> None:
    spec = KernelSpec(num_heads=3, kv_lora_rank=32, rope_dim=16)
    handle = gpu.handle(spec)
    place = gpu.device
    sources = [values(300, *shape, seed=seed).to(place) for seed, shape in enumerate([(3, 32), (3, 16), (32,), (16,)])]
    loc = torch.randperm(300, device=place)
    for tokens in range(1, 301):
        pools = torch.full((2, 300, 48), POISON, dtype=torch.uint8, device=place)
        operands = [source[:tokens] for source in sources]
        mine = handle(*operands, pools[0], loc[:tokens])
        chains = prepare_chain(*operands, pools[1], loc[:tokens])
        assert torch.equal(mine.view(torch.uint8), chains.view(torch.uint8)), tokens
        assert torch.equal(pools[0], pools[1]), tokens
    assert plan_launch(handle._shape, MAX_TOKENS, 132).grid[1] <= 65_535
