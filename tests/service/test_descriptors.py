"""Open files: connections never take those that the service needs for its work."""

import asyncio
import contextlib
import logging
import resource
import socket
import time

import httpx
import pytest
from service_kit import SERVE, ServerMaker

from mlaprep.service import descriptors
from mlaprep.service.descriptors import RESERVED, log_seldom, room_for

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


def limited(soft: int, hard: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); {SERVE}"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Stands for the process's limit, soft and hard; the last pair counts."""
    pairs: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: pairs[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: pairs.append(pair))
    return pairs


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room", "new_soft"),
    [
        (1024, 1048576, 2048, 2048, 2048 + RESERVED),
        (1024, INFINITE, 2048, 2048, 2048 + RESERVED),
        (INFINITE, INFINITE, 2048, 2048, INFINITE),
        (65536, 65536, 2048, 2048, 65536),
        (1024, 1024, 2048, 1024 - RESERVED, 1024),
        (256, 2000, 2048, 2000 - RESERVED, 2000),
        (256, 256, 2048, 16, 256),
        (1024, 1024, 100, 100, 1024),
    ],
)
def test_the_limit_is_raised_as_far_as_needed_and_allowed(
    limits: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    wanted: int,
    room: int,
    new_soft: int,
) -> None:
    limits.append((soft, hard))
    with caplog.at_level(logging.WARNING):
        assert room_for(wanted) == room
    assert limits[-1] == (new_soft, hard)
    assert ("MLAPREP_MAX_CONNECTIONS" in caplog.text) == (room < wanted)


def test_a_limit_that_cannot_be_raised_stays(limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    limits.append((1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert room_for(2048) == 1024 - RESERVED


def test_a_loop_without_files_says_so_seldom(caplog: pytest.LogCaptureFixture) -> None:
    async def storm() -> None:
        loop = asyncio.get_running_loop()
        log_seldom(loop)
        for _ in range(1000):
            loop.call_exception_handler({"message": descriptors._OUT_OF_FILES, "exception": OSError(24, "Too many")})
        loop.call_exception_handler({"message": "something else"})

    with caplog.at_level(logging.ERROR):
        asyncio.run(storm())
    assert [record.message for record in caplog.records] == [
        "no connection can be taken for the moment: [Errno 24] Too many",
        "something else",
    ]


def test_a_thousand_silent_connections_take_no_file_that_is_needed(run_server: ServerMaker) -> None:
    """With a hard limit of 700 there is room for 188: kernels are built, and the log stays short."""
    with run_server(code=limited(256, 700)) as server, contextlib.ExitStack() as stack:
        silent = []
        for _ in range(1000):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", server.port))
                silent.append(connection)
        time.sleep(0.5)
        reply = None
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.get(server.url + "/healthz", timeout=10)
        assert reply is None or reply.status_code == 503
        for connection in silent:
            connection.close()
        time.sleep(0.5)
        assert httpx.put(server.url + KERNEL, timeout=30).status_code == 201
        log = server.log.read_text()
        assert "room for 188 connections, not 2048" in log
        assert log.count("\n") < 10


def test_the_limit_of_connections_is_reached_where_it_can_be(run_server: ServerMaker) -> None:
    code = limited(256, 4096)
    with run_server(code=code, MLAPREP_MAX_CONNECTIONS="600") as server, contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        assert httpx.get(server.url + "/healthz", timeout=10).status_code == 200
        assert httpx.put(server.url + KERNEL, timeout=30).status_code == 201
        assert "room for" not in server.log.read_text()
