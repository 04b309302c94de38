"""Wire: one HTTP request and its answer, over the standard library where that is enough, else over httpx.

A worker asks a service on its own network by plain HTTP, and importing httpx would cost that first kernel most of its
time: 75 ms of 100 on a small machine. TLS, proxies and an injected transport go through httpx.
"""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import SplitResult, urlsplit

from mlaprep.clients.errors import ServiceUnreachable

if TYPE_CHECKING:
    import http.client

    import httpx

CONNECT_TIMEOUT_S: Final = 2.0
_CHUNK: Final = 2**16
_IDLE: Final = 8
"""Connections that are kept open for the next request."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PROXIES: Final = ("http_proxy", "all_proxy")


class WireError(ServiceUnreachable):
    """The request could not be sent, or its answer not be read to its end."""


class Answer(Protocol):
    """An answer whose body is still to be read."""

    status: int

    def header(self, name: str) -> str:
        """A header's value by its lower-case name, "" where it is not there."""

    def chunks(self) -> Iterator[bytes]:
        """The body, in pieces. Raises WireError where it is cut off."""


class Wire(Protocol):
    """Sends requests; safe to share between threads."""

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None, timeout: float
    ) -> AbstractContextManager[Answer]:
        """One request; ``timeout`` is for each wait on the socket. Raises WireError."""

    def close(self) -> None:
        """End every connection, those in use included."""


def open_wire(url: str, transport: "httpx.BaseTransport | None") -> Wire:
    """The wire to a checked service URL; ``transport`` replaces the network.

    Raises:
        ServiceUnreachable: httpx is needed and not there.
    """
    parts = urlsplit(url)
    local = parts.hostname in _LOOPBACK  # no proxy to loopback
    proxied = not local and any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)
    if transport is None and parts.scheme == "http" and not proxied:
        return PlainWire(parts)
    try:
        return _httpx_wire(url, transport, trust_env=not local)
    except ImportError as error:
        raise ServiceUnreachable(
            f"{url} needs TLS or a proxy, and {error.name} is not installed; pip install 'mlaprep[client]'"
        ) from error


class PlainWire:
    """HTTP/1.1 without TLS and proxies."""

    def __init__(self, parts: SplitResult) -> None:
        assert parts.hostname is not None
        self._host, self._port, self._base = parts.hostname, parts.port or 80, parts.path
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = False

    @contextlib.contextmanager
    def ask(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None, timeout: float
    ) -> Iterator[Answer]:
        import http.client

        connection = self._take(timeout)
        done = False
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, self._base + path, content, dict(headers))
            response = connection.getresponse()
            yield _PlainAnswer(response)
            done = response.isclosed() and not response.will_close
        except (OSError, http.client.HTTPException) as error:
            raise WireError(str(error) or type(error).__name__) from error
        finally:
            self._give(connection, done)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            # Ends what another thread reads; closing is for that thread, since the number may be used again.
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _take(self, timeout: float) -> "http.client.HTTPConnection":
        import http.client

        with self._lock:
            if self._closed:
                raise WireError("the connection was closed")
            while self._idle:
                connection = self._idle.pop()
                # Readable while nothing is due: the service has closed it.
                if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                    break
                connection.close()
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=min(timeout, CONNECT_TIMEOUT_S))
            self._busy.add(connection)
            return connection

    def _give(self, connection: "http.client.HTTPConnection", reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self._closed and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _PlainAnswer:
    def __init__(self, response: "http.client.HTTPResponse") -> None:
        self.status = response.status
        self._response = response

    def header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    def chunks(self) -> Iterator[bytes]:
        import http.client

        try:
            while chunk := self._response.read1(_CHUNK):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise WireError(str(error) or type(error).__name__) from error
        if self._response.length:
            raise WireError(f"the answer ended {self._response.length} bytes early")
        self._response.close()


def _httpx_wire(url: str, transport: "httpx.BaseTransport | None", *, trust_env: bool) -> Wire:
    import httpx

    from mlaprep.clients.wire_httpx import HttpxWire

    verify = url.startswith("https:")  # loading the trust store takes 30 ms
    return HttpxWire(url, httpx.Client(transport=transport, verify=verify, trust_env=trust_env), transport is None)
