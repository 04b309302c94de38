"""/healthz and /readyz: whether the process answers, and whether it can do its work."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.service.auth import open_to_all
from mlaprep.service.errors import without_folders
from mlaprep.service.parameters import read_query
from mlaprep.service.readiness import reasons_not_ready, warnings_of
from mlaprep.service.routes.documentation import problems, query
from mlaprep.service.schemas import HealthReply, ReadyReply
from mlaprep.service.shared import shared_document
from mlaprep.service.state import Service, in_thread, json_response, service_of

router = APIRouter(tags=["health"])


@router.get(
    "/healthz",
    dependencies=[open_to_all()],
    summary="Whether the process answers",
    response_model=HealthReply,
    responses=problems(422),
    openapi_extra=query(),
)
async def healthz(request: Request) -> Response:
    """Touches neither disk nor compiler."""
    read_query(request)
    return json_response({"status": "ok"})


@router.get(
    "/readyz",
    dependencies=[open_to_all()],
    summary="Whether the process can do its work",
    response_model=ReadyReply,
    responses={503: {"model": ReadyReply, "description": "not ready; ``reasons`` say why"}, **problems(422)},
    openapi_extra=query(),
)
async def readyz(request: Request) -> Response:
    """Ready means that kernels can be built, or, for a read-only service, that it runs.

    Kernels that are built already are served either way. Looks for a missing compiler again.
    """
    read_query(request)
    service = service_of(request)
    if not service.settings.read_only:
        service.compiler.start()
    document = await in_thread(ready_document, service, request.app.state.drain.began)
    return json_response(document, 200 if document["ready"] else 503)


def ready_document(service: Service, draining: bool) -> dict[str, Any]:
    """What /readyz answers."""
    compiler = service.compiler.state()
    reasons = reasons_not_ready(service, draining=draining)
    counters = asdict(service.builder.stats())
    return {
        "ready": not reasons,
        "reasons": reasons,
        "warnings": warnings_of(service),
        "read_only": service.settings.read_only,
        "indexing": service.catalog.is_indexing,
        "signing_key": None if service.signing_key is None else service.signing_key.public.key_id,
        "compiler": {
            "status": compiler.status,
            "nvrtc_version": compiler.version,
            "missing": compiler.missing,
            "reason": None if compiler.reason is None else without_folders(compiler.reason),
            "processes": len(compiler.pids),
            "queued": compiler.queued,
        },
        "store": asdict(service.store.stats()),
        "shared": shared_document(service.shared),
        "counters": counters | {"crashes": compiler.crashes, "timeouts": compiler.timeouts},
    }
