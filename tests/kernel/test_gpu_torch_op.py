"""The operations of torch.library on a GPU: the kernel's bytes through torch.compile and through CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel.calls import make
from kernel.devices import Gpu
from kernel.supplied import GpuClient

from mlaprep.clients import torch_op
from mlaprep.clients.reference import prepare_chain

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

H, R, D, S = 12, 512, 64, 256
POISON = 0x5A


@pytest.fixture
def supply(gpu: Gpu) -> Iterator[GpuClient]:
    torch._dynamo.reset()
    client = GpuClient(gpu)
    torch_op.name_client("supply", client)
    yield client
    torch_op.forget_client("supply")
    torch._dynamo.reset()


class Batch:
    def __init__(self, gpu: Gpu, tokens: int, seed: int = 0) -> None:
        call = make(tokens, H, R, D, rows=S, seed=seed)
        sources = (call.q_nope, call.q_rope, call.k_nope, call.k_rope)
        self.sources = [source.to(gpu.device) for source in sources if source is not None]
        assert call.loc is not None
        self.loc = call.loc.to(gpu.device)
        self.cache = torch.full((S, R + D), POISON, dtype=torch.uint8, device=gpu.device)

    def refill(self, seed: int, first: int) -> None:
        call = make(len(self.loc), H, R, D, rows=S, seed=seed)
        for source, new in zip(self.sources, (call.q_nope, call.q_rope, call.k_nope, call.k_rope), strict=True):
            assert new is not None
            source.copy_(new)
        self.loc.copy_(torch.arange(len(self.loc)) + first)

    def run(self, function: Callable[..., Any]) -> torch.Tensor:
        made: torch.Tensor = function(*self.sources, self.cache, self.loc, client="supply")
        return made

    def check(self, query: torch.Tensor, before: torch.Tensor) -> None:
        """Query bytes and pool are the chain's, from the pool as it was before."""
        wanted = prepare_chain(*self.sources, before, self.loc)
        assert wanted is not None
        assert torch.equal(query.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(self.cache, before)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_is_the_kernel(gpu: Gpu, supply: GpuClient, backend: str) -> None:
    compiled = torch.compile(torch_op.prepare, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (2, 6, 64, 200):
        batch = Batch(gpu, tokens, seed=tokens)
        before = batch.cache.clone()
        batch.check(batch.run(compiled), before)
        asked = len(supply.specs)
        batch.check(batch.run(compiled), before)
        assert len(supply.specs) == asked  # the kernel ran, and was remembered
    assert asked


def test_a_compiled_call_launches_one_kernel(gpu: Gpu, supply: GpuClient) -> None:
    compiled = torch.compile(torch_op.prepare, fullgraph=True)
    batch = Batch(gpu, 16)
    batch.run(compiled)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.run(compiled)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["mla_prepare"]


def test_a_compiled_call_can_be_captured_and_follows_what_changes(gpu: Gpu, supply: GpuClient) -> None:
    compiled = torch.compile(torch_op.prepare, fullgraph=True)
    batch = Batch(gpu, 6)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        batch.run(compiled)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = batch.run(compiled)
    for seed in range(3):
        batch.refill(seed, 10 * seed)
        before = batch.cache.clone()
        graph.replay()
        batch.check(query, before)


def test_torch_captures_by_itself(gpu: Gpu, supply: GpuClient) -> None:
    compiled = torch.compile(torch_op.prepare, fullgraph=True, mode="reduce-overhead")
    batch = Batch(gpu, 6)
    for tensor in (*batch.sources, batch.loc, batch.cache):
        torch._dynamo.mark_static_address(tensor)
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        batch.refill(step, 10 * step)
        before = batch.cache.clone()
        query = batch.run(compiled).clone()
        batch.check(query, before)
