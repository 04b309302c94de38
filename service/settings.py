"""Settings of the service, from environment variables that start with ``MLAPREP_``."""

import ipaddress
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from mlaprep.kernels_cache.disk import DISK_BYTES
from mlaprep.kernels_cache.store import MEMORY_BYTES
from mlaprep.service.builder import NEGATIVE_TTL_S
from mlaprep.service.compiler import DEFAULT_MEMORY_BYTES, DEFAULT_QUEUE_LIMIT, DEFAULT_TIMEOUT_S

_MIB: Final = 2**20


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
        default=None, description="bearer token that building asks for; without one, only loopback may build"
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
    negative_ttl_s: float = Field(
        default=NEGATIVE_TTL_S, ge=0, le=86400, description="seconds that a refusal by the compiler is remembered"
    )
    max_body_bytes: int = Field(
        default=64 * 1024, ge=1024, le=64 * _MIB, description="bytes of a request body; more get a 413"
    )
    max_connections: int = Field(default=2048, ge=1, description="connections and requests at once; more get a 503")
    shutdown_grace_s: int = Field(
        default=30, ge=0, le=3600, description="seconds that running requests may take to finish after SIGTERM"
    )
    access_log: bool = Field(default=False, description="write one log line a request")

    @field_validator("token", mode="before")
    @classmethod
    def _no_empty_token(cls, value: Any) -> Any:
        """An empty variable is how a compose file says "none"."""
        return None if value == "" else value

    @field_validator("token")
    @classmethod
    def _printable_token(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value else "x"
        if not (text.isascii() and text.isprintable() and " " not in text and len(text) <= 1024):
            raise ValueError("a token is up to 1024 printable ASCII characters without spaces")
        return value

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if not (is_loopback(self.host) or self.token or self.read_only):
            raise ValueError(
                "host is not a loopback address and there is no token: anyone who reaches it could make this machine "
                "compile. Set MLAPREP_TOKEN, or MLAPREP_READ_ONLY=true to serve built kernels only"
            )
        return self


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
