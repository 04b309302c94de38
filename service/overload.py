"""Overload: beyond the limit of connections requests are told to come back, and health is told all the same."""

from collections.abc import Collection
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from mlaprep.service.problems import ProblemError

RETRY_AFTER_S: Final = 2
_HEALTH: Final = "/healthz"


class Load:
    """Connections that are open, and how many may be. One belongs to each application."""

    def __init__(self) -> None:
        self._connections: Collection[Any] = ()
        self._limit: int | None = None

    def watch(self, connections: Collection[Any], limit: int) -> None:
        """Have a server's connections counted."""
        self._connections, self._limit = connections, limit

    @property
    def is_beyond(self) -> bool:
        return self._limit is not None and len(self._connections) > self._limit


class OverloadGate:
    """ASGI middleware: 503 with ``Retry-After`` for requests that come while a :class:`Load` is beyond its limit."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._load.is_beyond and scope["path"] != _HEALTH:
            await _overloaded().response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _overloaded() -> ProblemError:
    return ProblemError(
        503,
        "overloaded",
        "Too many connections are open",
        "Ask again in a moment, or ask another replica; MLAPREP_MAX_CONNECTIONS is the limit.",
        headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
    )
