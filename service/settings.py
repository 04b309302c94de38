"""Settings of the service: environment variables that start with ``MLAPREP_``, over a file, over defaults."""

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from mlaprep.kernels_cache.disk import DISK_BYTES
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis_link import BUDGET_S
from mlaprep.kernels_cache.redis_url import ALLOWED as REDIS_URLS
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.kernels_cache.store import MEMORY_BYTES
from mlaprep.service.builder import NEGATIVE_TTL_S
from mlaprep.service.compiler import DEFAULT_MEMORY_BYTES, DEFAULT_QUEUE_LIMIT, DEFAULT_RECYCLE_AFTER, DEFAULT_TIMEOUT_S
from mlaprep.service.config_file import VARIABLE, ConfigFile
from mlaprep.service.logs import LogFormat, LogLevel
from mlaprep.templates.environment import SWITCH_WORDS, parse_switch
from mlaprep.templates.errors import FieldProblem, SpecError

_MIB: Final = 2**20
_ALLOWED: Final[Mapping[str, str]] = {
    "host": "a loopback address; or any with MLAPREP_TOKENS_FILE or MLAPREP_TOKEN set, or with MLAPREP_READ_ONLY=true "
    "to serve built kernels only: without any, whoever reaches this service could make the machine compile",
    "token": "up to 1024 printable ASCII characters without spaces",
    "tokens_file": "a file of lines that `mlaprep token create` prints; unset the variable to have none",
    "reads_need_token": "off where neither MLAPREP_TOKENS_FILE nor MLAPREP_TOKEN is set: nobody could read",
    "trusted_proxies": "addresses and networks such as 10.0.0.0/8, between commas",
    "cors_origins": "origins such as https://dash.example, between commas",
    "cache_dir": "a directory",
    "redis_url": REDIS_URLS,
    "log_format": "one of auto, json, console",
    "log_level": "one of debug, info, warning, error",
    "signing_key": "a file that `mlaprep keys generate` wrote, of mode 0600; unset the variable to sign nothing",
}
# Empty counts as unset elsewhere. A service that was to sign, or to ask for tokens, must not start without.
_NEVER_EMPTY: Final = ("signing_key", "tokens_file")
_ORIGIN: Final = re.compile(
    r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?", re.ASCII
)
_NO_NUMBER: Final = ("int_parsing", "int_parsing_size", "int_type", "int_from_float", "float_parsing", "float_type")


