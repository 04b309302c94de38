"""Slow senders, endless heads and too many connections at a real server: cut, while others are served."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from service_kit import SERVE, Server, ServerMaker, wait_for

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
HEAD = f"PUT {KERNEL} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SMALL_BUFFERS = """
import socket
made = socket.create_server
def create_server(*args, **options):
    listener = made(*args, **options)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
socket.create_server = create_server
"""
WITH_H11 = f"import sys; sys.modules['httptools'] = None; {SERVE}"


def rss(server: Server) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def until_closed(server: Server, send: Callable[[socket.socket], None], timeout: float = 8.0) -> tuple[float, bytes]:
    """Seconds until the server ended a connection on which a client does something every tenth of a second."""
    began, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as connection:
        while time.monotonic() - began < timeout:
            try:
                send(connection)
                while chunk := connection.recv(65536):
                    answer += chunk
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("never cut")
    return time.monotonic() - began, answer


def trickling(first: bytes, then: bytes) -> Callable[[socket.socket], None]:
    sent = iter([first])
    return lambda connection: connection.sendall(next(sent, then))


def silent(_: socket.socket) -> None:
    """Says nothing at all."""


def answered_first(first: bytes) -> Callable[[socket.socket], None]:
    """One good request, then a slow one on the same connection."""
    return trickling(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" + first, b"x")


def test_B053_slow_senders_are_cut_and_others_served(run_server: ServerMaker) -> None:
    with run_server(wait=False, MLAPREP_REQUEST_TIMEOUT_S="0.5") as server:
        head = f"{HEAD}x-a: "
        body = f"{HEAD}content-length: 5000\r\n\r\n"
        for name, send, status in (
            ("nothing", silent, b""),
            ("a head", trickling(head.encode(), b"x"), b"HTTP/1.1 408 "),
            ("one byte", trickling(b"G", b"E"), b"HTTP/1.1 4"),
            ("a body", trickling(body.encode(), b" "), b"HTTP/1.1 408 "),
            ("a second head", answered_first(b"GET /healthz HTTP/1.1\r\nx-a: "), b"HTTP/1.1 200 "),
        ):
            seconds, answer = until_closed(server, send)
            assert seconds < 3, name
            assert answer.startswith(status), name
            if status == b"HTTP/1.1 408 ":
                assert b"urn:mlaprep:problem:request-timeout" in answer
                assert b"connection: close" in answer.lower()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
                slow.sendall(head.encode())
            began = time.monotonic()
            assert httpx.get(server.url + "/v1/presets").status_code == 200
            assert time.monotonic() - began < 1
        with httpx.Client(base_url=server.url) as kept:  # a connection that rests is no slow sender
            for pause in (0.1, 1.0):
                assert kept.get("/healthz").status_code == 200
                time.sleep(pause)
            assert kept.get("/healthz").status_code == 200
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("code", [SERVE, WITH_H11], ids=["httptools", "h11"])
def test_B050_a_head_without_end_costs_no_memory(run_server: ServerMaker, code: str) -> None:
    with run_server(code=code, wait=False) as server:
        before = rss(server)
        for first in (
            b"GET /healthz HTTP/1.1\r\nhost: x\r\n",
            b"GET /",
            b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /",
        ):
            answer = b""
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(first)
                    for number in range(256):
                        connection.sendall(b"a%d: " % number + b"x" * 2**19 + b"\r\n")
                    pytest.fail("128 MiB of headers were taken")
                with contextlib.suppress(OSError):
                    answer = connection.recv(65536)
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"HTTP/1.1 200 ")) or not answer
        assert rss(server) - before < 8 * 2**20
        assert httpx.get(server.url + "/healthz").status_code == 200
        assert httpx.get(server.url + "/healthz", headers={"x-long": "x" * 30_000}).status_code in (200, 400)


def test_a_reply_that_nobody_reads_is_dropped(run_server: ServerMaker) -> None:
    """With a send buffer of the kernel that holds less than the reply; a reader that is slow and steady has it all."""
    with run_server(code=f"{SMALL_BUFFERS}{SERVE}", wait=False, MLAPREP_REQUEST_TIMEOUT_S="0.5") as server:
        size = len(httpx.get(server.url + "/docs").content)

        def ask() -> socket.socket:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(5)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(b"GET /docs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return connection

        with ask() as slow:
            read = 0
            while chunk := slow.recv(8192):
                read += len(chunk)
                time.sleep(0.05)
            assert read > size
        before = open_files(server)
        stuck = [ask() for _ in range(20)]
        wait_for(lambda: open_files(server) >= before + 20, 5)
        wait_for(lambda: open_files(server) <= before, 10)
        for connection in stuck:
            connection.close()


def test_a_request_beyond_the_limit_is_told_when_to_come_back(run_server: ServerMaker) -> None:
    with run_server(wait=False, MLAPREP_MAX_CONNECTIONS="20") as server, contextlib.ExitStack() as stack:
        assert httpx.get(server.url + "/v1/presets").status_code == 200
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        reply = httpx.get(server.url + "/v1/presets")
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:mlaprep:problem:overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["connection"] == "close"
        assert httpx.get(server.url + "/healthz").status_code == 200
        stack.close()
        time.sleep(0.2)
        assert httpx.get(server.url + "/v1/presets").status_code == 200
