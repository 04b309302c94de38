"""/v1/misses: kernels that workers asked for and lacked."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.service.auth import require
from mlaprep.service.body import plain_name, read_json
from mlaprep.service.catalog import Catalog, State, models_of
from mlaprep.service.misses import MAX_COUNT, MISS_REASONS, ORDERS, Miss, Misses, MissReport, Order, Place
from mlaprep.service.parameters import QueryParameter, choice, integer, read_query
from mlaprep.service.problems import invalid_fields
from mlaprep.service.request_schemas import misses_body
from mlaprep.service.routes.documentation import problems, query
from mlaprep.service.schemas import ARCH, VARIANT_ID, MissesRecordedReply, MissesReply
from mlaprep.service.state import in_thread, json_response, service_of
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import VARIANT_ID_PATTERN, KernelSpec, parse_variant_id

router = APIRouter(prefix="/v1/misses", tags=["misses"])

MAX_ENTRIES: Final = 256
"""Entries of one report."""

_MEMBERS: Final = ("variant_id", "arch", "count", "reason")
_CURSOR_TEXT: Final = re.compile(
    r"([1-9][0-9]{0,15})\.([1-9][0-9]{0,15})\.([a-z0-9_]{1,16})\.([a-z0-9_-]{1,400})", re.ASCII
)

_NUMBER_PATTERN: Final = r"[1-9][0-9]{0,15}\."
_CURSOR_PATTERN: Final = (
    f"^{_NUMBER_PATTERN}{_NUMBER_PATTERN}(?:{'|'.join(map(str, ARCHS))})\\.{VARIANT_ID_PATTERN.removeprefix('^')}"
)


def _read_cursor(text: str) -> Place:
    match = _CURSOR_TEXT.fullmatch(text)
    if match is None:
        raise ValueError
    parse_variant_id(match[4])
    return -int(match[1]), -int(match[2]), match[4], str(Arch(match[3]))


def write_cursor(place: Place) -> str:
    """A place as a cursor's text."""
    return f"{-place[0]}.{-place[1]}.{place[3]}.{place[2]}"


PARAMETERS: Final = (
    choice("arch", tuple(map(str, ARCHS)), "one architecture only", str(ARCH)),
    choice("order", ORDERS, "the most frequent first (default), or the latest", "count"),
    integer("limit", 1, 500, "misses on a page", default=100, example=20),
    QueryParameter(
        "cursor",
        {"type": "string", "format": "miss-cursor", "maxLength": 450, "pattern": _CURSOR_PATTERN},
        "next_cursor of the page before, in the same order",
        "next_cursor of the page before",
        _read_cursor,
        example=f"8.1769860807.{ARCH}.{VARIANT_ID}",
    ),
)


@router.get(
    "",
    dependencies=[require("read")],
    summary="Kernels that workers asked for and lacked",
    response_model=MissesReply,
    responses=problems(422, 503),
    openapi_extra=query(*PARAMETERS),
)
async def list_misses(request: Request) -> Response:
    """With how far each is by now: what is still ``missing`` is worth building ahead."""
    values = read_query(request, *PARAMETERS)
    service = service_of(request)
    arch = None if values["arch"] is None else Arch(values["arch"])
    order: Order = values["order"] or "count"
    page = await in_thread(
        _page, service.misses, service.catalog, order, values["limit"], arch, values["cursor"], limiter=service.reading
    )
    return json_response(page)


@router.post(
    "",
    dependencies=[require("read")],
    summary="Report kernels that were lacking",
    response_model=MissesRecordedReply,
    responses=problems(413, 415, 422),
    openapi_extra=query(requestBody=misses_body(MISS_REASONS, MAX_ENTRIES, MAX_COUNT)),
)
async def report_misses(request: Request) -> Response:
    """What workers do in the background. Nothing is built for it; a report with a bad entry is not counted at all."""
    read_query(request)
    body = await read_json(request)
    service = service_of(request)
    # Off the event loop: reading 256 variant ids takes 30 ms.
    return json_response(await in_thread(_record, service.misses, body, limiter=service.reading))


