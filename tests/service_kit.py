"""What the service's tests share: an application without a socket, a real server, and watching processes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mlaprep.service.state import Service

SERVE = "from mlaprep.service.server import serve; serve()"


class Loop:
    """An event loop in a thread, for tests that are no coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@dataclass(frozen=True)
class Client:
    """An application, called without a socket."""

    app: Any
    loop: Loop

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.loop.run(self._request(method, path, **more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def put(self, path: str, **more: Any) -> httpx.Response:
        return self.request("PUT", path, **more)

    def put_json(self, path: str, body: bytes) -> httpx.Response:
        return self.put(path, content=body, headers={"content-type": "application/json"})

    def together(self, calls: list[tuple[str, str]]) -> list[httpx.Response]:
        """Several requests at once."""

        async def all_of_them() -> list[httpx.Response]:
            return list(await asyncio.gather(*(self._request(method, path) for method, path in calls)))

        return self.loop.run(all_of_them())

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8400") as http:
            return await http.request(method, path, **more)


ClientMaker = Callable[..., Client]


@dataclass(frozen=True)
class Server:
    """The service as a process of its own."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def children(self) -> list[int]:
        """Pids of its compile processes, from the kernel's own list."""
        return children_of(self.process.pid)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Time that a process has spent on a processor, all threads that still run."""
    stats = [(task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


ServerMaker = Callable[..., AbstractContextManager[Server]]


def wait_until_up(server: Server, *, ready: bool) -> None:
    with httpx.Client(base_url=server.url) as http:

        def answers() -> bool:
            assert server.process.poll() is None, server.log.read_text()
            try:
                return http.get("/readyz" if ready else "/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, 30)


@contextlib.contextmanager
def running_server(
    folder: Path, *, python: str = sys.executable, code: str = SERVE, wait: bool = True, **variables: str
) -> Iterator[Server]:
    """The service with uvicorn on a free port of the loopback interface, its cache and its log in a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(exist_ok=True)
    environ = os.environ | {"MLAPREP_CACHE_DIR": str(folder / "cache"), "MLAPREP_PORT": str(port)} | variables
    log = folder / f"server-{port}.log"
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
