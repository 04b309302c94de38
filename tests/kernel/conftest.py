"""The device fixture: every case of this folder runs on the emulation in CI and on a GPU where there is one."""

from collections.abc import Iterator

import pytest
from kernel.devices import Emulation, Gpu, KernelDevice


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    return Emulation()


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    device = Gpu()
    yield device
    device.close()


@pytest.fixture(params=["emulation", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> KernelDevice:
    return request.getfixturevalue(request.param)
