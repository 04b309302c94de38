"""RedisUrl: where a shared Redis is, checked before anything connects, and spelled for people without its secrets."""

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from mlaprep.kernels_cache.errors import StoreError

ALLOWED: Final = "redis://[user:password@]host[:port][/database], rediss:// for TLS, or unix:///path/to/socket"
"""What an address may be, in words."""
INSTALL: Final = "pip install 'mlaprep[redis]'"

_SCHEMES: Final = ("redis", "rediss", "unix")
_OPTIONS: Final = frozenset(
    {"db", "username", "password", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The address of a Redis server. Its text, ``repr`` and errors never show user, password or options.

    Raises:
        StoreError: a text that is no such address; it is not repeated.
    """

    text: str = field(repr=False)
    place: str = field(init=False)
    """Scheme, host, port and database: what may be logged."""

    def __post_init__(self) -> None:
        try:
            place = _place(self.text)
        except ValueError:
            place = ""
        if not place:
            raise StoreError(f"no address of a Redis server; allowed: {ALLOWED}")
        object.__setattr__(self, "place", place)

    @classmethod
    def parse(cls, text: str) -> Self:
        """An address, once it is known that this process can use it at all.

        Raises:
            StoreError: no such address, or the package redis is not installed.
        """
        url = cls(text)
        redis_package()
        return url

    def connect(self, **options: Any) -> Any:
        """A ``redis.Redis`` for this address; it opens no connection yet.

        ``options`` are those of ``redis.Redis``. By default nothing is tried twice, since redis-py would wait
        between attempts for longer than whoever asks may.
        """
        package = redis_package()
        retry = importlib.import_module("redis.retry").Retry(importlib.import_module("redis.backoff").NoBackoff(), 0)
        defaults: dict[str, Any] = {"retry": retry, "retry_on_timeout": False}
        if not self.text.startswith("unix:"):
            defaults["socket_keepalive"] = True
        return package.Redis.from_url(self.text, **(defaults | options))

    def __str__(self) -> str:
        return self.place


def redis_package() -> ModuleType:
    """redis-py, loaded when first needed.

    Raises:
        StoreError: it is not installed.
    """
    try:
        return importlib.import_module("redis")
    except ImportError:
        raise StoreError(f"a shared Redis needs the package redis, which is not installed: {INSTALL}") from None


def _place(text: str) -> str:
    """The address without secrets, "" where it is none. Raises ValueError for a port that is no number."""
    if type(text) is not str or len(text) > 4096 or not (text.isascii() and text.isprintable() and " " not in text):
        return ""
    parts = urlsplit(text)
    names = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if parts.scheme not in _SCHEMES or parts.fragment or not names <= _OPTIONS:
        return ""
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = unquote(parts.path)
    database = options.get("db", path.strip("/") if parts.scheme != "unix" else "")
    if database and not (database.isdecimal() and len(database) <= 5):
        return ""
    if parts.scheme == "unix":
        return f"unix://{path}" if path.startswith("/") else ""
    if not parts.hostname:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}/{database or 0}"
