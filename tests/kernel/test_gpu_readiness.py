"""Readiness on a GPU: loaded before a capture, refused or replaced within one, and kept as long as the process."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from kernel.devices import Gpu
from kernel.test_gpu import POISON, Batch

from mlaprep.clients import KernelClient, dispatch, prepare
from mlaprep.clients.errors import KernelNotReady
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.spec import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MS = 1e-3


@pytest.fixture
def batch(gpu: Gpu) -> Batch:
    return Batch(gpu)


def captured(batch: Batch, client: KernelClient) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = prepare(*batch.operands(), client=client)
    assert query is not None
    return graph, query


def check_replay(batch: Batch, graph: torch.cuda.CUDAGraph, query: torch.Tensor) -> None:
    assert (batch.cache == POISON).all()  # a capture writes nothing
    graph.replay()
    wanted_query, wanted_cache = batch.chain()
    assert torch.equal(query.view(torch.uint8), wanted_query)
    assert torch.equal(batch.cache, wanted_cache)


def test_B020_B022_made_ready_a_worker_captures_at_once(batch: Batch, tmp_path: Path) -> None:
    """No call before the capture: nothing is left to fetch, compile or load, and no pool was written."""
    with KernelClient(store=DiskStore(tmp_path), offline=True) as client:
        report = client.ensure_ready("kimi-k3", tp=8, loc_dtype=("i32", "i64"))
        assert report.complete, str(report)
        assert {kernel.tier for kernel in report.kernels} == {"compiled"}
        check_replay(batch, *captured(batch, client))
        began = time.perf_counter()
        again = client.ensure_ready("kimi-k3", tp=8, loc_dtype=("i32", "i64"))
        assert time.perf_counter() - began < 5 * MS
        assert {kernel.tier for kernel in again.kernels} == {"loaded"}
        assert client.stats().loads.count == 2
    with KernelClient(store=DiskStore(tmp_path), offline=True, on_miss="error") as client:
        assert {kernel.tier for kernel in client.ensure_ready("kimi-k3", tp=8).kernels} == {"disk"}


@pytest.mark.parametrize("choice", ["error", "chain"])
def test_B020_a_cold_kernel_in_a_capture(batch: Batch, tmp_path: Path, choice: str) -> None:
    """Raises, or records the chain; the capture is valid either way, and the kernel is there afterwards."""
    with KernelClient(store=DiskStore(tmp_path), offline=True, on_cold_capture=choice) as client:  # type: ignore[arg-type]
        if choice == "chain":
            check_replay(batch, *captured(batch, client))
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                with pytest.raises(KernelNotReady):
                    prepare(*batch.operands(), client=client)
                report = client.ensure_ready("kimi-k3", tp=8)
                marker = torch.zeros(4, device=batch.cache.device)
                marker += 1
            assert isinstance(report.missing[0].error, KernelNotReady)
            graph.replay()
            assert (marker == 1).all()
        assert client.stats().loads.count == 0
        batch.cache.fill_(POISON)
        prepare(*batch.operands(), client=client)
        assert client.stats().loads.count == 1


def test_a_module_outlives_its_handle_and_its_client(batch: Batch, tmp_path: Path) -> None:
    client = KernelClient(store=DiskStore(tmp_path), offline=True)
    client.ensure_ready(KernelSpec(num_heads=12))
    graph, query = captured(batch, client)
    client.close()
    del client
    gc.collect()
    check_replay(batch, graph, query)


def test_ready_from_a_thread_without_a_context(batch: Batch, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with KernelClient(store=DiskStore(tmp_path), offline=True) as client:

        def run() -> None:
            try:
                assert client.ensure_ready("kimi-k3", tp=8, devices=0, strict=True).complete
                prepare(*batch.operands(), client=client)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert failures == []
    assert torch.equal(batch.cache, batch.chain()[1])


FORKED = """
import os, signal, sys
from mlaprep.clients import ForkedProcessError, KernelClient
from mlaprep.clients.dispatch import default_client

mine = default_client()
handle = mine.load(num_heads=12)
child = os.fork()
if child == 0:
    signal.alarm(30)
    found = []
    for call in (
        lambda: handle.load(0),
        lambda: mine.load(num_heads=12, device=0),
        lambda: mine.ensure_ready(num_heads=12, devices=0),
        lambda: default_client().load(num_heads=12, device=0),
    ):
        try:
            call()
            found.append("nothing")
        except ForkedProcessError as error:
            found.append("spawn" in str(error) and str(os.getppid()) in str(error))
    other = default_client() is not mine
    print(found, other, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
mine.load(num_heads=12, device=0)
"""


def test_B026_a_fork_after_use_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True, True, True] True"


def test_a_kernel_by_name_loads_on_the_device_of_its_tensors(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "_default", dispatch._DefaultClient())
    from mlaprep.clients.kernels import kimi_k3_tp8

    query = kimi_k3_tp8(*batch.operands())
    assert query is not None
    wanted_query, wanted_cache = batch.chain()
    assert torch.equal(query.view(torch.uint8), wanted_query)
    assert torch.equal(batch.cache, wanted_cache)
    assert dispatch.default_client().stats().loads.count == 1
    assert kimi_k3_tp8.load() is dispatch.default_client().load(num_heads=12)
    dispatch.default_client().close()
