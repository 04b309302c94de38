"""Who may do what: every route names the scope it takes, and every request is held to it.

Without any token reading is open, and all else is for this machine's own callers. With tokens, building takes one of
scope ``build`` and revoking one of ``admin``; reading stays open unless ``MLAPREP_READS_NEED_TOKEN`` asks for ``read``.
"""

import logging
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.params import Depends as Dependency
from starlette.requests import Request

from mlaprep.service.problems import ProblemError
from mlaprep.service.settings import Settings, is_loopback
from mlaprep.service.token_file import TokenFile
from mlaprep.service.tokens import Scope, Token, digest_of, find_token

_LOG_EVERY_S: Final = 10.0
_SHORT: Final = 16
_REALM: Final = 'Bearer realm="mlaprep"'
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A dependency of a route: the scope that a caller has to have, or None for one that anybody may call."""

    scope: Scope | None

    async def __call__(self, request: Request) -> None:
        if self.scope is not None:
            request.app.state.service.access.admit(request, self.scope)


def require(scope: Scope) -> Any:
    """For ``dependencies=`` of a route: refuse callers without this scope before anything else is looked at.

    They get a 401 without a token that holds, 403 with one whose scope is another.
    """
    return Depends(Requirement(scope))


def open_to_all() -> Any:
    """For ``dependencies=`` of a route that takes no scope, as a probe of an orchestrator."""
    return Depends(Requirement(None))


def requirement_of(route: Any) -> Requirement | None:
    """What a route was declared to take; None where it says nothing, which is a mistake."""
    for dependency in getattr(route, "dependencies", ()):
        if isinstance(dependency, Dependency) and isinstance(dependency.dependency, Requirement):
            return dependency.dependency
    return None


@dataclass(frozen=True, slots=True)
class AccessStats:
    """Counts since the start, of requests for which a scope was asked."""

    admitted: int = 0
    without_token: int = 0
    """Requests that brought no token where one was needed."""
    invalid_token: int = 0
    """Requests whose token is unknown or past its end."""
    insufficient_scope: int = 0
    foreign: int = 0
    """Requests that only this machine's own callers may make, and that came by another way."""


