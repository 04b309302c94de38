"""Who may build: anyone on loopback where no token is set, else whoever brings the token."""

import hmac

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


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
