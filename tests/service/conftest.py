"""Fixtures of the service's tests."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_kit import SERVE, Client, ClientMaker, Loop, Server, ServerMaker, wait_until_up

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
        client.service.builder.close()


@pytest.fixture
def client(make_client: ClientMaker) -> Client:
    return make_client()


@pytest.fixture
def run_server(tmp_path: Path) -> ServerMaker:
    """Starts the real thing: uvicorn on a free port of the loopback interface."""

    @contextlib.contextmanager
    def run(
        *, python: str = sys.executable, code: str = SERVE, wait: bool = True, **variables: str
    ) -> Iterator[Server]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = os.environ | {"MLAPREP_CACHE_DIR": str(tmp_path / "cache"), "MLAPREP_PORT": str(port)} | variables
        log = tmp_path / f"server-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen([python, "-c", code], env=environ, stdout=output, stderr=subprocess.STDOUT)
        server = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            wait_until_up(server, ready=wait)
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    return run
