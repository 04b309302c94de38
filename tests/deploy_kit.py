"""What the tests of deploy/ share: a running nginx, upstreams of the test's own, and what files must fit."""

import asyncio
import contextlib
import functools
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

IMAGE_USER = (10001, 10001)
"""User and group that the image runs as."""


@dataclass(frozen=True)
class Proxy:
    """A running nginx and how to reach it."""

    port: int
    trust: ssl.SSLContext
    folder: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=self.trust, timeout=30)

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        return self.trust.wrap_socket(plain, server_hostname="127.0.0.1")


ProxyMaker = Callable[..., AbstractContextManager[Proxy]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def upstream(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server on a free port that answers each request's head with these bytes, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head and (got := connection.recv(65536)):
                    head += got
                if head:
                    connection.sendall(answer(head))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # which wakes the accept
        listener.close()
        thread.join(5)


def ends(connection: ssl.SSLSocket, *, trickling: bool = False, within_s: float = 10.0) -> bool:
    """Whether the other side closes; ``trickling`` sends a byte of a head each half second meanwhile."""
    with connection:
        connection.settimeout(0.5)
        for _ in range(int(within_s / 0.5)):
            try:
                if trickling:
                    connection.sendall(b"x")
                if not connection.recv(4096):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
    return False


@functools.cache
def routes() -> frozenset[tuple[str, str]]:
    """Method and path of every route of the service."""
    from mlaprep.service.app import create_app
    from mlaprep.service.settings import Settings

    paths = create_app(Settings(read_only=True)).openapi()["paths"]
    return frozenset((method.upper(), path) for path, methods in paths.items() for method in methods)


def setting_names() -> set[str]:
    """Every variable that docs/settings.md lists; its tests hold that list to the code."""
    page = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
    return set(re.findall(r"^\| `(MLAPREP_[A-Z_0-9]+)`", page.read_text(), re.MULTILINE))


def _context(arguments: list[str]) -> Any:
    """A command line as click reads it; nothing of it is run."""
    import typer.main

    from mlaprep.clients.cli import app

    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    return group.commands[name].make_context(name, rest)


def parses(arguments: list[str]) -> bool:
    """Whether ``mlaprep`` takes these arguments.

    Raises:
        KeyError, click.UsageError: it does not, and why.
    """
    return _context(list(arguments)) is not None


def accepts(variables: dict[str, str], serve: list[str]) -> bool:
    """Whether the service starts with these variables and these arguments of ``mlaprep serve``."""
    from mlaprep.service.settings import read_settings
    from mlaprep.templates.errors import SpecError

    options = {name: _context(serve).params[name] for name in ("host", "port")} if serve else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        try:
            read_settings({name: value for name, value in options.items() if value is not None})
        except SpecError as error:
            if serve:
                raise AssertionError(f"the service refuses its settings: {error}") from error
            return False
    return True


@functools.cache
def client_metrics() -> frozenset[str]:
    """Families that a worker's client tells, without their endings."""
    from mlaprep.clients.prometheus import families
    from mlaprep.clients.stats import ClientStats

    return frozenset(family.name for family in families([ClientStats()]))


@functools.cache
def service_metrics() -> frozenset[str]:
    """Families that the service's /metrics tells, without their endings; none where it has no such route."""
    from mlaprep.service.app import create_app
    from mlaprep.service.settings import Settings

    async def scrape() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(Settings(read_only=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8400") as http:
            return await http.get("/metrics")

    reply = asyncio.run(scrape())
    if reply.status_code == 404:
        return frozenset()
    assert reply.status_code == 200, reply.text
    return frozenset(family.name for family in text_string_to_metric_families(reply.text))
