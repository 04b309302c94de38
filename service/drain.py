"""Drain: between the signal to stop and the end, running requests finish and new ones are turned away."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlaprep.service.problems import ProblemError

RETRY_AFTER_S: Final = 1
_HEALTH: Final = ("/healthz", "/readyz")


class Drain:
    """Counts requests, and knows whether the service is stopping. One belongs to each application."""

    def __init__(self) -> None:
        self.began = False
        self.running = 0
        """Requests that came before the drain, or are no work, and have not been answered."""

    def begin(self) -> None:
        """From now on new requests get a 503, and every reply closes its connection."""
        self.began = True


class DrainGate:
    """ASGI middleware that a :class:`Drain` opens and shuts. Health is told to the end."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start" and self._drain.began:
                headers = [header for header in message.get("headers", ()) if header[0] != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        if self._drain.began and scope["path"] not in _HEALTH:
            await _turned_away().response()(scope, receive, reply)
            return
        self._drain.running += 1
        try:
            await self._app(scope, receive, reply)
        finally:
            self._drain.running -= 1


def _turned_away() -> ProblemError:
    return ProblemError(
        503,
        "shutting-down",
        "The service is shutting down",
        "It finishes what it has begun and takes nothing new; ask another, or again once it is back.",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
