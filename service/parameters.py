"""Parameters of a query string: declared once, for the documentation and for reading them.

The framework's own reading takes the last of two, ignores unknown names and echoes what it refuses.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from mlaprep.service.body import plain_name
from mlaprep.service.problems import invalid_fields
from mlaprep.templates.errors import FieldProblem, MlaprepError

_INTEGER: Final = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """One parameter. ``read`` raises ValueError, or a SpecError, for a text that is not ``allowed``."""

    name: str
    schema: Mapping[str, Any]
    description: str
    allowed: str
    read: Callable[[str], Any]
    default: Any = None
    example: Any = None

    def openapi(self) -> dict[str, Any]:
        """The parameter object of an OpenAPI document."""
        described = {
            "name": self.name,
            "in": "query",
            "required": False,
            "description": self.description,
            "schema": dict(self.schema),
        }
        return described if self.example is None else described | {"example": self.example}


def choice(name: str, choices: tuple[str, ...], description: str, example: str | None = None) -> QueryParameter:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    schema = {"type": "string", "enum": list(choices)}
    return QueryParameter(name, schema, description, "one of " + ", ".join(choices), read, example=example)


def integer(
    name: str, low: int, high: int, description: str, default: int | None = None, example: int | None = None
) -> QueryParameter:
    """A decimal integer without sign or leading zero."""

    def read(text: str) -> int:
        number = int(text) if _INTEGER.fullmatch(text) else low - 1
        if not low <= number <= high:
            raise ValueError
        return number

    schema = {"type": "integer", "minimum": low, "maximum": high} | ({} if default is None else {"default": default})
    return QueryParameter(name, schema, description, f"an integer from {low} to {high}", read, default, example)


def flag(name: str, description: str) -> QueryParameter:
    """``true`` or ``false``; off when absent."""

    def read(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"

    schema = {"type": "boolean", "default": False}
    return QueryParameter(name, schema, description, "true or false", read, False, True)


def read_query(request: Request, *parameters: QueryParameter) -> dict[str, Any]:
    """Every parameter's value by name; all faults are reported at once.

    Raises:
        ProblemError: 422 for an unknown name, a name given twice, or a value that is not allowed.
    """
    known = {parameter.name: parameter for parameter in parameters}
    values = {name: parameter.default for name, parameter in known.items()}
    problems, seen = [], set()
    for name, text in request.query_params.multi_items():
        parameter = known.get(name)
        if parameter is None:
            allowed = "one of " + ", ".join(known) if known else "no query parameters"
            problems.append(FieldProblem(plain_name(name), "an unknown query parameter", allowed))
        elif name in seen:
            problems.append(FieldProblem(name, "a parameter given twice", "once"))
        else:
            seen.add(name)
            try:
                values[name] = parameter.read(text)
            except (ValueError, MlaprepError):
                problems.append(FieldProblem(name, "a value that is not allowed", parameter.allowed))
    if problems:
        raise invalid_fields(problems)
    return values
