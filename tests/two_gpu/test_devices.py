"""Two devices in one process. Each test also runs with device 0 standing in for device 1 where there is one GPU."""

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from kernel.devices import Gpu
from two_gpu.batches import POISON, Batch, CountingDriver, batch_spec, synchronize

from mlaprep.clients import KernelClient, explain, prepare
from mlaprep.clients.errors import DriverError, KernelNotReady
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.reference import prepare_chain
from mlaprep.kernels_cache.disk import DiskStore

pytestmark = pytest.mark.timeout(300)

TURNS = 1000


@pytest.fixture
def handle(gpu: Gpu, driver: CountingDriver) -> KernelHandle:
    """Cold: loaded nowhere."""
    return KernelHandle(gpu.artifact(batch_spec()), driver)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DiskStore:
    return DiskStore(tmp_path_factory.mktemp("store"))


def state(libcuda: ctypes.CDLL) -> tuple[int, list[int], int | None]:
    """torch's current device, its current stream on every device, and the thread's CUDA context."""
    context = ctypes.c_void_p()
    assert libcuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    devices = range(torch.cuda.device_count())
    streams = [torch.cuda.current_stream(device).cuda_stream for device in devices]
    return torch.cuda.current_device(), streams, context.value


def test_B058_tensors_of_a_device_that_is_not_current(
    gpu: Gpu, place: torch.device, handle: KernelHandle, driver: CountingDriver, libcuda: ctypes.CDLL
) -> None:
    batch = Batch(place)
    before = state(libcuda)
    query = handle(*batch.operands())
    assert state(libcuda) == before
    assert query.device == place
    assert batch.right(query)
    assert driver.loads == [place.index]
    pool = torch.full_like(batch.cache, POISON)
    assert torch.equal(prepare_chain(*batch.operands(pool)).view(torch.uint8), query.view(torch.uint8))
    assert torch.equal(pool, batch.cache)


def test_B058_prepare_on_a_device_that_is_not_current(
    place: torch.device, store: DiskStore, libcuda: ctypes.CDLL
) -> None:
    batch = Batch(place)
    with KernelClient(store=store, on_miss="compile", offline=True) as client:
        before = state(libcuda)
        query = prepare(*batch.operands(), client=client)
        assert state(libcuda) == before
        assert batch.right(query)
        assert client.stats().unavailable == 0
        assert all(handle is not None for handle in client._serving._serving.values())


