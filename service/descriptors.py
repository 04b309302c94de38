"""Descriptors: how many connections the process's limit of open files leaves room for, and what happens beyond."""

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final

RESERVED: Final = 512
"""Open files kept for the cache, for compile processes and for connections that are about to be refused."""
ACCEPTED_AT_ONCE: Final = 128
"""Connections that the event loop takes in one turn, before any of them can be counted."""
ANSWERED_BEYOND: Final = 64
"""Connections above the limit that are told so with a 503; more are closed as they come."""

_LEAST: Final = 16
_LOG_EVERY_S: Final = 10.0
_OUT_OF_FILES: Final = "socket.accept() out of system resource"  # how asyncio tells it

_log = logging.getLogger(__name__)


def room_for(connections: int) -> int:
    """Connections that may be open at once: as many as asked if the limit of open files can be raised that far.

    Raises the process's soft limit, never beyond the hard one; warns where that leaves room for fewer.
    """
    limit = _raise_limit(connections + RESERVED)
    room = max(_LEAST, limit - RESERVED)
    if connections <= room:
        return connections
    _log.warning(
        "room for %d connections, not %d: this process may have %d files open. Raise that limit (ulimit -Hn, "
        "LimitNOFILE=) to %d, or lower MLAPREP_MAX_CONNECTIONS",
        room,
        connections,
        limit,
        connections + RESERVED,
    )
    return room


def _raise_limit(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            return target
    return soft


class Refused(asyncio.Protocol):
    """A connection that is closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()


def refuse_beyond(limit: int, protocol: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
    """A factory of uvicorn's protocols that refuses connections while ``limit`` are open.

    uvicorn itself turns requests away, not connections: those that ask nothing would use up every open file.
    """

    def make(**state: Any) -> asyncio.Protocol:
        return Refused() if len(state["server_state"].connections) >= limit else protocol(**state)

    return make


def log_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop that is out of open files say so now and then, not for every connection that it cannot take."""
    next_time = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal next_time
        if context.get("message") != _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() >= next_time:
            next_time = time.monotonic() + _LOG_EVERY_S
            _log.error("no connection can be taken for the moment: %s", context.get("exception"))

    loop.set_exception_handler(handle)
