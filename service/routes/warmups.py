"""/v1/warmups: kernels built ahead of a rollout."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlaprep.service.auth import require
from mlaprep.service.body import read_json
from mlaprep.service.drain import Drain
from mlaprep.service.errors import TooManyJobs
from mlaprep.service.job_store import WarmupJob
from mlaprep.service.parameters import read_query
from mlaprep.service.problems import ProblemError, invalid_fields
from mlaprep.service.request_schemas import plan_body
from mlaprep.service.routes.documentation import problems, query
from mlaprep.service.schemas import WarmupReply, WarmupsReply
from mlaprep.service.state import Service, in_thread, json_response, service_of
from mlaprep.templates.errors import SpecError
from mlaprep.templates.plans import MAX_ENTRIES, MAX_KERNELS, Target, WarmupPlan, parse_plan

router = APIRouter(prefix="/v1/warmups", tags=["warm-ups"])

HEARTBEAT_S: Final = 10.0
"""Seconds between two signs of life on a stream of events."""
MAX_STREAMS: Final = 64
"""Streams of events that one process serves at once."""
_POLL_S: Final = 0.2
_RETRY_AFTER_S: Final = 5

JobPath = Annotated[
    str,
    Path(
        description="id of a warm-up job",
        examples=["0f3a6c1d2b4e5f60"],
        json_schema_extra={"pattern": "^[0-9a-f]{16}$"},
    ),
]


@router.post(
    "",
    dependencies=[require("build")],
    summary="Start a warm-up",
    response_model=WarmupReply,
    status_code=202,
    responses={
        200: {"model": WarmupReply, "description": "an equal plan is not finished yet: this is its job"},
        **problems(413, 415, 422, 429, 503),
    },
    openapi_extra=query(requestBody=plan_body(MAX_ENTRIES, MAX_KERNELS)),
)
async def start_warmup(request: Request) -> Response:
    """Builds every kernel of the plan that is not built, behind those that somebody waits for. A plan with a bad entry
    starts nothing: all of them are named."""
    service = _building(request)
    read_query(request)
    body = await read_json(request)
    plan = await in_thread(_plan, service, body, limiter=service.reading)
    try:
        job, new = await in_thread(service.jobs.submit, plan)
    except TooManyJobs as error:
        raise _too_many(error) from error
    return json_response(job.to_document(with_plan=True), 202 if new else 200)


@router.get(
    "",
    dependencies=[require("read")],
    summary="Warm-up jobs",
    response_model=WarmupsReply,
    responses=problems(422, 503),
)
async def list_warmups(request: Request) -> Response:
    """Those of every process on the same cache, the latest first."""
    read_query(request)
    service = service_of(request)
    jobs = await in_thread(service.jobs.store.list, limiter=service.reading)
    return json_response({"warmups": [job.to_document() for job in jobs]})


@router.get(
    "/{job_id}",
    dependencies=[require("read")],
    summary="One warm-up job",
    response_model=WarmupReply,
    responses=problems(404, 422, 503),
)
async def get_warmup(request: Request, job_id: JobPath) -> Response:
    """How far it is, and what could not be built."""
    read_query(request)
    return json_response((await find_job(service_of(request), job_id)).to_document(with_plan=True))


@router.get(
    "/{job_id}/events",
    dependencies=[require("read")],
    summary="A warm-up job as it goes on",
    response_class=Response,
    responses={
        200: {
            "description": "server-sent events: `progress` with the job as it then is, until it is finished",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **problems(404, 422, 503),
    },
)
async def watch_warmup(request: Request, job_id: JobPath) -> Response:
    """The first event comes at once, unless Last-Event-ID names it."""
    read_query(request)
    service = service_of(request)
    job = await find_job(service, job_id)
    if service.streams.open >= MAX_STREAMS:
        raise ProblemError(
            503,
            "too-many-streams",
            "Too many streams of events are open",
            "Read the job itself, or ask again once another stream is done.",
            headers={"retry-after": str(_RETRY_AFTER_S)},
        )
    last = request.headers.get("last-event-id", "")
    drain: Drain = request.app.state.drain
    return StreamingResponse(
        _events(service, job, last, drain), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


@router.post(
    "/{job_id}/resume",
    dependencies=[require("build")],
    summary="Run a warm-up again",
    response_model=WarmupReply,
    status_code=202,
    responses=problems(404, 409, 422, 429, 503),
    openapi_extra=query(),
)
async def resume_warmup(request: Request, job_id: JobPath) -> Response:
    """One that was interrupted, cancelled or failed in part goes through its plan again and builds what is left."""
    service = _building(request)
    read_query(request)
    job = await find_job(service, job_id)
    if not job.finished:
        raise ProblemError(409, "warmup-running", "The warm-up is not finished", "Cancel it first, or let it go on.")
    try:
        return json_response((await in_thread(service.jobs.resume, job)).to_document(with_plan=True), 202)
    except TooManyJobs as error:
        raise _too_many(error) from error


@router.delete(
    "/{job_id}",
    dependencies=[require("build")],
    summary="Cancel a warm-up",
    response_model=WarmupReply,
    status_code=202,
    responses=problems(404, 422, 503),
    openapi_extra=query(),
)
async def cancel_warmup(request: Request, job_id: JobPath) -> Response:
    """Kernels that are being compiled are finished; what is built stays. One that is finished stays as it is."""
    service = service_of(request)
    read_query(request)
    job = await find_job(service, job_id)
    if not job.finished:
        job = await in_thread(service.jobs.cancel, job)
    return json_response(job.to_document(with_plan=True), 202)


async def _events(service: Service, job: WarmupJob, last: str, drain: Drain) -> AsyncIterator[str]:
    service.streams.open += 1
    try:
        seen, quiet = last, time.monotonic()
        while True:
            if (revision := str(job.revision)) != seen:
                seen, quiet = revision, time.monotonic()
                yield f"event: progress\nid: {revision}\ndata: {json.dumps(job.to_document())}\n\n"
            if job.finished or drain.began:
                return
            if time.monotonic() - quiet >= HEARTBEAT_S:
                quiet = time.monotonic()
                yield ": nothing new\n\n"
            await asyncio.sleep(_POLL_S)
            found = await in_thread(service.jobs.store.get, job.id, limiter=service.reading)
            if found is None:
                return
            job = found
    finally:
        service.streams.open -= 1


def _plan(service: Service, body: Any) -> WarmupPlan:
    def lacking(most: int) -> list[Target]:
        page = service.misses.page("count", most)
        states = service.catalog.states((spec, arch) for spec, arch, _ in page.misses)
        pairs = zip(page.misses, states, strict=True)
        return [(spec, arch) for (spec, arch, _), state in pairs if state == "missing"]

    try:
        return parse_plan(body, lacking)
    except SpecError as error:
        raise invalid_fields(error.problems, "invalid-plan", most=4 * MAX_ENTRIES) from None


def _building(request: Request) -> Service:
    service = service_of(request)
    if service.settings.read_only:
        raise ProblemError(
            403, "building-disabled", "This service builds nothing", "It is read-only; ask one that builds."
        )
    return service


async def find_job(service: Service, job_id: str) -> WarmupJob:
    """The job of that id, or a problem: 404."""
    job = await in_thread(service.jobs.store.get, job_id, limiter=service.reading)
    if job is None:
        raise ProblemError(404, "no-such-warmup", "There is no such warm-up", "GET /v1/warmups lists those there are.")
    return job


def _too_many(error: TooManyJobs) -> ProblemError:
    return ProblemError(
        429, "too-many-warmups", "Too many warm-ups wait", str(error), headers={"retry-after": str(_RETRY_AFTER_S)}
    )
