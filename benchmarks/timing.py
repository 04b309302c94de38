"""Timing: a chain of layers captured in a CUDA graph, replayed, and timed with device events."""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workload import Layer

Body = Callable[[Layer], Tensor | None]
"""Enqueues one layer's work; returns the query, or None where it makes none."""

_TARGET_MS = 3.0
_MIN_REPLAYS, _MAX_REPLAYS = 4, 200
# The device sleeps while the host enqueues the replays, so that no event waits for the host: twice as long as
# the host was seen to need, at two cycles a nanosecond.
_SLEEP_CYCLES_A_NS = 4
_FIRST_GUESS_NS = 20_000
_MAX_SLEEP_CYCLES = 40_000_000
_PROGRAMMATIC_EDGE = 1


@dataclass(frozen=True, slots=True)
class Nodes:
    """What a captured chain holds: evidence that a contender's launches are in it, and linked as it says."""

    nodes: int
    programmatic_edges: int


class Chain:
    """One body run over ``layers`` inside one CUDA graph.

    Args:
        keep: hold on to every layer's query. Otherwise a body that allocates its results reuses memory
            along the chain, as a model's layers do.

    The body runs once outside the capture first, so that a fault of its own raises with no capture under way.
    """

    def __init__(self, body: Body, layers: list[Layer], *, keep: bool) -> None:
        self.layers = layers
        self._body = body  # what it holds, page tables say, is read by every replay
        self.queries: list[Tensor | None] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body(layers[0])
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        try:
            self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        except TypeError:
            self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            query = None
            for layer in layers:
                query = body(layer)
                if keep:
                    self.queries.append(query)
        if not keep:
            self.queries = [query]
        self.content = _content(self._graph)
        self._host_ns = _FIRST_GUESS_NS
        self.replay()
        torch.cuda.synchronize()
        self.replays = self._calibrate()

    def replay(self) -> None:
        self._graph.replay()

    def microseconds(self) -> float:
        """One timing: microseconds a layer over ``replays`` replays."""
        return self._milliseconds(self.replays) * 1000 / self.replays / len(self.layers)

    def _calibrate(self) -> int:
        self._milliseconds(_MIN_REPLAYS)
        once = self._milliseconds(_MIN_REPLAYS) / _MIN_REPLAYS
        return min(_MAX_REPLAYS, max(_MIN_REPLAYS, math.ceil(_TARGET_MS / once)))

    def _milliseconds(self, replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(min(_MAX_SLEEP_CYCLES, replays * self._host_ns * _SLEEP_CYCLES_A_NS))
        start.record()
        begun = time.perf_counter_ns()
        for _ in range(replays):
            self._graph.replay()
        self._host_ns = min(_FIRST_GUESS_NS * 2, (time.perf_counter_ns() - begun) // replays)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


@dataclass(frozen=True, slots=True)
class Samples:
    """Timings of one thing, in microseconds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "us": round(self.median, 4),
            "us_min": round(min(self.values), 4),
            "us_max": round(max(self.values), 4),
            "samples_us": [round(value, 4) for value in self.values],
        }


def time_interleaved(chains: dict[str, Chain], rounds: int) -> dict[str, Samples]:
    """``rounds`` timings of each chain, in turns, so that a drift of the device meets all alike."""
    names = list(chains)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(chains[name].microseconds())
    return {name: Samples(tuple(values)) for name, values in found.items()}


def time_eager(body: Body, layer: Layer, rounds: int, calls: int = 200) -> Samples:
    """Wall-clock time a call, calls enqueued back to back without a graph: the slower of host and device."""
    for _ in range(calls // 4):
        body(layer)
    torch.cuda.synchronize()
    values = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            begun = time.perf_counter_ns()
            for _ in range(calls):
                body(layer)
            torch.cuda.synchronize()
            values.append((time.perf_counter_ns() - begun) / calls / 1000)
    finally:
        gc.enable()
    return Samples(tuple(values))


def copy_bandwidth(rounds: int = 7, megabytes: int = 2048) -> Samples:
    """Device-to-device copy, GB/s counting bytes read and written."""
    source = torch.empty(megabytes * 2**20 // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    for _ in range(3):
        target.copy_(source)
    values = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(8):
            target.copy_(source)
        end.record()
        end.synchronize()
        values.append(8 * moved / start.elapsed_time(end) / 1e6)
    return Samples(tuple(values))


def resident_copy_bandwidth(rounds: int = 5) -> Samples:
    """The same where both buffers stay in the L2: the time that 4 MiB more take, so that no launch counts."""
    few, many = (_copy_chain(megabytes) for megabytes in (4, 8))
    extra = 2 * 4 * 2**20
    return Samples(tuple(extra / (many.microseconds() - few.microseconds()) / 1000 for _ in range(rounds)))


def _copy_chain(megabytes: int) -> Chain:
    source = torch.empty(megabytes * 2**20 // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    # A kernel, since a copy proper may go through a copy engine. A chain hands its layers to the body, no more.
    return Chain(lambda _: torch.neg(source, out=target), [None] * 24, keep=False)  # type: ignore[list-item, unused-ignore]


def _content(graph: torch.cuda.CUDAGraph) -> Nodes | None:
    """Nodes and programmatic edges of a captured graph; None where torch or the driver cannot say."""

    class EdgeData(ctypes.Structure):
        _fields_ = (
            ("from_port", ctypes.c_ubyte),
            ("to_port", ctypes.c_ubyte),
            ("type", ctypes.c_ubyte),
            ("reserved", ctypes.c_ubyte * 5),
        )

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        raw = ctypes.c_void_p(graph.raw_cuda_graph())
        nodes, edges = ctypes.c_size_t(), ctypes.c_size_t()
        if cuda.cuGraphGetNodes(raw, None, ctypes.byref(nodes)):
            return None
        if cuda.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(edges)):
            return None
        ends = (ctypes.c_void_p * edges.value)(), (ctypes.c_void_p * edges.value)()
        data = (EdgeData * edges.value)()
        if edges.value and cuda.cuGraphGetEdges_v2(raw, *ends, data, ctypes.byref(edges)):
            return None
        return Nodes(nodes.value, sum(edge.type == _PROGRAMMATIC_EDGE for edge in data))
    except (AttributeError, OSError, RuntimeError, TypeError):
        return None
