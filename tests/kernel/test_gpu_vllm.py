"""vLLM's operations on a GPU: the launches that a profiler sees, and scales under CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel.calls import values
from kernel.devices import Gpu
from kernel.supplied import GpuClient

from mlaprep.clients import inverse_scales, vllm
from mlaprep.clients.reference import prepare_chain

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

T, H, R, D, BLOCKS, BLOCK = 6, 16, 512, 64, 8, 64
SLOTS = [9, -1, 0, 511, 17, 200]


class Step:
    """Buffers of one layer's decode step, as vLLM has them."""

    def __init__(self, gpu: Gpu) -> None:
        self.client = GpuClient(gpu)
        self.nope = values(H, T, R, seed=1).to(gpu.device).transpose(0, 1)
        self.rope = values(T, H, D, seed=2).to(gpu.device)
        self.latent = values(T, R + D, seed=3).to(gpu.device)
        self.slots = torch.tensor(SLOTS, device=gpu.device)
        self.cache = torch.zeros(BLOCKS, BLOCK, R + D, dtype=torch.uint8, device=gpu.device)
        self.q_scale = torch.tensor(0.3, device=gpu.device)
        self.k_scale = torch.tensor(3.0, device=gpu.device)

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.latent[:, :R], self.latent[:, R:]

    def write(self) -> None:
        vllm.concat_and_cache_mla(*self.rows, self.cache, self.slots, "fp8", self.k_scale, client=self.client)

    def query(self) -> torch.Tensor:
        return vllm.decode_concat_quant_fp8(self.nope, self.rope, self.q_scale, client=self.client)

    def both(self) -> torch.Tensor:
        return vllm.concat_cache_and_quant_mla(
            self.nope, self.rope, *self.rows, self.cache, self.slots, "fp8", self.q_scale, self.k_scale,
            client=self.client,
        )  # fmt: skip

    def check(self, query: torch.Tensor | None) -> None:
        """The chain's bytes, with inverses of the scales as they are now."""
        cache = torch.zeros_like(self.cache)
        inverses = {"q_scale_inv": 1 / self.q_scale, "kv_scale_inv": 1 / self.k_scale}
        wanted = prepare_chain(self.nope, self.rope, *self.rows, cache, self.slots, **inverses)
        assert wanted is not None
        assert query is None or torch.equal(query.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(self.cache, cache)


@pytest.fixture
def step(gpu: Gpu) -> Iterator[Step]:
    yield Step(gpu)
    inverse_scales._fixed.clear()
    inverse_scales._kept.clear()


def launched(function: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a function launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    step.both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = step.both()
    return graph, query


def test_each_is_one_launch_once_its_scale_is_known(step: Step) -> None:
    for function in (step.write, step.query, step.both):
        function()
        assert launched(function) == ["mla_prepare"], function
    step.check(step.both())


def test_a_captured_graph_follows_a_scale_changed_in_place(step: Step) -> None:
    graph, query = captured(step)
    assert len(launched(graph.replay)) == 3
    for scale in (0.7, 5.0):
        step.k_scale.data.fill_(scale)
        step.q_scale.fill_(scale / 3)
        step.cache.zero_()
        graph.replay()
        step.check(query)


def test_a_captured_graph_of_fixed_scales_is_one_launch(step: Step) -> None:
    for scale in (step.q_scale, step.k_scale):
        vllm.fix_scale(scale)
    graph, query = captured(step)
    assert launched(graph.replay) == ["mla_prepare"]
    step.check(query)
    for scale in (step.q_scale, step.k_scale):
        scale.fill_(0.7)
        vllm.fix_scale(scale)
    step.cache.zero_()
    graph.replay()
    step.check(query)


def test_streams_have_inverses_of_their_own(step: Step) -> None:
    """One stream's inverse may not be made yet when another stream reads it."""
    first = inverse_scales.inverse_of(step.k_scale)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = inverse_scales.inverse_of(step.k_scale)
        assert inverse_scales.inverse_of(step.k_scale) is second
    assert second is not first
    assert inverse_scales.inverse_of(step.k_scale) is first
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_layouts_without_a_scale_are_one_launch(step: Step, kind: str) -> None:
    width, dtype = (656, torch.uint8) if kind == "fp8_ds_mla" else (R + D, torch.bfloat16)
    pools = [torch.zeros(BLOCKS, BLOCK, width, dtype=dtype, device=step.cache.device) for _ in range(2)]

    def write() -> None:
        vllm.concat_and_cache_mla(*step.rows, pools[0], step.slots, kind, step.k_scale, client=step.client)

    write()
    assert launched(write) == ["mla_prepare"]
    layout = "same" if kind == "auto" else "ds_mla"
    prepare_chain(None, None, *step.rows, pools[1], step.slots, layout=layout, write_q=False)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
