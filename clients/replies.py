"""Replies of a service, read as what they are: bytes that a stranger sent."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mlaprep.clients.errors import ArtifactRejected, ServiceUnreachable
from mlaprep.clients.wire import Answer
from mlaprep.kernels_cache.strict_json import parse_strict
from mlaprep.templates.errors import FieldProblem

MAX_REPLY_BYTES: Final = 16 * 2**20


def read_body(answer: Answer, deadline: float) -> bytes:
    """The body, its bytes counted and the clock watched.

    Raises:
        ArtifactRejected: a body that is compressed or too long.
        ServiceUnreachable: a body that takes too long.
    """
    if answer.header("content-encoding") not in ("", "identity"):
        raise ArtifactRejected("the service sent a compressed reply that was not asked for")
    chunks, size = [], 0
    for chunk in answer.chunks():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise ArtifactRejected(f"the service sent more than {MAX_REPLY_BYTES} bytes for one kernel")
        if time.monotonic() > deadline:
            raise ServiceUnreachable("the service sent its reply too slowly")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """The value of a reply in strict JSON.

    Raises:
        ArtifactRejected: anything else.
    """
    try:
        return parse_strict(body, max_bytes=MAX_REPLY_BYTES)
    except ValueError as error:
        raise ArtifactRejected(f"the service sent {error}; is a proxy in between?") from None


def problem_of(body: bytes) -> Mapping[str, Any]:
    """A body as problem details; empty where it is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def field_problems(problem: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """The fields at fault that problem details name."""
    entries = problem.get("problems")
    for entry in entries[:32] if isinstance(entries, list) else ():
        words = [entry.get(key) for key in ("field", "found", "allowed")] if isinstance(entry, dict) else []
        if words and all(isinstance(word, str) for word in words):
            yield FieldProblem(*(plain(str(word)) for word in words))


def retry_after(answer: Answer) -> float:
    """Seconds of a ``Retry-After`` header, 0 where there is none."""
    text = answer.header("retry-after")
    return float(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0.0


def plain(text: str) -> str:
    """A peer's words, made fit for a log line or a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:500])