class Access:
    """Decides whether a request may do what it asks for.

    Args:
        settings: of the service.
        file: its token file, if it has one.
    """

    def __init__(self, settings: Settings, file: TokenFile | None = None) -> None:
        self._settings = settings
        self._file = file
        self._own: tuple[Token, ...] = ()
        if settings.token is not None:
            secret = settings.token.get_secret_value()
            self._own = (Token("MLAPREP_TOKEN", "admin", digest_of(secret)),)
            if len(secret) < _SHORT and not is_loopback(settings.host):
                _log.warning(
                    "MLAPREP_TOKEN is short enough to be guessed; `mlaprep token create` makes one that is not"
                )
        self._lock = threading.Lock()
        self._stats = AccessStats()
        self._log_again = 0.0

    @classmethod
    def assemble(cls, settings: Settings) -> "Access":
        """Raises SpecError for a token file that cannot be used."""
        return cls(settings, None if settings.tokens_file is None else TokenFile.open(settings.tokens_file))

    @property
    def takes_tokens(self) -> bool:
        return bool(self._own) or self._file is not None

    def stats(self) -> AccessStats:
        return self._stats

    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the token file by now."""
        return () if self._file is None else self._file.warnings()

    def admit(self, request: Request, scope: Scope) -> None:
        """Refuse a request whose caller may not do this.

        Raises:
            ProblemError: 401 without a token that holds, 403 where the token's scope is another, or where only
                this machine's own callers may ask.
        """
        if scope == "read" and not self._settings.reads_need_token:
            return
        refused = self._refuse_token(request, scope) if self.takes_tokens else self._refuse_stranger(request)
        counted, problem = refused or ("admitted", None)
        self._count(counted, request)
        if problem is not None:
            raise problem

    def _refuse_token(self, request: Request, scope: Scope) -> "tuple[str, ProblemError] | None":
        given = request.headers.getlist("authorization")
        if not given:
            return "without_token", _unauthorized(scope)
        kind, _, secret = given[0].partition(" ")
        token = None
        if len(given) == 1 and kind.lower() == "bearer":
            tokens = self._own if self._file is None else (*self._own, *self._file.tokens())
            token = find_token(secret.strip().encode(), tokens)
        if token is None:
            return "invalid_token", _invalid(scope)
        request.scope.setdefault("state", {})["token_name"] = token.name
        return None if token.allows(scope) else ("insufficient_scope", _insufficient(scope, token))

    def _refuse_stranger(self, request: Request) -> "tuple[str, ProblemError] | None":
        if not _reached_by_loopback(request, self._settings):
            return "foreign", _stranger("building-disabled", "here", "only its own machine may build")
        if not _named_as_own(request):
            told = (
                "building must be asked of localhost or a loopback address, by its Host header, and by no page of "
                "another origin"
            )
            return "foreign", _stranger("foreign-origin", "under this name", told)
        if any(name in request.headers for name in _FORWARDED):
            return "foreign", _stranger("forwarded", "through a proxy", "building must be asked of it directly")
        return None

    def _count(self, name: str, request: Request) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + 1})
            quiet = name == "admitted" or time.monotonic() < self._log_again
            if not quiet:
                self._log_again = time.monotonic() + _LOG_EVERY_S
        if not quiet:  # seldom: whoever tries tokens must not fill the log
            client = request.client.host if request.client else "a Unix socket"
            refused = ", ".join(f"{count} {kind}" for kind, count in asdict(self._stats).items() if kind != "admitted")
            _log.warning("refused a request from %s (%s); so far: %s", client, name, refused)


def _unauthorized(scope: Scope) -> ProblemError:
    return ProblemError(
        401,
        "token-required",
        f"This takes a token of scope {scope}",
        f"Send a token of this service that has scope {scope} as 'Authorization: Bearer ...'.",
        headers={"www-authenticate": f'{_REALM}, scope="{scope}"'},
    )


def _invalid(scope: Scope) -> ProblemError:
    return ProblemError(
        401,
        "invalid-token",
        "The token is not known, or past its end",
        f"Send a token of this service that has scope {scope} as 'Authorization: Bearer ...'.",
        headers={"www-authenticate": f'{_REALM}, error="invalid_token", scope="{scope}"'},
    )


def _insufficient(scope: Scope, token: Token) -> ProblemError:
    return ProblemError(
        403,
        "insufficient-scope",
        f"This takes a token of scope {scope}",
        f"The token has scope {token.scope}; `mlaprep token create --scope {scope}` makes one that has {scope}.",
        headers={"www-authenticate": f'{_REALM}, error="insufficient_scope", scope="{scope}"'},
    )


def _stranger(slug: str, where: str, told: str) -> ProblemError:
    return ProblemError(
        403,
        slug,
        f"Building is not allowed {where}",
        f"The service has no token, so {told}. Set MLAPREP_TOKENS_FILE or MLAPREP_TOKEN on the service.",
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


def _named_as_own(request: Request) -> bool:
    """False for what a browser on this machine sends for a page of another site.

    Such a page reaches loopback, by a name of its own that resolves to 127.0.0.1 or by a request across
    origins. The Host and Origin headers tell, and a page cannot choose them. No page reaches a Unix socket.
    """
    server = request.scope.get("server")
    if server is not None and server[1] is None:
        return True
    hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
    own = len(hosts) == 1 and is_loopback(_host_of(hosts[0]))
    return own and all(origin.lower() == f"{request.scope['scheme']}://{hosts[0].lower()}" for origin in origins)


def _host_of(header: str) -> str:
    """The host of a Host header, "" where it makes no sense."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