def test_B058_explained_and_verified_on_a_device_that_is_not_current(
    place: torch.device, store: DiskStore, libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(place)
    monkeypatch.setenv("MLAPREP_VERIFY", "1")
    with KernelClient(store=store, on_miss="compile", offline=True) as client:
        before = state(libcuda)
        assert "not loaded yet" in str(explain(*batch.operands(), client=client))
        query = prepare(*batch.operands(), client=client, graph_key="verify")
        assert f"loaded on {place}" in str(explain(*batch.operands(), client=client, graph_key="verify"))
        assert state(libcuda) == before
        assert batch.right(query)
        assert client.stats().verified == 1


def test_B058_a_thousand_calls_on_both_devices_in_turn(
    place: torch.device, home: torch.device, handle: KernelHandle, driver: CountingDriver, libcuda: ctypes.CDLL
) -> None:
    devices = [home, place]
    lanes = [(Batch(device, seed), torch.cuda.default_stream(device)) for seed, device in enumerate(devices)]
    lanes += [(Batch(device, 2 + seed), torch.cuda.Stream(device)) for seed, device in enumerate(devices)]
    for turn in range(TURNS):
        batch, stream = lanes[turn % 4]
        with torch.cuda.stream(stream), torch.cuda.device(devices[turn // 4 % 2]):
            before = state(libcuda)
            batch.step(handle)
            assert state(libcuda) == before
    synchronize()
    assert [bool(batch.good) for batch, _ in lanes] == [True] * 4
    assert sorted(driver.loads) == sorted({home.index, place.index})


def test_B058_a_module_is_loaded_once_a_device_however_many_threads_come_first(
    place: torch.device, home: torch.device, handle: KernelHandle, driver: CountingDriver
) -> None:
    devices = [home, place] * 8
    batches = [Batch(device, seed) for seed, device in enumerate(devices)]
    barrier = threading.Barrier(len(batches))

    def first(batch: Batch) -> bool:
        barrier.wait(60)
        return batch.right(handle(*batch.operands()))

    with ThreadPoolExecutor(len(batches)) as pool:
        assert list(pool.map(first, batches)) == [True] * len(batches)
    for device in devices:
        handle.load(device)
    assert sorted(driver.loads) == sorted({home.index, place.index})


def test_B058_a_client_loads_a_module_once_a_device(
    place: torch.device, home: torch.device, store: DiskStore, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlaprep.clients.launch.cuda_driver", lambda: driver)
    devices = [home, place] * 8
    batches = [Batch(device, seed) for seed, device in enumerate(devices)]
    barrier = threading.Barrier(len(batches))
    with KernelClient(store=store, offline=True) as client:

        def first(batch: Batch) -> bool:
            barrier.wait(60)
            return batch.right(prepare(*batch.operands(), client=client))

        with ThreadPoolExecutor(len(batches)) as pool:
            assert list(pool.map(first, batches)) == [True] * len(batches)
    assert sorted(driver.loads) == sorted({home.index, place.index})


def test_B058_nothing_is_allocated_but_the_query_and_on_its_device(place: torch.device, handle: KernelHandle) -> None:
    batch = Batch(place)
    out = torch.empty_like(batch.wanted_query).view(torch.float8_e4m3fn)

    def allocations() -> list[int]:
        return [
            torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
            for device in range(torch.cuda.device_count())
        ]

    handle(*batch.operands())  # what is remembered of a layout is made on the device, and owns nothing there
    before = allocations()
    assert handle(*batch.operands(), out=out) is out
    assert allocations() == before
    query = handle(*batch.operands())
    before[place.index] += 1
    assert allocations() == before
    assert batch.right(out)
    assert batch.right(query)


def test_B058_threads_use_different_devices_at_once(
    place: torch.device, home: torch.device, handle: KernelHandle, driver: CountingDriver
) -> None:
    batches = [Batch(device, seed) for seed, device in enumerate([home, place] * 4)]
    barrier = threading.Barrier(len(batches))

    def work(index: int) -> int:
        batch = batches[index]
        on: AbstractContextManager[Any] = contextlib.nullcontext()
        if index >= 4:
            on = torch.cuda.stream(torch.cuda.Stream(batch.place))
        barrier.wait(60)
        with on:
            for _ in range(100):
                batch.step(handle)
        return torch.cuda.current_device()

    with ThreadPoolExecutor(len(batches)) as pool:
        assert set(pool.map(work, range(len(batches)))) == {home.index}
    synchronize()
    assert [bool(batch.good) for batch in batches] == [True] * len(batches)
    assert sorted(driver.loads) == sorted({home.index, place.index})


def test_B058_a_capture_on_a_device_that_is_not_current(
    place: torch.device, home: torch.device, handle: KernelHandle, driver: CountingDriver, libcuda: ctypes.CDLL
) -> None:
    batch, side = Batch(place), torch.cuda.Stream(place)
    handle.load(place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), torch.cuda.device(home):
        before = state(libcuda)
        query = handle(*batch.operands())
        assert state(libcuda) == before
    torch.cuda.synchronize(place)
    assert (batch.cache == POISON).all()  # a capture writes nothing
    for _ in range(3):
        batch.cache.fill_(POISON)
        query.view(torch.uint8).fill_(POISON)
        graph.replay()
        assert batch.right(query)
    assert driver.loads == [place.index]


def test_B020_a_handle_cold_on_this_device_refuses_a_capture_that_stays_valid(
    place: torch.device, home: torch.device, handle: KernelHandle, store: DiskStore
) -> None:
    batch, side = Batch(place), torch.cuda.Stream(place)
    if place != home:
        handle.load(home)  # loaded elsewhere does not help
    graph = torch.cuda.CUDAGraph()
    with KernelClient(store=store, offline=True) as client:
        with torch.cuda.graph(graph, stream=side), torch.cuda.device(home):
            with pytest.raises(KernelNotReady, match=f"device {place.index}"):
                handle(*batch.operands())
            with pytest.raises(KernelNotReady, match=f"device {place.index}"):
                handle.load(place)
            with pytest.raises(KernelNotReady, match=f"device {place.index}"):
                prepare(*batch.operands(), client=client)
            marker = torch.ones(4, device=place)
        marker.zero_()
        graph.replay()
        assert (marker == 1).all()
        assert (batch.cache == POISON).all()
        assert batch.right(handle(*batch.operands()))
        batch.cache.fill_(POISON)
        assert batch.right(prepare(*batch.operands(), client=client))


def test_B020_a_load_on_one_device_leaves_a_capture_on_the_other_valid(
    place: torch.device, home: torch.device, handle: KernelHandle, driver: CountingDriver
) -> None:
    batch, side = Batch(home), torch.cuda.Stream(place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        marker = torch.zeros(4, device=place)
        with torch.cuda.stream(torch.cuda.default_stream(home)):
            handle.load(home)
        marker += 1
    graph.replay()
    assert (marker == 1).all()
    assert driver.loads == [home.index]
    assert batch.right(handle(*batch.operands()))


def test_a_device_that_is_not_there_is_named(place: torch.device, handle: KernelHandle, driver: CountingDriver) -> None:
    missing = torch.cuda.device_count()
    with pytest.raises(DriverError, match=f"find device {missing}"):
        handle.load(missing)
    assert driver.loads == []
    handle.load(place)
    assert driver.loads == [place.index]
