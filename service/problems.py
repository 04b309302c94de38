"""Problem details (RFC 9457): every error of the service as ``application/problem+json``.

Input is never echoed: a problem names the field, the class of what was found and what is allowed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlaprep.kernels_cache.errors import AmbiguousKeyError, PlaceUnusable, StoreError
from mlaprep.service.errors import (
    RETRY_AFTER_S,
    BuilderClosed,
    BuildError,
    CatalogUnread,
    CompileCrashed,
    CompileFailed,
    CompilerUnavailable,
    CompileTimeout,
    DisassemblerUnavailable,
    InspectError,
    KernelRevoked,
    KernelSpills,
    QueueFull,
    without_folders,
)
from mlaprep.service.headers import guarded
from mlaprep.templates.errors import FieldProblem, SpecError, TemplateError

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:mlaprep:problem:"

_MAX_FIELDS: Final = 32
_MAX_LOG: Final = 2000
_HTTP_TITLES: Final[Mapping[int, tuple[str, str, str]]] = {
    404: ("not-found", "No such resource", "The API is under /v1; /openapi.json lists it."),
    405: ("method-not-allowed", "Method not allowed", "The Allow header lists the methods of this resource."),
}
_BUILD_PROBLEMS: Final[Mapping[type[BuildError], tuple[int, str, str]]] = {
    CompilerUnavailable: (503, "compiler-unavailable", "The compiler is not available"),
    KernelSpills: (422, "kernel-spills", "The kernel spills, and was not published"),
    KernelRevoked: (410, "kernel-revoked", "The kernel is revoked"),
    CompileFailed: (422, "compile-failed", "The compiler refused this kernel"),
    CompileTimeout: (504, "compile-timeout", "The compile took too long"),
    CompileCrashed: (503, "compile-crashed", "The compiler died"),
    QueueFull: (429, "queue-full", "Too many kernels wait for a compiler"),
    BuilderClosed: (503, "shutting-down", "The service is shutting down"),
}
_RETRY_LATER: Final = (429, 503)
_LATER: Final = {"retry-after": str(RETRY_AFTER_S)}
_log = logging.getLogger(__name__)


class ProblemError(Exception):
    """An answer that is a problem, raised from wherever the request stops making sense."""

    def __init__(
        self,
        status: int,
        slug: str,
        title: str,
        detail: str,
        *,
        problems: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.slug = slug
        self.title = title
        self.detail = detail
        self.problems = tuple(problems)
        self.headers = dict(headers or {})
        super().__init__(f"{status} {slug}: {detail}")

    def response(self) -> Response:
        """The reply a client gets."""
        document: dict[str, Any] = {
            "type": TYPE_PREFIX + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.problems:
            document["problems"] = [
                {"field": problem.field, "found": problem.found, "allowed": problem.allowed}
                for problem in self.problems
            ]
        headers = {"cache-control": "no-store"} | self.headers
        return Response(json.dumps(document).encode(), self.status, headers, MEDIA_TYPE)


def invalid_fields(
    problems: Sequence[FieldProblem], slug: str = "invalid-request", most: int = _MAX_FIELDS
) -> ProblemError:
    """A 422 that lists every field at fault, the first ``most`` of them."""
    title = {
        "invalid-request": "The request has values that are not allowed",
        "invalid-json": "The body is not JSON that can be accepted",
        "invalid-spec": "The kernel specification is not valid",
        "invalid-plan": "The plan is not valid, and nothing was started",
        "unknown-arch": "No such architecture to build for",
    }[slug]
    return ProblemError(422, slug, title, "; ".join(map(str, problems[:_MAX_FIELDS])), problems=problems[:most])


def problem_of(error: Exception) -> ProblemError:
    """The problem that stands for an exception; an unknown one is a 500 that says nothing of it."""
    match error:
        case ProblemError():
            return error
        case SpecError():
            arch_only = all(problem.field == "arch" for problem in error.problems)
            return invalid_fields(error.problems, "unknown-arch" if arch_only else "invalid-spec")
        case BuildError():
            return _of_build(error)
        case DisassemblerUnavailable():
            told = without_folders(str(error))
            return ProblemError(503, "disassembler-unavailable", "Machine code cannot be shown here", told)
        case InspectError():
            return ProblemError(
                503,
                "disassembly-failed",
                "The machine code was not read",
                str(error),
                headers=_LATER,
            )
        case AmbiguousKeyError():
            return ProblemError(
                409, "ambiguous-prefix", "The prefix fits several kernels", "Give more digits, or all 64 of them."
            )
        case CatalogUnread():
            return ProblemError(503, "indexing", "The store is still being read", str(error), headers=_LATER)
        case StoreError():
            detail = error.told if isinstance(error, PlaceUnusable) else str(error)
            return ProblemError(503, "not-kept", "The store cannot keep this", detail, headers=_LATER)
        case TemplateError():  # says nothing of a request: templates are this installation's own
            return ProblemError(500, "template-error", "A template of this service does not render", str(error))
        case ClientDisconnect():  # in the middle of its body; nobody reads this
            return ProblemError(400, "client-left", "The client left", "The request ended before its body did.")
        case RequestValidationError():
            return invalid_fields([_of_validation(item) for item in error.errors()])
        case HTTPException():
            slug, title, detail = _HTTP_TITLES.get(
                error.status_code, ("http-error", "The request cannot be answered", "See the status code.")
            )
            return ProblemError(error.status_code, slug, title, detail, headers=error.headers)
    return ProblemError(
        500, "internal", "The service failed", "The fault is logged under the request id of this reply."
    )


def install(app: FastAPI) -> None:
    """Answer every error of an application with a problem."""
    kinds = (
        ProblemError,
        SpecError,
        TemplateError,
        BuildError,
        InspectError,
        StoreError,
        ClientDisconnect,
        RequestValidationError,
        HTTPException,
    )
    for kind in kinds:
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(Exception, _answer_unexpected)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, PlaceUnusable):  # the reply does not name the directory, which is nobody else's business
        _log.warning("%s", error)
    return problem_of(error).response()


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    response = problem_of(error).response()
    request_id = request.scope.get("state", {}).get("request_id")
    response.raw_headers = guarded(response.raw_headers)  # this reply passes by the middleware that sets them
    if request_id is not None:
        response.headers["x-request-id"] = request_id
        _log.error("request %s failed: %s", request_id, type(error).__name__)
    return response


def _of_build(error: BuildError) -> ProblemError:
    known = (entry for kind, entry in _BUILD_PROBLEMS.items() if isinstance(error, kind))
    status, slug, title = next(known, (503, "build-failed", "The kernel was not built"))
    detail = str(error)
    if isinstance(error, CompileFailed):
        detail = f"{error.message}\n{error.log[:_MAX_LOG]}".strip()
    elif isinstance(error, CompilerUnavailable):
        detail = without_folders(detail)
    headers = _LATER if status in _RETRY_LATER else {}
    return ProblemError(status, slug, title, detail, headers=headers)


def _of_validation(item: Mapping[str, Any]) -> FieldProblem:
    """A framework's finding without its input, which may hold what JSON cannot."""
    place = [str(part) for part in item.get("loc", ()) if isinstance(part, str | int)]
    field = ".".join(place[1:]) or "request"
    if not (field.isascii() and field.isprintable() and len(field) <= 64):
        field = "(unprintable name)"
    return FieldProblem(field, "a value that is not allowed", str(item.get("type", "another value")).replace("_", " "))
