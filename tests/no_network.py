"""Forbids the network to a test, and to the processes it starts: every way to a socket fails, and is recorded."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_WAYS = ("socket", "create_connection", "create_server", "getaddrinfo", "gethostbyname", "gethostbyname_ex", "fromfd")
_EVENTS = ("socket.",)


@contextlib.contextmanager
def forbidden() -> Iterator[list[str]]:
    """What was tried meanwhile; each try also raised."""
    tried: list[str] = []

    def explode(*arguments: object, **_: object) -> None:
        tried.append(repr(arguments)[:200])
        raise AssertionError("the network was reached for")

    with pytest.MonkeyPatch.context() as patch:
        for way in _WAYS:
            patch.setattr(socket, way, explode)
        patch.setattr("_socket.socket", explode)
        yield tried


def environment(folder: Path) -> dict[str, str]:
    """An environment in which Python itself ends a process that makes a socket or looks up a name, whoever asks."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def watch(event, arguments):\n"
        f"    if event.startswith({_EVENTS!r}):\n"
        "        os.write(2, f'network: {event}\\n'.encode())\n"
        "        os._exit(99)\n"
        "sys.addaudithook(watch)\n"
    )
    path = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHON": sys.executable}
