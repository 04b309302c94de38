"""Request bodies: strict JSON, and a bound that counts what arrives."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_kit import Client, ClientMaker
from starlette.types import Message, Receive, Scope, Send

from mlaprep.service.body import MAX_DEPTH, BodyLimit, strict_json
from mlaprep.service.problems import ProblemError

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=3)
    ),
    max_leaves=8,
)


def refused(data: bytes) -> tuple[str, str]:
    """Field and class of value that a body is refused for."""
    with pytest.raises(ProblemError) as caught:
        strict_json(data)
    problem = caught.value
    assert (problem.status, problem.slug) == (422, "invalid-json")
    assert problem.problems[0].allowed
    return problem.problems[0].field, problem.problems[0].found


@given(JSON)
def test_plain_json_is_read_as_it_is(value: Any) -> None:
    assert strict_json(json.dumps(value).encode()) == value
    assert strict_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(ProblemError):
        strict_json(data)


@pytest.mark.parametrize(
    ("body", "field", "found"),
    [
        (b'{"spec": {"num_heads": NaN}}', "num_heads", "not finite"),
        (b'{"spec": {"num_heads": Infinity}}', "num_heads", "not finite"),
        (b'{"spec": {"num_heads": -Infinity}}', "num_heads", "not finite"),
        (b'{"spec": {"num_heads": 1e400}}', "num_heads", "not finite"),
        (b'{"spec": {"num_heads": -1e400}}', "num_heads", "not finite"),
        (b'{"spec": {"num_heads": ' + b"9" * 5000 + b"}}", "num_heads", "too many digits"),
        (b'{"spec": {"num_heads": -' + b"1" * 19 + b"}}", "num_heads", "too many digits"),
        (b'{"spec": {"dtype": "\\ud800"}}', "dtype", "lone surrogate"),
        (b'{"spec": {"dtype": "a\\udfffb"}}', "dtype", "lone surrogate"),
        (b'{"spec": {"dtype": "\\u0000"}}', "dtype", "NUL"),
        (b'{"spec": {"num_heads": 1, "num_heads": 2}}', "num_heads", "stands twice"),
        (b'{"spec": {}, "spec": {}}', "spec", "stands twice"),
        (b'{"\\ud800": 1}', "(unprintable name)", "lone surrogate"),
        (b'{"spec": {"a b": NaN}}', "spec.(unprintable name)", "not finite"),
        (b'{"a": [1, [NaN]]}', "a.1.0", "not finite"),
        (b"NaN", "body", "not finite"),
        (b'"\\ud800"', "body", "lone surrogate"),
        (b"", "body", "not JSON"),
        (b"{", "body", "not JSON"),
        (b"{'spec': 1}", "body", "not JSON"),
        (b'{"spec": 1,}', "body", "not JSON"),
        (b'{"spec": 1} {}', "body", "not JSON"),
        (b"\xef\xbb\xbf{}", "body", "not JSON"),
        (b'{"spec": "\x01"}', "body", "not JSON"),
        (b"\xff\xfe{}", "body", "not UTF-8"),
        (b'{"spec": "\xed\xa0\x80"}', "body", "not UTF-8"),
        ("{}".encode("utf-16"), "body", "not UTF-8"),
        (b"[" * 1000, "body", "too deep"),
        (b'{"spec":' * 100_000 + b"1" + b"}" * 100_000, "body", "too deep"),
        (b"[" * 100_000 + b"]" * 100_000, "body", "too deep"),
        (b'{"a":[' * 9 + b"]}" * 9, "body", "too deep"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_B050_json_that_means_nothing_is_refused_by_name(client: Client, body: bytes, field: str, found: str) -> None:
    named, described = refused(body)
    assert named == field
    assert found in described
    if not 0 < len(body) < 64 * 1024:
        return
    reply = client.put_json(KERNEL, body)
    assert reply.status_code == 422
    assert reply.json()["problems"][0]["field"] == field
    assert b"99999" not in reply.content


def test_nesting_counts_brackets_outside_strings() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert strict_json(deep.encode()) is not None
    assert strict_json(json.dumps({"a": "[{" * 100 + '"' + "\\" + "]"}).encode()) is not None
    assert refused(b"[" + deep.encode() + b"]")[1] == "nesting that is too deep"


@pytest.mark.parametrize("size", [2**16, 2**20])
@pytest.mark.parametrize(
    "pattern", [b'"', b'\\"', b"\\", b'"\\', b'\\\\"', b"[]", b'"[', b'"a":', b'{"', b'"\\"'], ids=lambda p: p.decode()
)
def test_B050_no_text_takes_more_than_one_pass(pattern: bytes, size: int) -> None:
    """Goal: 20 ms a mebibyte and pass; a text that is tried from each of its quotes takes minutes."""
    for head in (b"", b'"'):
        text = head + pattern * (size // len(pattern))
        began = time.perf_counter()
        with contextlib.suppress(ProblemError):
            strict_json(text)
        assert time.perf_counter() - began < 1 + 2 * size / 2**20


def test_many_faults_are_listed_but_not_without_end(client: Client) -> None:
    body = b"[" + b",".join([b"NaN"] * 10_000) + b"]"
    reply = client.put_json(KERNEL, body)
    assert reply.status_code == 422
    assert len(reply.json()["problems"]) == 32
    assert len(reply.content) < 16_384


def test_B050_a_long_list_is_refused_by_size(client: Client) -> None:
    reply = client.put_json(KERNEL, b"[" + b"1," * 10**6 + b"1]")
    assert reply.status_code == 413
    assert reply.json()["type"] == "urn:mlaprep:problem:body-too-large"


def test_B050_the_bound_is_exact(make_client: ClientMaker) -> None:
    client = make_client(max_body_bytes=2048)
    assert client.put_json(KERNEL, b"{}".ljust(2048)).status_code == 201
    assert client.put_json(KERNEL, b"{}".ljust(2049)).status_code == 413


def run_limited(headers: list[tuple[bytes, bytes]], chunks: list[bytes]) -> tuple[int, int]:
    """Status, and bytes that were taken, for an application that reads everything."""
    taken = 0

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        nonlocal taken
        chunk = chunks.pop(0)
        taken += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    try:
        asyncio.run(BodyLimit(application, 1024, 20.0)({"type": "http", "headers": headers}, receive, send))
    except ProblemError as problem:
        return problem.status, taken
    return statuses[0], taken


def test_B050_bytes_are_counted_whatever_the_headers_say() -> None:
    length = b"content-length"
    assert run_limited([], [b"x" * 512] * 2) == (200, 1024)
    assert run_limited([], [b"x" * 512] * 1000) == (413, 1536)
    assert run_limited([(length, b"10")], [b"x" * 512] * 1000) == (413, 1536)
    assert run_limited([(length, b"1025")], [b"x"]) == (413, 0)
    assert run_limited([(length, b"9" * 5000)], [b"x"]) == (413, 0)
    assert run_limited([(length, b"-1")], [b"x"]) == (413, 0)
