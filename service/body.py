"""Request bodies: bounded by counted bytes, and JSON that means the same to everybody.

Python's JSON reads NaN, 1e400, lone surrogates, repeated names and integers of any length. None of them
has a meaning here, and some break whatever handles them next, so they are refused by name.
"""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlaprep.service.problems import ProblemError, invalid_fields
from mlaprep.templates.errors import FieldProblem
from mlaprep.templates.fields import allowed_values
from mlaprep.templates.schema import spec_json_schema

MAX_DEPTH: Final = 16

_MAX_DIGITS: Final = 18
# Each is one pass over a text, whatever it holds: none of them can try a second way through it.
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_STRING: Final = re.compile(r'"[^"]*"?')
_NO_BRACKET: Final = re.compile(r"[^\[\]{}]+")
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_FORBIDDEN_TEXT: Final = re.compile("[\0\ud800-\udfff]")
_SPEC_FIELDS: Final = frozenset(spec_json_schema()["properties"])


class BodyLimit:
    """ASGI middleware: a body ends at ``max_bytes``, whatever its headers promise, and ``timeout_s`` after it is first
    asked for."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > self._max_bytes):
                await self._too_large().response()(scope, receive, send)
                return
        counted, complete = 0, False
        deadline: float | None = None

        async def bounded() -> Message:
            nonlocal counted, complete, deadline
            if complete:  # whoever asks now waits for the client to leave, as long as it takes
                return await receive()
            deadline = deadline or asyncio.get_running_loop().time() + self._timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            if message["type"] == "http.request":
                complete = not message.get("more_body", False)
                counted += len(message.get("body", b""))
                if counted > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, bounded, send)

    def _too_slow(self) -> ProblemError:
        return ProblemError(
            408,
            "request-timeout",
            "Request Timeout",
            f"A request body may take {self._timeout_s:g} seconds to come in.",
            headers={"connection": "close"},
        )

    def _too_large(self) -> ProblemError:
        # The rest of the body is not read, so the connection cannot be used again.
        return ProblemError(
            413,
            "body-too-large",
            "The body is too large",
            f"A request body may have {self._max_bytes} bytes.",
            headers={"connection": "close"},
        )


async def read_json(request: Request) -> Any:
    """The request's body as JSON, or None where it is empty.

    Raises:
        ProblemError: 413 above the limit, 415 for another media type, 422 for JSON that is refused.
    """
    data = await request.body()
    if not data:
        return None
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ProblemError(
            415, "unsupported-media-type", "The body has another media type", "Send application/json, or no body."
        )
    return strict_json(data)


def strict_json(data: bytes) -> Any:
    """A JSON value whose numbers are finite, integers short, names distinct and texts storable.

    Raises:
        ProblemError: 422 that names what is at fault; never any other exception, whatever the bytes.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _refused("body", "bytes that are not UTF-8", "JSON text in UTF-8") from None
    if _depth(text) > MAX_DEPTH:
        raise _refused("body", "nesting that is too deep", f"at most {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_members,
            parse_constant=lambda _: _Refused("a number that is not finite"),
            parse_float=_finite,
            parse_int=_bounded,
        )
    except (ValueError, RecursionError):
        raise _refused("body", "text that is not JSON", "one JSON value") from None
    problems = list(_faults(value, ()))
    if problems:
        raise invalid_fields(problems, "invalid-json")
    return value


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands in the parsed value for what must not be in it, so that the walk can say where it was."""

    found: str


def plain_name(name: str) -> str:
    """A name out of a request as a problem may show it."""
    return name if _PLAIN_NAME.fullmatch(name) else "(unprintable name)"


def _refused(field: str, found: str, allowed: str) -> ProblemError:
    return invalid_fields([FieldProblem(field, found, allowed)], "invalid-json")


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, as far as a parser would get: it stops at a stray backslash."""
    brackets = _NO_BRACKET.sub("", _STRING.sub("", _ESCAPED.sub("", text)))
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        members[name] = _Refused("a name that stands twice") if name in members else value
    return members


def _finite(text: str) -> float | _Refused:
    number = float(text)
    return number if math.isfinite(number) else _Refused("a number that is not finite")


def _bounded(text: str) -> int | _Refused:
    # The parser gives the digits unread: Python refuses to convert a few thousand of them.
    return int(text) if len(text.removeprefix("-")) <= _MAX_DIGITS else _Refused("an integer with too many digits")


def _faults(value: Any, path: tuple[str, ...]) -> Iterator[FieldProblem]:
    if isinstance(value, _Refused):
        yield _fault(path, value.found)
    elif isinstance(value, str):
        if _FORBIDDEN_TEXT.search(value):
            yield _fault(path, "a string with a NUL or a lone surrogate")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, (*path, str(index)))
    elif isinstance(value, dict):
        for name, item in value.items():
            if _FORBIDDEN_TEXT.search(name):
                yield _fault((*path, name), "a name with a NUL or a lone surrogate")
            else:
                yield from _faults(item, (*path, name))


def _fault(path: tuple[str, ...], found: str) -> FieldProblem:
    spec_field = path[1] if len(path) == 2 and path[0] == "spec" and path[1] in _SPEC_FIELDS else None
    if spec_field is not None:
        return FieldProblem(spec_field, found, allowed_values(spec_field))
    shown = [plain_name(part) for part in path]
    return FieldProblem(".".join(shown) or "body", found, "plain JSON: finite numbers, distinct names, whole text")
