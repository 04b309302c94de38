"""One parser for every JSON text from outside: a manifest on disk, a reply of a service."""

from typing import Any

import pytest

from mlaprep.kernels_cache.strict_json import MAX_INTEGER, parse_strict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1, -2.5, true, null, "\\u00e9"]}', {"a": [1, -2.5, True, None, "é"]}),
        ('"é"', "é"),
        (str(MAX_INTEGER), MAX_INTEGER),
        (str(-MAX_INTEGER), -MAX_INTEGER),
    ],
)
def test_reads(text: bytes | str, value: Any) -> None:
    assert parse_strict(text, max_bytes=100, max_brackets=2) == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"secret": 1, "secret": 2}', "twice"),
        (b'[{"secret": {"a": 1, "a": 1}}]', "twice"),
        (b"NaN", "finite"),
        (b"-Infinity", "finite"),
        (b"1e999", "finite"),
        (str(MAX_INTEGER + 1).encode(), "64 bits"),
        (b"9" * 10_000, "64 bits"),
        (b"\xffsecret", "UTF-8"),
        ('"secret\ud800"', "UTF-8"),
        (b"", "not JSON"),
        (b"secret", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b" " * 300_001, "bytes"),
    ],
)
def test_refuses(text: bytes | str, found: str) -> None:
    with pytest.raises(ValueError, match=found) as caught:
        parse_strict(text, max_bytes=300_000)
    assert "secret" not in str(caught.value)


def test_counts_brackets_before_it_parses() -> None:
    with pytest.raises(ValueError, match="3 brackets"):
        parse_strict(b"[[[[", max_bytes=100, max_brackets=3)
