"""Processes that use one of two devices: what they leave on the other, ranks on a cold cache, pickled handles."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from two_gpu.batches import batch_spec
from two_gpu.worker import call_handle

from mlaprep.clients import KernelClient
from mlaprep.kernels_cache.disk import DiskStore

pytestmark = pytest.mark.timeout(300)

RANKS = 8
MIB = 2**20
SLACK = 64 * MIB
"""A CUDA context takes several times as much."""


class Worker:
    def __init__(self, device: int, cache: Path, **changes: str) -> None:
        paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
        environment = os.environ | {"PYTHONPATH": paths, "MLAPREP_CACHE_DIR": str(cache), "MLAPREP_OFFLINE": "1"}
        command = [sys.executable, "-m", "two_gpu.worker", str(device)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | changes
        )

    def report(self) -> dict[str, Any]:
        """Wait for its next stage."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker ended with status {self._process.wait(30)}; its stderr says why"
        found: dict[str, Any] = json.loads(line)
        return found

    def proceed(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> int:
        self.proceed()
        return self._process.wait(60)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def worker(device: int, cache: Path, **changes: str) -> Iterator[Worker]:
    process = Worker(device, cache, **changes)
    try:
        yield process
    finally:
        process.kill()


def free_memory() -> list[int]:
    return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


def check_memory(before: list[int], used: int) -> None:
    """While a worker lives, its device shows it and no other device does."""
    taken = [was - now for was, now in zip(before, free_memory(), strict=True)]
    assert taken[used] > SLACK, taken
    assert all(amount < SLACK for device, amount in enumerate(taken) if device != used), taken


def visible(index: int) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` must be for a child to see this process's device ``index`` alone."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[index] if given else str(index)


def test_B058_a_process_leaves_no_context_and_no_memory_on_another_device(place: torch.device, tmp_path: Path) -> None:
    before = free_memory()
    with worker(place.index, tmp_path) as process:
        imported = process.report()
        assert not any(imported["contexts"])
        process.proceed()
        called = process.report()
        check_memory(before, place.index)
        assert process.end() == 0
    alone = [device == place.index for device in range(torch.cuda.device_count())]
    assert called["right"] == [True, True]
    assert called["loaded"] == alone
    assert called["contexts"] == alone
    assert [amount > 0 for amount in called["reserved"]] == alone
    assert called["current"] == 0


def test_B058_a_process_that_sees_one_device_alone(place: torch.device, tmp_path: Path) -> None:
    """With ``CUDA_VISIBLE_DEVICES=1`` the second GPU is device 0."""
    before = free_memory()
    with worker(0, tmp_path, CUDA_VISIBLE_DEVICES=visible(place.index)) as process:
        assert process.report()["contexts"] == [False]
        process.proceed()
        called = process.report()
        check_memory(before, place.index)
        assert process.end() == 0
    assert called["right"] == [True, True]
    assert called["contexts"] == [True]
    assert called["uuid"] == str(torch.cuda.get_device_properties(place).uuid)


def test_B058_eight_ranks_over_the_devices_build_a_kernel_once(place: torch.device, tmp_path: Path) -> None:
    """Rank n uses device n % 2 (device 0 on one GPU), all from one cold cache."""
    devices = [rank % (place.index + 1) for rank in range(RANKS)]
    ranks = [Worker(device, tmp_path) for device in devices]
    try:
        for rank in ranks:  # the barrier: everything is imported, nothing is asked for
            assert rank.report()["stage"] == "imported"
        for rank in ranks:
            rank.proceed()
        with ThreadPoolExecutor(RANKS) as pool:
            reports = list(pool.map(Worker.report, ranks))
            assert list(pool.map(Worker.end, ranks)) == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    print(json.dumps({"ready_s": [round(report["ready_s"], 2) for report in reports]}))
    assert [report["right"] for report in reports] == [[True, True]] * RANKS
    assert len({report["digest"] for report in reports}) == 1
    # The one that was loaded by name, and the one with strides compiled in that prepare asks for.
    assert sum(report["compiled"] for report in reports) == 2
    assert len(list(DiskStore(tmp_path).list())) == 2
    for device, report in zip(devices, reports, strict=True):
        assert report["contexts"] == [index == device for index in range(torch.cuda.device_count())]


def test_B026_a_pickled_handle_works_in_a_spawned_child(
    place: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLAPREP_OFFLINE", "1")
    with KernelClient() as client:
        handle = client.load(batch_spec(), device=0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply_async(call_handle, (handle, place.index)).get(120)
    alone = [device == place.index for device in range(torch.cuda.device_count())]
    assert found == {"right": True, "contexts": alone, "compiled": 0}
