"""Fixtures of the service's tests."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_kit import Client, ClientMaker, Loop, ServerMaker, running_server

from mlaprep.kernels_cache.store import KernelStore
from mlaprep.service.app import create_app
from mlaprep.service.compiler import Compiler
from mlaprep.service.settings import Settings
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """One pool for all tests that only want kernels."""
    with Compiler(processes=2) as compiler:
        compiler.start()
        yield compiler


@pytest.fixture
def spec() -> KernelSpec:
    return KernelSpec(num_heads=12)


@pytest.fixture
def arch() -> Arch:
    return Arch("sm_100a")


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def make_client(tmp_path: Path, compiler: Compiler, loop: Loop) -> Iterator[ClientMaker]:
    """Applications over one cache directory and, unless another is given, the shared compiler."""
    made: list[Client] = []

    def make(
        *, store: KernelStore | None = None, compiler: Compiler = compiler, create: Any = create_app, **settings: Any
    ) -> Client:
        settings.setdefault("cache_dir", tmp_path / "cache")
        client = Client(create(Settings(**settings), store=store, compiler=compiler), loop)
        made.append(client)
        return client

    yield make
    for client in made:
        client.service.jobs.close()
        client.service.builder.close()
        if client.service.shared is not None:  # or it knocks at a dead server while other tests run
            client.service.shared.redis.close()


@pytest.fixture
def client(make_client: ClientMaker) -> Client:
    return make_client()


@pytest.fixture
def run_server(tmp_path: Path) -> ServerMaker:
    """Starts the real thing: uvicorn on a free port of the loopback interface."""
    return functools.partial(running_server, tmp_path)
