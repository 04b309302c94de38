"""Effective settings: what holds in the end, and where each value comes from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic_settings import EnvSettingsSource

from mlaprep.service.config_file import ConfigFile, is_secret
from mlaprep.service.settings import Settings, read_settings

Source = Literal["option", "env", "file", "default"]

MASK: Final = "********"
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting. ``value`` is a JSON value, masked where it is a secret."""

    name: str
    variable: str
    value: str | int | float | bool | None
    source: Source


def effective_settings(options: Mapping[str, Any] | None = None) -> tuple[EffectiveSetting, ...]:
    """Every setting of the service. An option wins over the environment, that over the file, that over the default.

    Raises:
        SpecError: settings that must not be served, see :func:`read_settings`.
    """
    given = dict(options or {})
    settings, sources = read_settings(given), sources_of(given)
    return tuple(
        EffectiveSetting(name, f"MLAPREP_{name.upper()}", _shown(settings, name), sources.get(name, "default"))
        for name in Settings.model_fields
    )


def sources_of(options: Mapping[str, Any]) -> dict[str, Source]:
    """Where each setting comes from; one that is not named has its default."""
    layers: tuple[tuple[Source, Mapping[str, Any]], ...] = (
        ("file", ConfigFile(Settings)()),
        ("env", EnvSettingsSource(Settings)()),
        ("option", options),
    )
    return {name: source for source, layer in layers for name in layer}


def _shown(settings: Settings, name: str) -> str | int | float | bool | None:
    value = getattr(settings, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(Settings, name):
        return MASK
    text = str(value) if isinstance(value, str | Path) else repr(value)
    return without_credentials(text)


def without_credentials(text: str) -> str:
    """A text with what stands before the host of a URL masked."""
    return _CREDENTIALS.sub(MASK, text)
