"""Observed: every request counted, timed and logged."""

import time
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlaprep.service.logs import access_line
from mlaprep.service.metrics import Metrics

UNROUTED: Final = "none"
"""The route of a request for something that there is not, or that was answered before it came to one."""


class RouteNote:
    """The innermost ASGI middleware: notes which route took a request, for the outermost to tell."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            route = scope.get("route")
            if route is not None:
                scope["state"]["route"] = route.path


class Observed:
    """The outermost ASGI middleware.

    Args:
        metrics: where requests are counted.
        access_log: whether each has a line in the log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, sent = time.perf_counter(), 0, 0
        state: dict[str, Any] = scope.setdefault("state", {})
        self._running += 1
        self._metrics.running(self._running)

        async def reply(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, reply)
        except Exception:  # the framework answers it beyond this middleware
            status = status or 500
            raise
        finally:
            seconds = time.perf_counter() - began
            self._running -= 1
            self._metrics.running(self._running)
            route = state.get("route", UNROUTED)
            # A client that left before the reply began: the number that nginx gives such a request.
            self._metrics.request_done(route, scope["method"], status or 499, seconds, sent)
            if self._access_log:
                access_line(scope, route, status or 499, seconds, sent)
