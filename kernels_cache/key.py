"""CacheKey: what a compiled kernel is stored under, a pure function of everything that shapes its bytes.

No path, user, clock, environment variable or hash seed enters a key, so that machines can share a cache.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

SCHEMA: Final = 1
"""Version of the key encoding and of the manifest; a change makes every earlier entry a miss."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ARCH: Final = re.compile(r"sm_[1-9][0-9]{1,2}[af]?", re.ASCII)
_SCALARS: Final = frozenset({bool, int, float, type(None)})


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """The inputs of a key, and the key itself as ``digest``.

    Raises:
        TypeError: a part that is not a string, or ``options`` that are no tuple.
        ValueError: an arch that is not spelled like ``sm_90a``, or text holding a NUL or a lone surrogate.
            A NUL ends the source for the compiler, so two keys would stand for the same code.
    """

    source: str
    """The whole CUDA source."""
    options: tuple[str, ...]
    """Compiler options in the order they are passed; the order is part of the key."""
    arch: str
    """Full architecture name: ``sm_90`` and ``sm_90a`` are two."""
    nvrtc_version: str
    """Exact compiler version, e.g. ``12.9.86``."""

    def __post_init__(self) -> None:
        if type(self.options) is not tuple:
            raise TypeError("options must be a tuple of strings")
        for part in (self.source, self.arch, self.nvrtc_version, *self.options):
            if type(part) is not str:
                raise TypeError(f"a key is made of strings, found a {type(part).__name__}")
            if "\0" in part:
                raise ValueError("a NUL character in a part of a cache key")
        if not is_arch(self.arch):
            raise ValueError("arch is not spelled like sm_90a")

    @cached_property
    def digest(self) -> str:
        """The key: 64 lower-case hexadecimal digits of a sha256."""
        return _digest("mlaprep-kernel", str(SCHEMA), self.arch, self.nvrtc_version, self.source, *self.options)


def cache_key(*, source: str, options: Sequence[str], arch: str, nvrtc_version: str) -> str:
    """The key of a kernel; see :class:`CacheKey` for the parts and the errors."""
    if isinstance(options, str):
        raise TypeError("options is one string; give a sequence of options")
    return CacheKey(source=source, options=tuple(options), arch=arch, nvrtc_version=nvrtc_version).digest


def request_key(*, arch: str, spec: Mapping[str, Any], generator: str) -> str:
    """Digest of what a caller asks for before it knows the compiler: arch, spec, source generator.

    A store maps it to a key as a hint. ``generator`` names the version of whatever renders the source.

    Raises:
        TypeError: a spec that holds anything but JSON values under string names.
        ValueError: as for :class:`CacheKey`, and for NaN or infinity in the spec.
    """
    if not is_arch(arch):
        raise ValueError("arch is not spelled like sm_90a")
    return _digest("mlaprep-request", str(SCHEMA), arch, generator, canonical_json(spec))


def is_digest(text: object) -> bool:
    """Whether this is a full sha256 in lower-case hexadecimal, safe to build a path from."""
    return type(text) is str and _DIGEST.fullmatch(text) is not None


def is_arch(text: object) -> bool:
    """Whether this is spelled like an architecture name, safe to build a path from."""
    return type(text) is str and _ARCH.fullmatch(text) is not None


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted names, no white space, ASCII.

    Unlike ``==`` on parsed values it tells 1, 1.0 and true apart.

    Raises:
        TypeError: anything but None, bool, int, float, str, list, tuple and mappings with string names.
        ValueError: NaN or infinity, or a lone surrogate.
    """
    return write_json(json_value(value))


def write_json(value: object) -> str:
    """:func:`canonical_json` of a value that is known to be JSON."""
    return _ENCODER.encode(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_ENCODER: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain
)


def json_value(value: object) -> Any:
    """A private copy of a JSON value, dicts and lists only; errors as for :func:`canonical_json`."""
    if type(value) in _SCALARS:
        return value
    if type(value) is str:
        value.encode()
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _SCALARS else json_value(item) for item in value]
    if isinstance(value, Mapping):
        copy = {}
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"a name that is a {type(name).__name__} in a JSON object")
            name.encode()
            copy[name] = item if type(item) in _SCALARS else json_value(item)
        return copy
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _digest(*parts: str) -> str:
    return hashlib.sha256(_encode(parts)).hexdigest()


def _encode(parts: Iterable[str]) -> bytes:
    """Every part behind its length, so that no two lists of parts share an encoding."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
