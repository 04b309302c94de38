"""HotArtifacts: cubins that are asked for over and over, answered without a look at the store for each request."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlaprep.service.edge import request_id_of

FRESH_S: Final = 0.1
"""How long a reply is repeated before the store and the revocations are asked again."""
HOT_BYTES: Final = 16 * 2**20

_PATH: Final = "/v1/artifacts/"
HOT_ROUTE: Final = "/v1/artifacts/{digest}"
"""The route whose replies these are."""
# With one of these a request may get another reply than the plain one, or has a body that somebody must bound.
_CONDITIONS: Final = frozenset({b"if-none-match", b"authorization", b"origin", b"content-length", b"transfer-encoding"})
_REQUEST_ID: Final = b"x-request-id"

_Headers = list[tuple[bytes, bytes]]
_Key = tuple[str, bytes]


@dataclass(slots=True)
class _Reply:
    headers: _Headers
    body: bytes
    until: float


@dataclass(slots=True)
class HotCounts:
    """Replies that were repeated, and the bytes of their bodies. Written on the event loop alone."""

    replies: int = 0
    sent: int = 0


class HotArtifacts:
    """ASGI middleware that repeats the plain 200 of ``GET /v1/artifacts/{digest}`` for ``FRESH_S`` seconds.

    Everything behind it decides every reply; this only repeats what was said a moment ago to the same path and Host,
    headers included and with a request id of its own, which is right because a digest names the same bytes for ever.
    Then one request asks again, and the others are answered from what was said before: with a hundred workers on one
    kernel, the store is asked ten times a second. Any DELETE empties it, so a revocation of this process holds at
    once, one of another process within ``FRESH_S``. Only what somebody without credentials got is repeated, and only
    to others without.

    Args:
        is_open: false while requests are turned away; then nothing is repeated.
        max_bytes: of bodies kept; those that were asked for again longest ago go first. 0 keeps none.
        counts: where repeated replies are counted, which pass by every other layer.
    """

    def __init__(
        self,
        app: ASGIApp,
        is_open: Callable[[], bool] = lambda: True,
        max_bytes: int = HOT_BYTES,
        counts: HotCounts | None = None,
    ) -> None:
        self._app = app
        self._counts = counts or HotCounts()
        self._is_open = is_open
        self._max_bytes = max_bytes
        self._replies: OrderedDict[_Key, _Reply] = OrderedDict()
        self._bytes = 0
        self._deletions = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "DELETE":
            await self._delete(scope, receive, send)
        elif (key := _plain(scope)) is None or not self._is_open():
            await self._app(scope, receive, send)
        else:
            reply = self._replies.get(key)
            now = time.monotonic()
            if reply is None or reply.until < now:
                if reply is not None:
                    reply.until = now + FRESH_S  # whoever comes while this request asks
                await self._ask(key, scope, receive, send)
                return
            self._counts.replies += 1
            self._counts.sent += len(reply.body)
            headers = [*reply.headers, (_REQUEST_ID, request_id_of(scope))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": reply.body})

    async def _ask(self, key: _Key, scope: Scope, receive: Receive, send: Send) -> None:
        deletions, headers = self._deletions, None

        async def listen(message: Message) -> None:
            nonlocal headers
            if message["type"] == "http.response.start":
                if message["status"] == 200:
                    headers = [header for header in message["headers"] if header[0] != _REQUEST_ID]
                else:
                    self._forget(key)
            elif headers is not None and not message.get("more_body") and deletions == self._deletions:
                self._keep(key, headers, message.get("body", b""))
            await send(message)

        await self._app(scope, receive, listen)

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._deletions += 1
            self._replies.clear()
            self._bytes = 0

    def _keep(self, key: _Key, headers: _Headers, body: bytes) -> None:
        self._forget(key)
        self._replies[key] = _Reply(headers, body, time.monotonic() + FRESH_S)
        self._bytes += len(body)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._replies)))

    def _forget(self, key: _Key) -> None:
        if (reply := self._replies.pop(key, None)) is not None:
            self._bytes -= len(reply.body)


def _plain(scope: Scope) -> _Key | None:
    """Path and Host of a request whose reply depends on nothing else."""
    if scope["method"] != "GET" or not scope["path"].startswith(_PATH) or scope["query_string"]:
        return None
    host = None
    for name, value in scope["headers"]:
        if name == b"host" and host is None:
            host = value
        elif name == b"host" or name in _CONDITIONS:
            return None
    return None if host is None else (scope["path"], host)
