"""A device that is none, for whole runs of the benchmarks on the CPU: chains run their bodies, kernels are emulated.

Bytes are real: the rendered kernels run under the emulation and are compared as on a GPU. Times are made up.
"""

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_host
import bench_prepare
import bench_verify_step
import cells
import contenders
import kernels
import peers
import pytest
import timing
import torch
import tune_prepare
import workload
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver, Region

from mlaprep.clients.launch import LoadedKernel
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.spec import KernelSpec

CACHE_ROWS = 128
LAYERS = 2


class FakeDriver(EmulatedDriver):
    """The emulation, in any memory; a kernel that is none of ours does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()
        """Variants that a run took from its directory of kernels."""
        self._regions = [Region(0, 2**64 - 1, 1)]

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        if entry != "mla_prepare":
            return LoadedKernel(function=-1, context=1, multiprocessors=4)
        return super().load(cubin, entry, device)

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Any:
        if kernel.function < 0:
            return lambda config, stream, arguments: None
        return super().prepare(kernel, parameters, pdl)


class FakeChain:
    """Stands in for :class:`timing.Chain`: the bodies run at once, a replay runs them again into the same results."""

    def __init__(self, body: Callable[[Any], Any], layers: list[Any], *, keep: bool) -> None:
        self.layers, self._body = layers, body
        results = [body(layer) for layer in layers]
        self.queries = results if keep else results[-1:]
        self.content = timing.Nodes(len(layers), len(layers) - 1)
        self.replays = 4

    def replay(self) -> None:
        for place, layer in enumerate(self.layers):
            result = self._body(layer)
            kept = self.queries[min(place, len(self.queries) - 1)]
            if result is not None and result.data_ptr() != kept.data_ptr():
                kept.copy_(result)

    def microseconds(self) -> float:
        return 2.0


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeDriver:
    """Make the benchmarks believe in a GPU. No peer is there but torch."""
    driver = FakeDriver()
    properties = types.SimpleNamespace(
        name="NVIDIA Fake", major=9, minor=0, multi_processor_count=4, total_memory=1, L2_cache_size=1
    )
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=0: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (bench_host, bench_prepare, bench_verify_step, contenders, tune_prepare):
        monkeypatch.setattr(module, "cuda_driver", lambda: driver)

    def obtain(spec: KernelSpec, arch: object, directory: object) -> KernelArtifact:
        driver.asked.add(spec.variant_id)
        return emulated_artifact(spec)

    for module in (bench_host, bench_prepare, contenders, tune_prepare):
        monkeypatch.setattr(module, "obtain", obtain)
    monkeypatch.setattr(kernels, "compile_cubin", lambda *_: (b"", "none"))
    monkeypatch.setattr(contenders, "compile_floor", lambda arch, pdl: (b"", "none"))
    for module in (cells, bench_verify_step, tune_prepare):
        monkeypatch.setattr(module, "Chain", FakeChain)
    monkeypatch.setattr(peers, "PEERS", folder / "peers")
    monkeypatch.setattr(torch, "ones", _without_device(torch.ones))
    monkeypatch.setattr(cells, "_CPU_CHECK_ROWS", 0)
    monkeypatch.setattr(workload, "CACHE_ROWS", CACHE_ROWS)
    for module in (bench_host, bench_prepare, bench_verify_step, cells, tune_prepare):
        if hasattr(module, "cache_pools"):
            monkeypatch.setattr(module, "cache_pools", lambda layers: workload.cache_pools(layers, "cpu"))
        if hasattr(module, "LAYERS"):
            monkeypatch.setattr(module, "LAYERS", LAYERS)
    samples = timing.Samples((4000.0,))
    monkeypatch.setattr(bench_prepare, "copy_bandwidth", lambda: samples)
    monkeypatch.setattr(bench_prepare, "resident_copy_bandwidth", lambda: samples)
    return driver


def _without_device(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*args, **{k: v for k, v in kwargs.items() if k != "device"})
