"""Edge: what every request meets first. Request ids, HEAD for every GET, OPTIONS, headers for browsers."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlaprep.service.headers import guarded
from mlaprep.service.logs import REQUEST_ID
from mlaprep.service.malformed import malformed

_CONNECTION_GONE: Final = re.compile(r"state(=| is )(MUST_CLOSE|CLOSED|ERROR)\b|handler is closed|transport is closed")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Edge:
    """ASGI middleware.

    A well-formed ``X-Request-ID`` is kept, any other is replaced; the reply carries it. HEAD runs as GET and
    loses its body, so that both have the same headers and neither builds anything. Every reply gets the headers
    of :mod:`mlaprep.service.headers`. A query or a Host header that cannot be read gets a 400.

    Args:
        methods: methods of a path, none where there is no such resource.
    """

    def __init__(self, app: ASGIApp, methods: Callable[[str], Sequence[str]]) -> None:
        self._app = app
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        REQUEST_ID.set(request_id.decode())
        head = scope["method"] == "HEAD"

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = guarded([*message.get("headers", ()), (b"x-request-id", request_id)])
                if message["status"] == 405 and (known := self._methods(scope["path"])):
                    # A router names the methods of the first route that has the path.
                    headers = [header for header in headers if header[0] != b"allow"]
                    headers.append((b"allow", ", ".join(known).encode()))
                message = {**message, "headers": headers}
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            try:
                await send(message)
            except Exception as error:
                # uvicorn refuses what is sent after a connection that it has closed itself, for one because more came
                # on it that is no request. Whoever is to read the reply is gone; that is no fault of the service.
                if not _CONNECTION_GONE.search(str(error)):
                    raise

        if (problem := malformed(scope)) is not None:
            await problem.response()(scope, receive, reply)
            return
        if scope["method"] == "OPTIONS" and (allowed := self._methods(scope["path"])):
            await Response(status_code=204, headers={"allow": ", ".join(allowed)})(scope, receive, reply)
            return
        await self._app({**scope, "method": "GET"} if head else scope, receive, reply)


def request_id_of(scope: Scope) -> bytes:
    """The id that a request brought, or a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return bytes(given[0])
    return os.urandom(16).hex().encode()
