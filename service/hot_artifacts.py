"""HotArtifacts: cubins that are asked for over and over, answered without a look at the store for each request."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

FRESH_S: Final = 0.1
"""How long a reply is repeated before the store and the revocations are asked again."""
HOT_BYTES: Final = 16 * 2**20

_PATH: Final = "/v1/artifacts/"
# With one of these a request may get another reply than the plain one, or has a body that somebody must bound.
_CONDITIONS: Final = frozenset({b"if-none-match", b"authorization", b"content-length", b"transfer-encoding"})

_Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Reply:
    headers: _Headers
    body: bytes
    until: float


class HotArtifacts:
    """ASGI middleware that repeats the plain 200 of ``GET /v1/artifacts/{digest}`` for ``FRESH_S`` seconds.

    The route decides every reply; this only repeats what it said a moment ago, headers included, which is right
    because a digest names the same bytes for ever. Then one request asks the route again, and the others are
    answered from what it said before: with a hundred workers on one kernel, the store is asked ten times a second.
    Any DELETE empties it, so a revocation of this process holds at once, one of another process within ``FRESH_S``.
    Only what the route gave to somebody without credentials is repeated, and only to others without.

    Args:
        max_bytes: of bodies kept; those that the route gave longest ago go first. 0 keeps none.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = HOT_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._replies: OrderedDict[str, _Reply] = OrderedDict()
        self._bytes = 0
        self._deletions = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "DELETE":
            await self._delete(scope, receive, send)
        elif _is_plain(scope):
            path = scope["path"]
            reply = self._replies.get(path)
            now = time.monotonic()
            if reply is None or reply.until < now:
                if reply is not None:
                    reply.until = now + FRESH_S  # whoever comes while this request asks the route
                await self._ask(path, scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": reply.headers.copy()})
            await send({"type": "http.response.body", "body": reply.body})
        else:
            await self._app(scope, receive, send)

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        deletions, headers = self._deletions, None

        async def listen(message: Message) -> None:
            nonlocal headers
            if message["type"] == "http.response.start":
                if message["status"] == 200:
                    headers = list(message["headers"])
                else:
                    self._forget(path)
            elif headers is not None and not message.get("more_body") and deletions == self._deletions:
                self._keep(path, headers, message.get("body", b""))
            await send(message)

        await self._app(scope, receive, listen)

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._deletions += 1
            self._replies.clear()
            self._bytes = 0

    def _keep(self, path: str, headers: _Headers, body: bytes) -> None:
        self._forget(path)
        self._replies[path] = _Reply(headers, body, time.monotonic() + FRESH_S)
        self._bytes += len(body)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._replies)))

    def _forget(self, path: str) -> None:
        if (reply := self._replies.pop(path, None)) is not None:
            self._bytes -= len(reply.body)


def _is_plain(scope: Scope) -> bool:
    """Whether the reply depends on nothing but the path."""
    return (
        scope["method"] == "GET"
        and scope["path"].startswith(_PATH)
        and not scope["query_string"]
        and _CONDITIONS.isdisjoint(name for name, _ in scope["headers"])
    )
