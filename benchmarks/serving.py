"""Servers as processes of their own, and what drives them: wrk, and a herd of connections."""

import asyncio
import contextlib
import hashlib
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
SERVE = "from mlaprep.service.server import serve; serve()"
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3}
_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; location / {{ root {root}; }} }}
}}
"""


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    port: int
    process: "subprocess.Popen[bytes]"
    ready_s: float
    """From its start until it answered."""

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"content-type": "application/json"} if body else {}
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def rss_mb(self) -> float:
        """Resident memory of the process itself, without its children."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, path: str, environ: dict[str, str] | None = None) -> Iterator[Served]:
    """A server until the block ends; it is up once ``path`` gets a 200."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _answers(port, path):
            if process.poll() is not None or time.perf_counter() - began > 120:
                raise SystemExit(f"{command[0]} did not get ready")
            time.sleep(0.005)
        yield Served(port, process, time.perf_counter() - began)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def service(cache: Path, path: str = "/readyz", **settings: str) -> contextlib.AbstractContextManager[Served]:
    """The real service over a cache directory, ready to build."""
    port = free_port()
    return running([sys.executable, "-c", SERVE], port, path, environ_of(port, cache, **settings))


def bare(body: Path) -> contextlib.AbstractContextManager[Served]:
    """``bare_app.py``: the same bytes with nothing in between, under the service's uvicorn settings."""
    port = free_port()
    return running([sys.executable, str(HERE / "bare_app.py"), str(body)], port, "/", environ_of(port, body.parent))


def nginx(body: Path, folder: Path) -> contextlib.AbstractContextManager[Served]:
    """nginx, one process, serving the file."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, root=body.parent, port=port))
    return running(["nginx", "-c", str(config), "-e", str(folder / "error.log")], port, f"/{body.name}")


_BYTECODE: Final = tempfile.TemporaryDirectory(prefix="mlaprep-bytecode-")


def environ_of(port: int, cache: Path, **settings: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MLAPREP_")}
    # Bytecode as an installation has it, whatever the environment says of writing it.
    plain |= {"PYTHONPYCACHEPREFIX": _BYTECODE.name, "PYTHONDONTWRITEBYTECODE": ""}
    return plain | {"MLAPREP_PORT": str(port), "MLAPREP_CACHE_DIR": str(cache)} | settings


def wrk(port: int, path: str, seconds: float, connections: int) -> dict[str, float]:
    """One round of wrk: see :func:`parse_wrk`."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    done = subprocess.run([*command, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True)
    return parse_wrk(done.stdout)


def parse_wrk(text: str) -> dict[str, float]:
    """Requests a second, p50 and p99 in milliseconds, requests, and how many got no 2xx or 3xx or failed."""
    shares = {share: float(value) * _UNITS[unit] for share, value, unit in _SHARES.findall(text)}
    rate, requests = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"(\d+) requests in", text)
    if rate is None or requests is None or not {"50", "99"} <= set(shares):
        raise ValueError(f"no report of wrk: {text!r}")
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    errors = int(refused[1]) if refused else 0
    sockets = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    errors += sum(map(int, sockets.groups())) if sockets else 0
    found = {"rps": float(rate[1]), "p50_ms": shares["50"], "p99_ms": shares["99"]}
    return found | {"requests": int(requests[1]), "errors": errors}


_SHARES = re.compile(r"^\s+(50|99)%\s+([\d.]+)(us|ms|s|m)$", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """One worker's request."""

    status: int
    """0 where the connection failed."""
    seconds: float
    body: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


def herd(port: int, requests: Sequence[tuple[str, str]]) -> tuple[list[Call], float]:
    """A connection of its own for each of these (method, path), all at once; the answers, and seconds for all."""

    async def everybody() -> list[Call]:
        gate = asyncio.Event()
        calls = [asyncio.create_task(_call(port, method, path, gate)) for method, path in requests]
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(*calls)

    began = time.perf_counter()
    calls = asyncio.run(everybody())
    return calls, time.perf_counter() - began


async def _call(port: int, method: str, path: str, gate: asyncio.Event) -> Call:
    await gate.wait()
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read(-1)
        finally:
            writer.close()
    except OSError:
        return Call(0, time.perf_counter() - began, b"")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0
    return Call(status, time.perf_counter() - began, body)


@contextlib.contextmanager
def sampling(port: int, path: str, pause_s: float) -> Iterator[list[float]]:
    """Milliseconds of one GET after the other on one connection, until the block ends."""
    taken: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not stop.wait(pause_s):
            began = time.perf_counter()
            connection.request("GET", path)
            connection.getresponse().read()
            taken.append((time.perf_counter() - began) * 1e3)
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()
