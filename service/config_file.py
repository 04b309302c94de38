"""ConfigFile: settings from the TOML file that MLAPREP_CONFIG names, by their own names."""

import difflib
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from mlaprep.templates.errors import FieldProblem, SpecError

VARIABLE: Final = "MLAPREP_CONFIG"

_ALLOWED: Final = "a TOML file of settings, such as port = 8400; unset the variable to have none"


def config_path() -> Path | None:
    """The file that the environment names, None where it names none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


class ConfigFile(TomlConfigSettingsSource):
    """What the file says, by field name. Without a file it says nothing.

    Raises:
        SpecError: a file that is not there, is no TOML, holds a name that is no setting, or a secret that everybody
            on this machine can read. Values are not repeated.
    """

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        path = config_path()
        try:
            if path is not None and not stat.S_ISREG(path.stat().st_mode):
                raise _refused("what is no file")
            super().__init__(settings_cls, path)
        except OSError as error:
            raise _refused(f"a file that cannot be read ({error.strerror or type(error).__name__})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            place = str(error).rpartition("(at ")[2].rstrip(")") if "(at " in str(error) else "bytes that are not UTF-8"
            raise _refused(f"text that is not TOML ({place})") from None
        if path is not None:
            _check_names(self.toml_data, settings_cls)
            _check_switches(self.toml_data, settings_cls)
            _check_secrets(self.toml_data, settings_cls, path)


def _refused(found: str) -> SpecError:
    return SpecError(FieldProblem(VARIABLE, found, _ALLOWED))


def _check_names(said: dict[str, Any], settings_cls: type[BaseSettings]) -> None:
    known = list(settings_cls.model_fields)
    problems = []
    for name in said:
        if name in known:
            continue
        near = difflib.get_close_matches(name.lower().removeprefix("mlaprep_"), known, 1)
        allowed = f"did you mean {near[0]}?" if near else "a setting of the service in lower case, without MLAPREP_"
        shown = name if name.isascii() and name.isprintable() and len(name) <= 64 else "(unprintable name)"
        problems.append(FieldProblem(f"{shown} in {VARIABLE}", "a name that is no setting", allowed))
    if problems:
        raise SpecError(problems)


def _check_switches(said: dict[str, Any], settings_cls: type[BaseSettings]) -> None:
    """TOML's true is a switch and never a number, as which Python would take it: 1."""
    problems = [
        FieldProblem(f"{name} in {VARIABLE}", "true or false", "a value of this setting's kind; it is no switch")
        for name, value in said.items()
        if isinstance(value, bool) and settings_cls.model_fields[name].annotation is not bool
    ]
    if problems:
        raise SpecError(problems)


def _check_secrets(said: dict[str, Any], settings_cls: type[BaseSettings], path: Path) -> None:
    secrets = [name for name in said if is_secret(settings_cls, name)]
    if secrets and path.stat().st_mode & stat.S_IROTH:
        allowed = f"mode 0600 or 0640, or {secrets[0]} elsewhere"
        raise SpecError(FieldProblem(f"{secrets[0]} in {VARIABLE}", "a secret that everybody here can read", allowed))


def is_secret(settings_cls: type[BaseSettings], name: str) -> bool:
    """Whether a setting's value must not be shown."""
    return SecretStr.__name__ in str(settings_cls.model_fields[name].annotation)
