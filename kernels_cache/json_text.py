"""JsonText: a JSON object kept as its canonical text, and read when somebody looks at it.

A store of many thousand manifests holds each of their specs: as text it takes a fifth of the memory that it takes as
objects, and most of them are never looked at.
"""

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from mlaprep.kernels_cache.key import json_value, write_json
from mlaprep.kernels_cache.strict_json import MAX_INTEGER

_READ_AT_ONCE: Final = 512
_SAFE: Final = frozenset({str, float, bool, type(None)})


class JsonText(Mapping[str, Any]):
    """A read-only mapping that keeps only its text. Lists in it are tuples.

    Args:
        value: a mapping of JSON values.

    Raises:
        TypeError, ValueError: what JSON has no words for, or an integer of more than 64 bits.
    """

    __slots__ = ("text",)

    text: str
    """Canonical JSON, see :func:`mlaprep.kernels_cache.key.canonical_json`."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        if type(value) is JsonText:
            self.text = value.text
            return
        copy = json_value(value)
        _require_short_integers(copy)
        self.text = write_json(copy)

    @classmethod
    def parsed(cls, value: dict[str, Any]) -> "JsonText":
        """Of what :func:`mlaprep.kernels_cache.strict_json.parse_strict` read, whose bounds need no second look.

        Raises:
            ValueError: a lone surrogate, which JSON can spell.
        """
        text = write_json(value)
        if "\\ud" in text:
            json_value(value)
        self = cls.__new__(cls)
        self.text = text
        return self

    def shared(self) -> "JsonText":
        """The same, its text one object in the process however many have it."""
        self.text = sys.intern(self.text)
        return self

    def __getitem__(self, name: str) -> Any:
        return _read(self.text)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_read(self.text))

    def __len__(self) -> int:
        return len(_read(self.text))

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if type(other) is JsonText else dict(self) == other

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a dict, which has none

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type["JsonText"], tuple[dict[str, Any]]]:
        return type(self), (json.loads(self.text),)


@functools.lru_cache(maxsize=_READ_AT_ONCE)
def _read(text: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = _frozen(json.loads(text))
    return value


def _frozen(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return MappingProxyType({name: item if type(item) in _SAFE else _frozen(item) for name, item in value.items()})
    return tuple(map(_frozen, value)) if kind is list else value


def _require_short_integers(value: Any) -> None:
    kind = type(value)
    if kind is dict:
        for item in value.values():
            if type(item) not in _SAFE:
                _require_short_integers(item)
    elif kind is list:
        for item in value:
            if type(item) not in _SAFE:
                _require_short_integers(item)
    elif kind is int and abs(value) > MAX_INTEGER:
        raise ValueError("an integer of more than 64 bits")