def _record(misses: Misses, body: Any) -> dict[str, int]:
    recorded, ignored = misses.record(_reports(body))
    return {"recorded": recorded, "ignored": ignored}


def _page(
    misses: Misses, catalog: Catalog, order: Order, limit: int, arch: Arch | None, after: Place | None
) -> dict[str, Any]:
    page = misses.page(order, limit, arch, after)
    states = catalog.states((spec, arch) for spec, arch, _ in page.misses)
    return {
        "misses": [_row(*entry, state) for entry, state in zip(page.misses, states, strict=True)],
        "total": page.total,
        "next_cursor": None if page.next is None else write_cursor(page.next),
    }


def _row(spec: KernelSpec, arch: Arch, miss: Miss, state: State) -> dict[str, Any]:
    return {
        "variant_id": spec.variant_id,
        "arch": str(arch),
        "models": list(models_of(spec)),
        "state": state,
        "count": miss.count,
        "reasons": dict(miss.reasons),
        "first_seen": _utc(miss.first_seen),
        "last_seen": _utc(miss.last_seen),
    }


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _reports(body: Any) -> list[MissReport]:
    """The entries of a report.

    Raises:
        ProblemError: 422 that names every bad entry by its number.
    """
    if not isinstance(body, dict):
        raise invalid_fields([FieldProblem("body", "no JSON object", 'an object with "misses"')])
    faults = [FieldProblem(plain_name(name), "an unknown field", "misses") for name in body if name != "misses"]
    entries = body.get("misses")
    reports: list[MissReport] = []
    if not (isinstance(entries, list) and 1 <= len(entries) <= MAX_ENTRIES):
        faults.append(FieldProblem("misses", "no list of that length", f"a list of 1 to {MAX_ENTRIES} entries"))
    else:
        for number, entry in enumerate(entries):
            try:
                reports.append(_report(entry))
            except SpecError as error:
                faults += [
                    FieldProblem(f"misses.{number}.{problem.field}", problem.found, problem.allowed)
                    for problem in error.problems
                ]
    if faults:
        raise invalid_fields(faults, most=4 * MAX_ENTRIES)
    return reports


def _report(entry: Any) -> MissReport:
    if not isinstance(entry, dict):
        raise SpecError(FieldProblem("entry", "no JSON object", f"an object of {', '.join(_MEMBERS)}"))
    faults = [
        FieldProblem(plain_name(name), "an unknown field", ", ".join(_MEMBERS))
        for name in entry
        if name not in _MEMBERS
    ]
    spec, arch = _spec(entry, faults), _arch(entry, faults)
    count, reason = entry.get("count", 1), entry.get("reason", MISS_REASONS[0])
    if not (isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_COUNT):
        faults.append(FieldProblem("count", "a value that is not allowed", f"an integer from 1 to {MAX_COUNT}"))
    if not (isinstance(reason, str) and reason in MISS_REASONS):
        faults.append(FieldProblem("reason", "a value that is not allowed", "one of " + ", ".join(MISS_REASONS)))
    if faults or spec is None or arch is None:
        raise SpecError(faults)
    check_target(spec, arch)
    return MissReport(spec, arch, count, reason)


def _spec(entry: Mapping[str, Any], faults: list[FieldProblem]) -> KernelSpec | None:
    try:
        return parse_variant_id(entry.get("variant_id", ""))
    except SpecError as error:
        faults += error.problems
    return None


def _arch(entry: Mapping[str, Any], faults: list[FieldProblem]) -> Arch | None:
    name = entry.get("arch")
    if isinstance(name, str) and name in _ARCHS:
        return Arch(name)
    faults.append(FieldProblem("arch", "an architecture that is not known", "one of " + ", ".join(_ARCHS)))
    return None


_ARCHS: Final = tuple(map(str, ARCHS))
