"""Errors of the project's shared vocabulary.

::

    MlaprepError
    ├── SpecError (also ValueError)      a specification that cannot be; .problems lists every field
    ├── TemplateError                    a template of the kernel that does not render; .template, .line
    └── ...                              clients.errors and service.errors hang theirs here

Every message names what was asked, what was found, and what to do next.
"""

from dataclasses import dataclass


class MlaprepError(Exception):
    """Base of every error that mlaprep raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field that a specification got wrong.

    ``found`` is the class of the value ("string", "boolean", "number out of range"), never the value:
    problems travel to logs and HTTP replies, and input is not echoed there.
    """

    field: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field}: found {self.found}; allowed: {self.allowed}"


class SpecError(MlaprepError, ValueError):
    """A kernel specification, variant id, preset, architecture name or setting that is not valid.

    ``problems`` holds a :class:`FieldProblem` for every field at fault, so one round trip mends all.
    """

    def __init__(self, problems: FieldProblem | list[FieldProblem]) -> None:
        self.problems = tuple(problems) if isinstance(problems, list) else (problems,)
        super().__init__("; ".join(str(problem) for problem in self.problems))


class TemplateError(MlaprepError):
    """A template of the kernel does not render: a mistake in the file, whatever the specification says.

    ``template`` is the file's name, ``line`` the line at fault, 0 where it is not known.
    """

    def __init__(self, template: str, line: int, message: str) -> None:
        self.template = template
        self.line = line
        self.message = message
        place = f"{template}, line {line}" if line else template
        super().__init__(f"{place}: {message}; correct templates/{template}")

    def __reduce__(self) -> tuple[type["TemplateError"], tuple[str, int, str]]:
        return type(self), (self.template, self.line, self.message)
