"""Programmatic dependent launch between neighbours that are as early and as late as they may be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel.calls import E4M3, TENSORS, make
from kernel.devices import Gpu

from mlaprep.clients.launch import Launcher
from mlaprep.clients.plan import LaunchConfig
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.render import KernelSource
from mlaprep.templates.spec import KernelSpec

pytestmark = pytest.mark.gpu

T, H, R, D, S = 8, 12, 512, 64, 32
CYCLES = 200_000
"""About 100 µs on an H200: many times what a launch takes."""

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


REPEATS = 1000
VARIANTS: dict[str, dict[str, object]] = {
    "fp8": {"kv_scale": "scalar", "q_scale": "token", "reserved_slot": True, "dcp_world": 2},
    "fp8, rotated": {"rope": "interleaved"},
    "same, rotated": {"rope": "neox", "layout": "same"},
    "ds_mla, rotated": {"rope": "interleaved", "layout": "ds_mla", "query_dtype": "input"},
}


class Late:
    """Every input of a call in one buffer, so that one producer writes them all at once, late."""

    def __init__(self, gpu: Gpu, spec: KernelSpec) -> None:
        generator = torch.Generator().manual_seed(7)

        def floats(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        inputs = {
            "q_nope": floats(T, H, R).bfloat16(),
            "q_rope": floats(T, H, D).bfloat16(),
            "k_nope": floats(T, R).bfloat16(),
            "k_rope": floats(T, D).bfloat16(),
            "loc": torch.randperm(S, generator=generator)[:T],
        }
        if spec.rope != "none":
            inputs |= {"positions": torch.arange(T) * 3, "cos_sin_cache": floats(64, D)}
        if spec.q_scale == "token":
            inputs["q_scale_inv"] = floats(T)
        if spec.kv_scale != "none":
            inputs["kv_scale_inv"] = torch.tensor([0.25])
        self.sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in inputs.items()}
        self.final = torch.zeros(sum(-(-size // 256) * 256 for size in self.sizes.values()), dtype=torch.uint8)
        self.shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in inputs.items()}
        for name, view in self.views(self.final).items():
            view.copy_(inputs[name])
        self.final = self.final.to(gpu.device)
        self.live = torch.zeros_like(self.final)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        found, offset = {}, 0
        for name, size in self.sizes.items():
            dtype, shape = self.shapes[name]
            found[name] = buffer[offset : offset + size].view(dtype).view(shape)
            offset += -(-size // 256) * 256
        return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_thousand_late_producers(gpu: Gpu, producer: Launcher, consumer: Launcher, variant: str, graph: bool) -> None:
    """producer (writes every input, late) -> kernel -> consumer that reads the producer's output ahead of its
    wait, and cache and query behind it. With and without PDL the bytes are those of the chain."""
    fields = VARIANTS[variant]
    spec = KernelSpec(num_heads=H, **fields)  # type: ignore[arg-type]
    late = Late(gpu, spec)
    options = {"dcp_rank": 1} if spec.dcp_world > 1 else {}
    if spec.reserved_slot:
        options["reserved_slot"] = 0
    chain_options = dict(
        options,
        layout=spec.layout,
        query_dtype=spec.query_dtype,
        rope=spec.rope,
        dcp_world=spec.dcp_world,
        tile_scale=None if spec.tile_scale == "none" else spec.tile_scale,
    )
    cache_dtype = torch.bfloat16 if spec.layout == "same" else torch.uint8
    pools = torch.zeros(2, S, spec.cache_width, dtype=cache_dtype, device=gpu.device)
    query_dtype = torch.float8_e4m3fn if spec.quantised_query else torch.bfloat16
    out = torch.zeros(T, H, R + D, dtype=torch.uint8 if spec.quantised_query else torch.bfloat16, device=gpu.device)
    result = out.view(query_dtype)
    early = torch.zeros_like(late.live)
    seen = torch.zeros(pools[0].nbytes + out.nbytes, dtype=torch.uint8, device=gpu.device)

    def call(function: Any, buffer: torch.Tensor, pool: torch.Tensor, **more: Any) -> torch.Tensor:
        tensors = late.views(buffer)
        positional = [tensors.pop(name) for name in ("q_nope", "q_rope", "k_nope", "k_rope")]
        return function(*positional, pool, tensors.pop("loc"), **tensors, **more)  # type: ignore[no-any-return]

    pools[1].view(torch.uint8).fill_(0x5A)
    wanted = call(prepare_chain, late.final, pools[1], **chain_options)
    wrong = torch.zeros((), dtype=torch.int64, device=gpu.device)
    words = late.live.nbytes // 2
    for handle in (gpu.handle(spec), gpu.handle(replace(spec, pdl=False))):
        handle.load(gpu.device)
        stream = torch.cuda.Stream()

        def chain(handle: Any = handle) -> None:
            raw = gpu.driver.current_stream(gpu.device.index)
            producer(ONE_BLOCK, raw, (late.live.data_ptr(), late.final.data_ptr(), words, CYCLES))
            call(handle, late.live, pools[0], out=result, **options)
            consumer(
                ONE_BLOCK,
                raw,
                (
                    early.data_ptr(),
                    late.live.data_ptr(),
                    words,
                    seen.data_ptr(),
                    pools.data_ptr(),
                    pools[0].nbytes // 2,
                ),
            )
            seen[pools[0].nbytes :].copy_(out.view(torch.uint8).view(-1))

        with torch.cuda.stream(stream):
            replay = chain
            if graph:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured, stream=stream):
                    chain()
                replay = captured.replay
            for _ in range(REPEATS):
                late.live.zero_()
                pools[0].view(torch.uint8).fill_(0x5A)
                out.view(torch.uint8).fill_(0xA5)
                early.zero_()
                replay()
                for found, right in (
                    (pools[0], pools[1]),
                    (out, wanted),
                    (early, late.final),
                    (seen[: pools[0].nbytes], pools[1]),
                    (seen[pools[0].nbytes :], wanted),
                ):
                    wrong += (found.view(torch.uint8).view(-1) != right.view(torch.uint8).view(-1)).any()
            stream.synchronize()
        assert int(wrong) == 0
