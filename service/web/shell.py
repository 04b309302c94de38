"""Shell: what surrounds every page of the dashboard, and the route that answers errors as pages."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mlaprep.kernels_cache.errors import StoreError
from mlaprep.service.errors import BuildError, InspectError
from mlaprep.service.problems import ProblemError, problem_of
from mlaprep.service.readiness import is_warned, reasons_not_ready
from mlaprep.service.state import service_of
from mlaprep.service.web.pages import render_page
from mlaprep.templates.errors import MlaprepError

_EXPECTED: Final = (ProblemError, MlaprepError, BuildError, InspectError, StoreError, HTTPException)
_HEADERS: Final = {"cache-control": "no-cache"}


@dataclass(frozen=True, slots=True)
class Shell:
    """The head and foot of a page."""

    section: str
    """Path of the part that the page belongs to."""
    version: str
    reasons: tuple[str, ...]
    """Why the service is not ready; empty where it is."""
    warned: bool
    """Whether something is wrong that keeps nothing from working."""
    read_only: bool
    needs_token: bool
    """Whether building takes a token."""

    @property
    def ready(self) -> bool:
        return not self.reasons


def page(request: Request, section: str, name: str, status: int = 200, **values: Any) -> Response:
    """A page of the dashboard."""
    service = service_of(request)
    shell = Shell(
        section=section,
        version=request.app.version,
        reasons=tuple(reasons_not_ready(service, draining=request.app.state.drain.began)),
        warned=is_warned(service),
        read_only=service.settings.read_only,
        needs_token=service.access.takes_tokens,
    )
    return HTMLResponse(render_page(name, shell=shell, **values), status, _HEADERS)


class PageRoute(APIRoute):
    """Answers what is wrong with a request by a page in place of JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_with_page(request: Request) -> Response:
            try:
                return await answer(request)
            except _EXPECTED as error:
                problem = problem_of(error)
                section = f"/{request.scope['path'].split('/')[1]}"
                section = section if section in ("/warmups", "/misses", "/status") else "/"
                response = page(request, section, "problem", problem.status, problem=problem)
                response.headers.update(problem.headers)
                return response

        return answer_with_page
