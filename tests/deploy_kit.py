"""What the tests of deploy/ share: a running nginx, and upstreams whose every answer is a test's own."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass(frozen=True)
class Proxy:
    """A running nginx and how to reach it."""

    port: int
    trust: ssl.SSLContext
    folder: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=self.trust, timeout=30)

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        return self.trust.wrap_socket(plain, server_hostname="127.0.0.1")


ProxyMaker = Callable[..., AbstractContextManager[Proxy]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def upstream(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server on a free port that answers each request's head with these bytes, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head and (got := connection.recv(65536)):
                    head += got
                if head:
                    connection.sendall(answer(head))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # which wakes the accept
        listener.close()
        thread.join(5)


def ends(connection: ssl.SSLSocket, *, trickling: bool = False, within_s: float = 10.0) -> bool:
    """Whether the other side closes; ``trickling`` sends a byte of a head each half second meanwhile."""
    with connection:
        connection.settimeout(0.5)
        for _ in range(int(within_s / 0.5)):
            try:
                if trickling:
                    connection.sendall(b"x")
                if not connection.recv(4096):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
    return False
