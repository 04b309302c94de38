"""A real redis-server on a free port of the loopback interface, stopped and killed by its pid."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "redis-server"


@dataclass
class RedisServer:
    """A server that keeps nothing on disk. ``options`` are those of its command line."""

    folder: Path
    port: int
    options: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        """A client of its own, without the limits of the code under test."""
        import redis

        return redis.Redis(port=self.port, password=self.options.get("requirepass"), socket_timeout=10)

    def start(self) -> None:
        """Start it, again perhaps, and wait until it listens."""
        given = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(self.folder)}
        arguments = [word for name, value in (given | self.options).items() for word in (f"--{name}", value)]
        with (self.folder / f"redis-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen([PROGRAM, *arguments], stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "redis-server ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64):  # an error of one that wants a password will do
                    return
            time.sleep(0.01)
        raise AssertionError("redis-server does not answer")

    def pause(self) -> None:
        """Stop it: connections are still accepted, and nothing answers."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, whatever state it is in; what it held is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_redis(folder: Path, **options: str) -> Iterator[RedisServer]:
    """A server with options such as ``maxmemory="2mb"``; killed at the end. Skips the test where there is none.

    In an option's name an underscore stands for a hyphen.
    """
    if shutil.which(PROGRAM) is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed; tests/install-tools installs it")
        pytest.skip("redis-server is not installed")
    server = RedisServer(folder, free_port(), {name.replace("_", "-"): value for name, value in options.items()})
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """An empty server of the test's own."""
    with running_redis(tmp_path) as server:
        yield server
