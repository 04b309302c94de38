"""/metrics: what a Prometheus server scrapes."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.service.auth import open_to_all
from mlaprep.service.metrics import Metrics
from mlaprep.service.parameters import read_query
from mlaprep.service.routes.documentation import problems, query
from mlaprep.service.state import in_thread, service_of

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    dependencies=[open_to_all()],
    summary="Counts for a Prometheus server",
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(422),
    },
    openapi_extra=query(),
)
async def get_metrics(request: Request) -> Response:
    """Of this process, or of all workers that were started together. No token: keep it from strangers by a proxy."""
    read_query(request)
    metrics: Metrics = request.app.state.metrics
    text = await in_thread(metrics.text, limiter=service_of(request).reading)
    return Response(text, headers={"cache-control": "no-store"}, media_type=CONTENT_TYPE_LATEST)
