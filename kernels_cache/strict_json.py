"""Strict JSON: text that means one value, the same to everybody, and that cannot cost more than its bounds."""

import json
import math
from typing import Any, Final

MAX_INTEGER: Final = 2**63 - 1


def parse_strict(data: bytes | str, *, max_bytes: int, max_brackets: int | None = None) -> Any:
    """The value of a JSON text: UTF-8, no name twice in one object, finite numbers, integers of 64 bits.

    ``max_brackets`` counts every opening bracket, those in strings too: a bound on nesting that costs nothing.

    Raises:
        ValueError: anything else, whatever the bytes; the message quotes none of them.
    """
    try:
        encoded = data.encode() if isinstance(data, str) else bytes(data)
        if len(encoded) > max_bytes:
            raise _NotStrictError(f"more than {max_bytes} bytes")
        if max_brackets is not None and encoded.count(b"{") + encoded.count(b"[") > max_brackets:
            raise _NotStrictError(f"more than {max_brackets} brackets")
        return json.loads(
            encoded.decode(),
            object_pairs_hook=_distinct,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except _NotStrictError:
        raise
    except UnicodeError:
        raise ValueError("text that is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("text that is not JSON") from None


class _NotStrictError(ValueError):
    """What Python's parser would take."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotStrictError("a name that stands twice")
    return members


def _refuse(_: str) -> float:
    raise _NotStrictError("a number that is not finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotStrictError("a number that is not finite")
    return number


def _bounded(text: str) -> int:
    # The digits come unread: Python refuses to convert a few thousand of them.
    number = int(text) if len(text) <= 20 else MAX_INTEGER + 1
    if abs(number) > MAX_INTEGER:
        raise _NotStrictError("an integer of more than 64 bits")
    return number
