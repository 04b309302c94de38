"""The wire over real sockets: connections kept and renewed, answers cut off, and no httpx where none is needed."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fake_service import artifact_of
from loopback_service import LoopbackService, kernels_of, serving

from mlaprep.clients.errors import ServiceRefused, ServiceUnreachable
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.wire import PlainWire, open_wire
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_90a")
SPECS = [KernelSpec(num_heads=heads) for heads in (12, 24)]


@pytest.fixture
def loopback() -> Iterator[LoopbackService]:
    with serving(kernels_of(artifact_of(spec) for spec in SPECS)) as service:
        yield service


def test_kernels_come_over_one_connection(loopback: LoopbackService) -> None:
    transport = RestTransport(loopback.url)
    for spec in SPECS * 3:
        assert transport.fetch(spec, ARCH) == artifact_of(spec)
    assert loopback.connections == 1
    with pytest.raises(ServiceRefused) as caught:
        transport.fetch(KernelSpec(num_heads=7), ARCH, build=False)
    assert (caught.value.status, caught.value.problem) == (404, "kernel-not-built")
    transport.fetch(SPECS[0], ARCH)
    assert loopback.connections == 1
    transport.close()
    assert transport.fetch(SPECS[0], ARCH) == artifact_of(SPECS[0])
    assert loopback.connections == 2


def test_threads_fetch_at_once(loopback: LoopbackService) -> None:
    transport = RestTransport(loopback.url)
    with ThreadPoolExecutor(16) as pool:
        digests = set(pool.map(lambda turn: transport.fetch(SPECS[turn % 2], ARCH).digest, range(64)))
    assert digests == {artifact_of(spec).digest for spec in SPECS}
    assert len(loopback.requests) == 64


def test_a_worker_needs_no_httpx(loopback: LoopbackService) -> None:
    script = f"""
import sys
sys.modules["httpx"] = None
from mlaprep.clients import KernelClient
from mlaprep.kernels_cache.store import MemoryStore
client = KernelClient({loopback.url!r}, store=MemoryStore(), on_miss="error")
print(client.obtain({SPECS[0].variant_id!r}, "sm_90a").tier)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "service", done.stderr


@pytest.mark.parametrize(
    ("url", "proxies", "plain"),
    [
        ("http://kernels:8400", {}, True),
        ("http://kernels:8400/under", {"https_proxy": "http://proxy:3128"}, True),
        ("http://kernels:8400", {"http_proxy": "http://proxy:3128"}, False),
        ("http://kernels:8400", {"ALL_PROXY": "http://proxy:3128"}, False),
        ("http://127.0.0.1:8400", {"http_proxy": "http://proxy:3128"}, True),
        ("https://kernels", {}, False),
    ],
)
def test_tls_and_proxies_take_httpx(
    url: str, proxies: dict[str, str], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_wire(url, None), PlainWire) is plain


def test_without_httpx_tls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "mlaprep.clients.wire_httpx", raising=False)
    with pytest.raises(ServiceUnreachable, match=r"httpx is not installed; pip install"):
        RestTransport("https://kernels").fetch(SPECS[0], ARCH)


@contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)  # fmt: skip
def test_a_broken_answer_is_no_answer(answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with answering(serve) as url, pytest.raises(ServiceUnreachable, match="cannot be reached"):
        RestTransport(url, timeout=5).fetch(SPECS[0], ARCH)


def test_a_connection_that_the_service_closed_is_renewed() -> None:
    served = []

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        served.append(1)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")  # kept open by its words, then closed

    with answering(serve) as url:
        transport = RestTransport(url)
        for _ in range(3):
            assert transport.document("/healthz") == {}
            time.sleep(0.02)
    assert len(served) == 3