class Settings(BaseSettings):
    """What an operator decides. Checked as a whole before anything starts.

    Raises:
        ValueError: a value out of range, or a bind address that others can reach without a token.
    """

    model_config = SettingsConfigDict(
        env_prefix="MLAPREP_", env_ignore_empty=True, extra="ignore", frozen=True, hide_input_in_errors=True
    )

    host: str = Field(default="127.0.0.1", description="address to listen on; one that is not loopback needs a token")
    port: int = Field(default=8400, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    token: SecretStr | None = Field(
        default=None,
        description="bearer token of every scope; without one and without a token file, only loopback may build",
    )
    tokens_file: Path | None = Field(
        default=None, description="file of tokens, by name, scope and digest; read again when it changes; never empty"
    )
    reads_need_token: bool = Field(default=False, description="reading takes a token too, one of scope read or more")
    trusted_proxies: str = Field(
        default="",
        description="addresses or networks, between commas, of proxies whose X-Forwarded-For and -Proto are believed",
    )
    cors_origins: str = Field(
        default="", description="origins, between commas, whose pages may call the service from a browser"
    )
    read_only: bool = Field(default=False, description="serve what is built and build nothing; starts no compiler")
    cache_dir: Path | None = Field(
        default=None, description="where kernels are kept on disk; see above for the default"
    )
    cache_max_bytes: int = Field(
        default=DISK_BYTES, ge=_MIB, description="bytes of kernels on disk; the least recently used go first"
    )
    memory_max_bytes: int = Field(
        default=MEMORY_BYTES, ge=0, description="bytes of kernels kept in memory above the disk"
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis that replicas share kernels, leases and revocations through: redis://host:6379/0",
    )
    redis_timeout_s: float = Field(
        default=BUDGET_S, gt=0, le=60, description="seconds that one call to it may take, before it is left alone"
    )
    compile_processes: int | None = Field(
        default=None, ge=1, le=1024, description="compile processes; by default one for every core"
    )
    compile_timeout_s: float = Field(
        default=DEFAULT_TIMEOUT_S,
        gt=0,
        le=3600,
        description="seconds that one compile may take before its process is killed",
    )
    compile_memory_bytes: int = Field(
        default=DEFAULT_MEMORY_BYTES, ge=512 * _MIB, description="address space of one compile process"
    )
    compile_queue: int = Field(
        default=DEFAULT_QUEUE_LIMIT,
        ge=1,
        le=1_000_000,
        description="kernels that may wait for a compiler; more get a 429",
    )
    compile_recycle_after: int = Field(
        default=DEFAULT_RECYCLE_AFTER, ge=1, description="compiles after which a compile process is replaced"
    )
    negative_ttl_s: float = Field(
        default=NEGATIVE_TTL_S, ge=0, le=86400, description="seconds that a refusal by the compiler is remembered"
    )
    refuse_spills: bool = Field(
        default=True,
        description="refuse to publish a kernel that spills registers to memory: 422, kept for the same time",
    )
    max_body_bytes: int = Field(
        default=64 * 1024, ge=1024, le=64 * _MIB, description="bytes of a request body; more get a 413"
    )
    request_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=3600,
        description="seconds that the head of a request may take to come in, its body as many, and a client that reads "
        "nothing of a reply as many; then it is cut",
    )
    workers: int = Field(
        default=1, ge=1, le=256, description="processes that answer requests; each has its share of the compilers"
    )
    max_connections: int = Field(
        default=2048, ge=1, description="connections and requests of one worker at once; more get a 503"
    )
    shutdown_grace_s: int = Field(
        default=30, ge=0, le=3600, description="seconds that running requests may take to finish after SIGTERM"
    )
    access_log: bool = Field(default=False, description="write one log line a request")
    log_format: LogFormat = Field(default="auto", description="auto is json, and console where stderr is a terminal")
    log_level: LogLevel = Field(default="warning", description="the least that is told: debug, info, warning, error")
    signing_key: Path | None = Field(
        default=None, description="file of the private key that signs every manifest served; mode 0600, never empty"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Options, environment, file; no ``.env`` and no directory of secrets, which nobody asked for."""
        return init_settings, env_settings, ConfigFile(settings_cls)

    @field_validator("token", "cache_dir", "redis_url", mode="before")
    @classmethod
    def _none_where_empty(cls, value: Any) -> Any:
        """An empty variable is how a compose file says "none"."""
        return None if value == "" else value

    @field_validator("signing_key", "tokens_file", mode="before")
    @classmethod
    def _never_empty(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("an empty name")
        return value

    @field_validator("read_only", "reads_need_token", "access_log", "refuse_spills", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """The words that every switch of mlaprep knows, no others."""
        return parse_switch("switch", value) if isinstance(value, str) else value

    @field_validator("token")
    @classmethod
    def _printable_token(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value else "x"
        if not (text.isascii() and text.isprintable() and " " not in text and len(text) <= 1024):
            raise ValueError("a token is up to 1024 printable ASCII characters without spaces")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            if value is not None:
                RedisUrl(value.get_secret_value())
        except StoreError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: str) -> str:
        for word in split_words(value):
            ipaddress.ip_network(word)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        if not all(map(_ORIGIN.fullmatch, split_words(value))):
            raise ValueError("an origin is a scheme, a host and perhaps a port")
        return value

    @model_validator(mode="after")
    def _protected(self) -> Self:
        takes_tokens = self.token is not None or self.tokens_file is not None
        if not (is_loopback(self.host) or takes_tokens or self.read_only):
            raise _fault(
                "host",
                "host is not a loopback address and there is no token: anyone who reaches it could make this machine "
                "compile. Set MLAPREP_TOKENS_FILE or MLAPREP_TOKEN, or MLAPREP_READ_ONLY=true to serve built kernels "
                "only",
            )
        if self.reads_need_token and not takes_tokens:
            raise _fault("reads_need_token", "reading takes a token, and there is none")
        return self


def _fault(setting: str, told: str) -> PydanticCustomError:
    """A fault of a setting beside others."""
    return PydanticCustomError("together", "{told}", {"setting": setting, "told": told})


def split_words(text: str) -> list[str]:
    """The words of a setting that takes several, between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than ``localhost`` may be anybody's."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def read_settings(options: Mapping[str, Any] | None = None) -> Settings:
    """Settings from command line options, by field name, and from environment and file for all others.

    Raises:
        SpecError: every setting at fault, by the name of its option, its variable or in the file; no value is repeated.
    """
    given = dict(options or {})
    for name in _NEVER_EMPTY:
        if name not in given and os.environ.get(f"MLAPREP_{name.upper()}") == "":
            raise SpecError(FieldProblem(f"MLAPREP_{name.upper()}", "an empty string", _allowed(name)))
    try:
        return Settings(**given)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False)
    in_environment = EnvSettingsSource(Settings)()
    raise SpecError([_problem(fault, given, in_environment) for fault in faults])


def _problem(fault: Mapping[str, Any], options: Mapping[str, Any], environment: Mapping[str, Any]) -> FieldProblem:
    name = str(fault["loc"][0] if fault["loc"] else fault["ctx"]["setting"])
    if name in options:
        shown = f"--{name.replace('_', '-')}"
    elif name not in environment and name in ConfigFile(Settings)():
        shown = f"{name} in {VARIABLE}"
    else:
        shown = f"MLAPREP_{name.upper()}"
    kind = str(fault["type"])
    if kind == "together":
        found = "an address that others can reach, and no token" if name == "host" else "on, and no token"
    elif kind in _NO_NUMBER:
        found = "what is no number" if kind.startswith("float") else "what is no integer"
    elif "than" in kind or kind == "finite_number":
        found = "a number out of range"
    else:
        found = "a string that is not allowed"
    return FieldProblem(shown, found, _allowed(name))


def _allowed(name: str) -> str:
    """What a setting may be, in words."""
    field = Settings.model_fields[name]
    if name in _ALLOWED:
        return _ALLOWED[name]
    if field.annotation is bool:
        return SWITCH_WORDS
    bounds = {
        kind: getattr(item, kind) for item in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(item, kind)
    }
    noun = "a number" if field.annotation is float else "an integer"
    low = f"{bounds['ge']:,} or more" if "ge" in bounds else f"above {bounds.get('gt', 0):,}"
    return f"{noun}, {low}" + (f", at most {bounds['le']:,}" if "le" in bounds else "")
