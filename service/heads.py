"""Heads of requests: bounded in time and in size, which uvicorn bounds in neither."""

import asyncio
from http import HTTPStatus
from typing import Any, Final

from mlaprep.service.headers import guarded
from mlaprep.service.problems import ProblemError

MAX_HEAD_BYTES: Final = 32 * 1024
"""Request line and headers together, as far as they come in parts."""


def bounded_heads(protocol: type[asyncio.Protocol], timeout_s: float) -> type[asyncio.Protocol]:
    """One of uvicorn's HTTP protocols that cuts who sends a head slowly or without end.

    A connection has ``timeout_s`` seconds for its first head, from the first byte on for each that follows, and for
    whatever else it sends while no reply is under way. It gets a 408 or 431 where it has begun to say something.
    """
    base: Any = protocol

    class BoundedHeads(base):  # type: ignore[misc]  # whichever protocol uvicorn has chosen
        _deadline: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._start()

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            if cycle is None or not cycle.more_body:
                self._head_bytes += len(data)
            super().data_received(data)
            if self.cycle is not cycle:
                self._head_bytes = 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._cut(431, "head-too-large", f"A request line with its headers may have {MAX_HEAD_BYTES} bytes.")
            elif self._answers():
                self._stop()
            elif self._deadline is None:
                self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _answers(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _start(self) -> None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._too_slow)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            if not self._answers():
                self._cut(408, "request-timeout", f"A request may take {timeout_s:g} seconds to come in.")

        def _cut(self, status: int, slug: str, detail: str) -> None:
            self._stop()
            if self.transport.is_closing():
                return
            if self._head_bytes and not self._answers():
                self.transport.write(_written(ProblemError(status, slug, HTTPStatus(status).phrase, detail)))
            self.transport.close()

    return BoundedHeads


def _written(problem: ProblemError) -> bytes:
    """A problem as it goes over the wire, for a request that never reached the application."""
    response = problem.response()
    headers = guarded([*response.raw_headers, (b"connection", b"close")])
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return f"HTTP/1.1 {problem.status} {problem.title}\r\n".encode() + lines + b"\r\n" + bytes(response.body)
