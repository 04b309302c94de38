"""What several devices ask of handle and client, told on a machine that has none: tensors without memory, a driver
that records."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact

from mlaprep.clients import KernelClient, prepare
from mlaprep.clients.errors import KernelNotReady
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import LoadedKernel, device_ordinal
from mlaprep.clients.plan import LaunchConfig
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.spec import KernelSpec

SPEC = KernelSpec(num_heads=3)


@dataclass
class Recorder:
    """Two Hopper devices, each with a stream of its own number."""

    device_type = "cuda"

    loads: list[int] = field(default_factory=list)
    launches: list[tuple[int, int]] = field(default_factory=list)
    """Device of the loaded kernel, and stream."""
    capturing: set[int] = field(default_factory=set)

    def capability(self, device: int) -> tuple[int, int]:
        return 9, 0

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        self.loads.append(device)
        return LoadedKernel(function=1, context=100 + device, multiprocessors=132)

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Any:
        def launch(config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
            self.launches.append((kernel.context - 100, stream))

        launch.native = lambda: None  # type: ignore[attr-defined]
        return launch

    @property
    def current_stream(self) -> Callable[[int], int]:
        return lambda device: 7 + device

    def is_capturing(self, device: int) -> bool:
        return device in self.capturing


@pytest.fixture
def driver() -> Recorder:
    return Recorder()


@pytest.fixture
def handle(driver: Recorder) -> KernelHandle:
    return KernelHandle(emulated_artifact(SPEC), driver)


@pytest.fixture
def client(driver: Recorder, monkeypatch: pytest.MonkeyPatch) -> KernelClient:
    monkeypatch.setattr("mlaprep.clients.launch.cuda_driver", lambda: driver)
    monkeypatch.setattr(KernelClient, "artifact", lambda self, spec, arch: emulated_artifact(spec))
    return KernelClient(store=MemoryStore(), offline=True)


def operands(device: int) -> tuple[torch.Tensor, ...]:
    place, dtype = f"cuda:{device}", torch.bfloat16
    shapes = ((4, 3, 512), (4, 3, 64), (4, 512), (4, 64))
    sources = (torch.empty(shape, dtype=dtype, device=place) for shape in shapes)
    cache = torch.empty(16, 576, dtype=torch.uint8, device=place)
    return *sources, cache, torch.empty(4, dtype=torch.int64, device=place)


@pytest.mark.usefixtures("no_memory")
def test_B058_a_handle_follows_its_tensors(driver: Recorder, handle: KernelHandle) -> None:
    for turn in range(1000):
        device = turn % 2
        query = handle(*operands(device))
        assert query.device == torch.device("cuda", device)
        assert driver.launches[-1] == (device, 7 + device)
    assert driver.loads == [0, 1]


@pytest.mark.usefixtures("no_memory")
def test_B058_prepare_follows_its_tensors(driver: Recorder, client: KernelClient) -> None:
    for device in (1, 0, 1, 0):
        assert prepare(*operands(device), client=client).device == torch.device("cuda", device)
        assert driver.launches[-1] == (device, 7 + device)
    assert driver.loads == [1, 0]


@pytest.mark.usefixtures("no_memory")
def test_B020_only_the_device_that_captures_is_refused(
    driver: Recorder, handle: KernelHandle, client: KernelClient
) -> None:
    driver.capturing = {1}
    handle(*operands(0))
    prepare(*operands(0), client=client)
    loads = [0, 0]  # one for each of the two kernels
    for call in (handle, lambda *tensors: prepare(*tensors, client=client)):
        with pytest.raises(KernelNotReady, match="device 1"):
            call(*operands(1))
    assert driver.loads == loads
    driver.capturing = {0}
    handle(*operands(1))
    prepare(*operands(1), client=client)
    handle(*operands(0))  # loaded, so its capture is no matter
    assert driver.loads == [*loads, 1, 1]


@pytest.mark.usefixtures("no_memory")
def test_B020_what_was_made_ready_is_what_a_capture_launches(driver: Recorder, client: KernelClient) -> None:
    assert client.ensure_ready(num_heads=3, devices=[0, 1]).complete
    loads, driver.capturing = list(driver.loads), {0, 1}
    for device in (0, 1):
        prepare(*operands(device), client=client)
    assert sorted(driver.loads) == sorted(loads) == [0, 1]
    assert [device for device, _ in driver.launches] == [0, 1]


def test_B058_a_client_has_one_handle_for_all_devices_and_threads(driver: Recorder, client: KernelClient) -> None:
    with ThreadPoolExecutor(16) as pool:
        handles = set(pool.map(lambda turn: client.load(SPEC, device=turn % 2), range(64)))
    assert len(handles) == 1
    assert sorted(driver.loads) == [0, 1]


def test_a_device_is_an_ordinal_or_a_torch_device(driver: Recorder, client: KernelClient) -> None:
    handle = client.load(SPEC, device=torch.device("cuda", 1))
    assert handle is client.load(SPEC, device=1)
    handle.load(torch.device("cuda:1")).load(1)
    assert driver.loads == [1]


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        (torch.device("cpu"), ValueError, "^device: found cpu; pass a CUDA device"),
        (torch.device("meta"), ValueError, "^device: found meta"),
        ("cuda:1", TypeError, "^device: found a str"),
        (True, TypeError, "^device: found a bool"),
        (1.0, TypeError, "^device: found a float"),
        (-1, ValueError, "^device: found -1; pass 0 or more"),
    ],
)
def test_what_is_no_cuda_device_is_named(
    driver: Recorder, handle: KernelHandle, client: KernelClient, device: Any, error: type[Exception], words: str
) -> None:
    for call in (device_ordinal, handle.load, lambda given: client.load(SPEC, device=given)):
        with pytest.raises(error, match=words):
            call(device)
    assert driver.loads == []


@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_no_device_is_torchs_current_one(
    driver: Recorder, handle: KernelHandle, monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    handle.load(device)
    assert driver.loads == [1]
