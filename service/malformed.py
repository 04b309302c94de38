"""Requests that a server lets through and that say nothing an application could go by."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

from mlaprep.service.problems import ProblemError

_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~-]*|\[([0-9A-Fa-f:.]{2,45})\])(?::([0-9]{0,5}))?")
_MAX_PORT: Final = 65535


def malformed(scope: Scope) -> ProblemError | None:
    """What is wrong with a request's query or host, as RFC 3986 and 9112 have them; None where they can be read.

    Both are parts of the request's URL, and whoever builds that from them must not have to expect anything.
    """
    if not scope["query_string"].isascii():
        return _problem("The query has bytes that are not ASCII; send them percent-encoded.")
    if not _is_host(value for name, value in scope["headers"] if name == b"host"):
        return _problem("The Host header is not one host with perhaps a port.")
    return None


def _is_host(values: Iterable[bytes]) -> bool:
    hosts = list(values)
    if not hosts:
        return True
    match = _HOST.fullmatch(hosts[0])
    if len(hosts) > 1 or match is None or int(match[2] or 0) > _MAX_PORT:
        return False
    if match[1] is not None:
        try:
            ipaddress.IPv6Address(match[1].decode())
        except ValueError:
            return False
    return True


def _problem(detail: str) -> ProblemError:
    return ProblemError(400, "malformed-request", "The request cannot be read", detail, headers={"connection": "close"})
