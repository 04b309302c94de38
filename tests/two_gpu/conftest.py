"""Fixtures: the device that is used and the one that stays current, which with one GPU are the same."""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from kernel.devices import Gpu
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from two_gpu.batches import CountingDriver, synchronize

HOME = torch.device("cuda", 0)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    torch.cuda.set_device(HOME)
    device = Gpu()
    yield device
    device.close()


@pytest.fixture(
    params=[
        pytest.param(0, id="one", marks=pytest.mark.gpu),
        pytest.param(1, id="two", marks=pytest.mark.two_gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where tensors lie while device 0 is current, in use and to stay current: device 1, or 0 standing in for it."""
    torch.cuda.set_device(HOME)
    torch.zeros(1, device=HOME).add_(1)
    yield torch.device("cuda", request.param)
    synchronize()
    assert torch.cuda.current_device() == HOME.index


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of any device, one that is not there included, without memory: all at address 4096."""
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 4096, raising=False)
    with FakeTensorMode():
        yield


@pytest.fixture
def home() -> torch.device:
    return HOME


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture(scope="session")
def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
