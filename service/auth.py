"""Who may build: anyone on loopback where no token is set, else whoever brings the token."""

import hmac
from urllib.parse import urlsplit

from starlette.requests import Request

from mlaprep.service.problems import ProblemError
from mlaprep.service.settings import Settings, is_loopback


def require_build_rights(request: Request, settings: Settings) -> None:
    """Refuse a request that may not make this machine compile.

    Raises:
        ProblemError: 401 without the right token, 403 where there is none that could be right.
    """
    if settings.token is None:
        if _reached_by_loopback(request, settings):
            _require_own_name(request)
            return
        raise ProblemError(
            403,
            "building-disabled",
            "Building is not allowed here",
            "The service has no token, so only its own machine may build. Set MLAPREP_TOKEN on the service.",
        )
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    wanted = settings.token.get_secret_value()
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), wanted.encode()):
        raise ProblemError(
            401,
            "token-required",
            "Building needs a token",
            "Send the service's token as 'Authorization: Bearer ...'.",
            headers={"www-authenticate": 'Bearer realm="mlaprep"'},
        )


def _reached_by_loopback(request: Request, settings: Settings) -> bool:
    """The configured address, and the one this connection came in by, which a server started by other means
    than ours may have chosen. A Unix socket has a path and no port there."""
    server = request.scope.get("server")
    if not is_loopback(settings.host):
        return False
    if server is None or server[1] is None:
        return True
    return is_loopback(server[0]) or not _is_address(server[0])


def _require_own_name(request: Request) -> None:
    """Refuse what a browser on this machine sends for a page of another site.

    Such a page reaches loopback, by a name of its own that resolves to 127.0.0.1 or by a request across
    origins. The Host and Origin headers tell, and a page cannot choose them. No page reaches a Unix socket.

    Raises:
        ProblemError: 403.
    """
    server = request.scope.get("server")
    if server is not None and server[1] is None:
        return
    hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
    own = len(hosts) == 1 and is_loopback(_host_of(hosts[0]))
    if own and all(origin.lower() == f"{request.scope['scheme']}://{hosts[0].lower()}" for origin in origins):
        return
    raise ProblemError(
        403,
        "foreign-origin",
        "Building is not allowed under this name",
        "The service has no token, so building must be asked of localhost or a loopback address, by its Host "
        "header, and by no page of another origin. Set MLAPREP_TOKEN on the service to build under other names.",
    )


def _host_of(header: str) -> str:
    """The host of a Host header, "" where it makes no sense."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
