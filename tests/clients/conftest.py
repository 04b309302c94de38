"""What the client's tests share."""

from pathlib import Path

import pytest
from fake_service import FakeService

from mlaprep.clients.client import KernelClient
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


@pytest.fixture
def spec() -> KernelSpec:
    return KernelSpec(num_heads=12)


@pytest.fixture
def arch() -> Arch:
    return Arch("sm_90a")


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store")


@pytest.fixture
def client(service: FakeService, store: DiskStore) -> KernelClient:
    return KernelClient(transport=service.transport(), store=store, on_miss="error")
