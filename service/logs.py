"""Logs: every line of the process in one format, with the id of the request that it belongs to."""

import logging
import sys
import threading
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, Final, Literal

import structlog
from starlette.types import Scope

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

REQUEST_ID: Final[ContextVar[str]] = ContextVar("mlaprep_request_id", default="")
"""The request that the current task or thread works for."""

_MAX_PATH: Final = 256
_LOG_EVERY_S: Final = 10.0
_MALFORMED: Final = "Invalid HTTP request received."  # these are uvicorn's words
_UPGRADES: Final = ("Unsupported upgrade request.", "No supported WebSocket library detected.")
_access: Final = logging.getLogger("mlaprep.access")
_shared: Final[list[Any]] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def set_up_logs(form: LogFormat, level: LogLevel, *, access_log: bool) -> None:
    """Have every logger write to stderr, one line an event; where logging has been set up already, nothing.

    ``auto`` is JSON, and for people at a terminal console.
    """
    _access.setLevel(logging.INFO if access_log else logging.CRITICAL)
    logging.getLogger("uvicorn.error").addFilter(_STRANGERS_NOISE)
    root = logging.getLogger()
    if root.handlers:
        return
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(is_json))
    root.addHandler(handler)
    root.setLevel(level.upper())


class StrangersNoise(logging.Filter):
    """For uvicorn's logger: what any stranger can have it say, a line a request, is said once in ten seconds at most.

    Its advice to install a WebSocket library is never said: there is nothing here that would speak that protocol.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._unsaid, self._again = 0, float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(_UPGRADES):
            return False
        if record.msg != _MALFORMED:
            return True
        with self._lock:
            if (now := time.monotonic()) < self._again:
                self._unsaid += 1
                return False
            if self._unsaid:
                record.msg, record.args = f"{_MALFORMED} So were {self._unsaid} more since the last such line.", ()
            self._unsaid, self._again = 0, now + _LOG_EVERY_S
            return True


def formatter(is_json: bool) -> logging.Formatter:
    """What makes a line of a record."""
    if is_json:
        ending: list[Any] = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        ending = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared, _members],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
    )


_STRANGERS_NOISE: Final = StrangersNoise()  # one, so that setting up twice adds it once


def access_line(scope: Scope, route: str, status: int, seconds: float, sent: int) -> None:
    """One line of a request: never its query, its headers or its body."""
    client, state = scope.get("client"), scope.get("state", {})
    members = {
        "method": scope["method"],
        "path": scope["path"][:_MAX_PATH],
        "route": route,
        "status": status,
        "ms": round(seconds * 1e3, 2),
        "bytes": sent,
        "client": client[0] if client else None,
        "request_id": state.get("request_id"),
    }
    if "token_name" in state:
        members["token"] = state["token_name"]
    _access.info("request", extra={"members": members})


def _members(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record: logging.LogRecord = event["_record"]
    event.update(getattr(record, "members", {}))
    if (request_id := REQUEST_ID.get()) and "request_id" not in event:
        event["request_id"] = request_id
    return event
