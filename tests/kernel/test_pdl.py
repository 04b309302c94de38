"""Programmatic dependent launch between neighbours that are as early and as late as they may be."""

from collections.abc import Sequence

import pytest
import torch
from kernel.calls import E4M3, TENSORS, make
from kernel.devices import Gpu

from mlaprep.clients.launch import Launcher
from mlaprep.clients.plan import LaunchConfig
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.render import KernelSource

pytestmark = pytest.mark.gpu

T, H, R, D, S = 8, 12, 512, 64, 32
CYCLES = 150_000
"""About 80 µs on an H200: many times what a launch takes."""

PRODUCER = """
// Releases its dependents at once, takes its time, then copies 16-bit words.
extern "C" __global__ void mla_prepare(unsigned short* target, const unsigned short* source, long long count,
                                       long long cycles) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (long long start = clock64(); clock64() - start < cycles;) {}
  for (long long i = threadIdx.x; i < count; i += blockDim.x) target[i] = source[i];
}
"""
CONSUMER = """
// Copies what is older than its predecessor ahead of its wait, and what the predecessor wrote behind it.
__device__ void copy(unsigned short* target, const unsigned short* source, long long count) {
  for (long long i = threadIdx.x; i < count; i += blockDim.x) {
    unsigned short word;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(word) : "l"(source + i) : "memory");
    target[i] = word;
  }
}
extern "C" __global__ void mla_prepare(unsigned short* early, const unsigned short* old, long long old_count,
                                       unsigned short* late, const unsigned short* fresh, long long fresh_count) {
  copy(early, old, old_count);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  copy(late, fresh, fresh_count);
}
"""


def neighbour(gpu: Gpu, source: str, types: Sequence[str]) -> Launcher:
    artifact = gpu.compiler.compile(KernelSource(make(1).spec, source), gpu.arch)
    kernel = gpu.driver.load(artifact.cubin, "mla_prepare", gpu.device.index)
    return gpu.driver.prepare(kernel, [(f"argument{i}", kind) for i, kind in enumerate(types)], pdl=True)


@pytest.fixture(scope="module")
def producer(gpu: Gpu) -> Launcher:
    return neighbour(gpu, PRODUCER, ("pointer", "pointer", "i64", "i64"))


@pytest.fixture(scope="module")
def consumer(gpu: Gpu) -> Launcher:
    return neighbour(gpu, CONSUMER, ("pointer", "pointer", "i64") * 2)


ONE_BLOCK = LaunchConfig((1, 1, 1), (256, 1, 1))


CASES = [
    *(("fp8", elements, late) for elements in (8, 16) for late in TENSORS),
    *(("same", 16, late) for late in TENSORS if late != "kv_scale_inv"),
    *(("ds_mla", 16, late) for late in TENSORS if late != "kv_scale_inv"),
]


@pytest.mark.parametrize(("layout", "elements", "late"), CASES)
def test_nothing_is_read_before_a_late_producer_wrote_it(
    gpu: Gpu, producer: Launcher, consumer: Launcher, layout: str, elements: int, late: str
) -> None:
    scales = {"q_scale_inv": torch.linspace(0.5, 2, T)}
    if layout == "fp8":
        scales["kv_scale_inv"] = torch.tensor([0.5])
    fields = {"elements_per_thread": elements}
    call = make(T, H, R, D, rows=S, layout=layout, rope="neox", fields=fields, **scales)
    final = {name: getattr(call, name).to(gpu.device) for name in TENSORS if getattr(call, name) is not None}
    live = {**final, late: torch.zeros_like(final[late])}
    pools = [call.pool.allocate(gpu.device) for _ in range(2)]
    itemsize = 2 if layout == "same" else 1
    result = torch.zeros(T, H, (R + D) * itemsize, dtype=torch.uint8, device=gpu.device)
    out = result.view(torch.bfloat16 if layout == "same" else E4M3)
    early, behind = torch.zeros_like(final[late]), torch.zeros_like(result)
    handle = gpu.handle(call.spec)

    def cache(number: int) -> torch.Tensor:
        view = pools[number][1]
        return view.view(torch.bfloat16) if layout == "same" else view

    def words(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size() // 2

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = prepare_chain(kv_cache=cache(1), layout=layout, rope="neox", **final).view(torch.uint8)
        raw = gpu.driver.current_stream(gpu.device.index)
        for _ in range(20):
            live[late].zero_()
            pools[0][0].fill_(call.pool.poison)
            early.zero_()
            producer(ONE_BLOCK, raw, (live[late].data_ptr(), final[late].data_ptr(), words(final[late]), CYCLES))
            handle(kv_cache=cache(0), out=out, **live)
            consumer(
                ONE_BLOCK,
                raw,
                (
                    early.data_ptr(),
                    live[late].data_ptr(),
                    words(early),
                    behind.data_ptr(),
                    result.data_ptr(),
                    words(result),
                ),
            )
            stream.synchronize()
            assert torch.equal(pools[0][0], pools[1][0])
            assert torch.equal(result, wanted)
            # What the producer wrote is older than our kernel: a dependent of ours may read it without waiting.
            assert torch.equal(early.view(torch.uint8), final[late].view(torch.uint8))
            assert torch.equal(behind, wanted)


def test_the_producer_here_is_late_enough_to_matter(gpu: Gpu, producer: Launcher, consumer: Launcher) -> None:
    """Right behind the producer, with no kernel of ours between, a read ahead of the wait finds old data."""
    source, target = (
        torch.ones(256, dtype=torch.int16, device=gpu.device),
        torch.zeros(256, dtype=torch.int16, device=gpu.device),
    )
    early, late = torch.full_like(source, 7), torch.full_like(source, 7)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        raw = gpu.driver.current_stream(gpu.device.index)
        producer(ONE_BLOCK, raw, (target.data_ptr(), source.data_ptr(), 256, 20 * CYCLES))
        consumer(ONE_BLOCK, raw, (early.data_ptr(), target.data_ptr(), 256, late.data_ptr(), target.data_ptr(), 256))
        stream.synchronize()
    assert (early == 0).all()
    assert (late == 1).all()
