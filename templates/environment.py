"""Environment: switches read from environment variables, the same words for every part of mlaprep."""

from collections.abc import Mapping
from typing import Final

from mlaprep.templates.errors import FieldProblem, SpecError

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")

SWITCH_WORDS: Final = f"{', '.join(_ON)}; or {', '.join(_OFF)}"
"""What a switch may say, in either case."""


def parse_switch(name: str, text: str) -> bool:
    """Whether a text means on; an empty one means off.

    Raises:
        SpecError: any other word. A switch that forbids something must not be off for a typing error.
    """
    word = text.strip().lower()
    if word in _ON:
        return True
    if word in _OFF or not word:
        return False
    raise SpecError(FieldProblem(name, "a string that is no switch", SWITCH_WORDS))


def read_switch(name: str, environ: Mapping[str, str], *, default: bool = False) -> bool:
    """The switch of an environment variable, ``default`` where it is unset or empty; raises as
    :func:`parse_switch`."""
    text = environ.get(name, "")
    return parse_switch(name, text) if text.strip() else default


def read_count(name: str, environ: Mapping[str, str], default: int, largest: int = 2**31 - 1) -> int:
    """The whole number of an environment variable, ``default`` where it is unset or empty.

    Raises:
        SpecError: anything but digits, or a number above ``largest``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) > largest:
        raise SpecError(FieldProblem(name, "a string that is no such number", f"a whole number from 0 to {largest}"))
    return int(text)
