"""/: the dashboard, pages for people. They read without JavaScript; it adds progress and what changes something."""

from collections.abc import Iterable
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.auth import open_to_all, require
from mlaprep.service.catalog import SORTS, STATES, Catalog, Filter, Variant, VariantArch, models_of
from mlaprep.service.errors import InspectError
from mlaprep.service.job_store import MAX_JOBS
from mlaprep.service.parameters import QueryParameter, choice, integer, read_query
from mlaprep.service.problems import ProblemError
from mlaprep.service.routes.health import ready_document
from mlaprep.service.routes.inspection import inspect_kernel
from mlaprep.service.routes.misses import PARAMETERS as MISSES_PARAMETERS
from mlaprep.service.routes.misses import write_cursor
from mlaprep.service.routes.variants import LAYOUTS
from mlaprep.service.routes.warmups import find_job
from mlaprep.service.state import Service, in_thread, service_of
from mlaprep.service.web.assets import PREFIX, find_asset
from mlaprep.service.web.highlight import sass_lines, source_lines
from mlaprep.service.web.pages import with_query
from mlaprep.service.web.shell import PageRoute, page
from mlaprep.templates.arch import ARCHS, DEFAULT_ARCHS, Arch
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.spec import parse_variant_id

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_ROWS: Final = 50
_VARIANTS: Final = (
    choice("model", tuple(PRESETS), "variants of this preset's shape only"),
    choice("arch", tuple(map(str, ARCHS)), "one architecture only"),
    choice("state", STATES, "architectures in this state only"),
    choice("layout", LAYOUTS, "this cache layout only"),
    integer("num_heads", 1, 256, "this many query heads on a rank only"),
    choice("sort", SORTS, "small shapes first, or the largest figure"),
    integer("limit", 1, 500, "variants on a page"),
    QueryParameter("cursor", {}, "where the page starts", "a variant id", parse_variant_id),
)
_VARIANT: Final = (
    choice("arch", tuple(map(str, ARCHS)), "the architecture that is shown"),
    choice("view", ("source", "sass"), "what is shown of it"),
)
_SHOWN: Final = ("compiler", "store", "counters")
_FILTERS: Final = ("model", "arch", "state", "layout", "num_heads")


@router.get("/", dependencies=[require("read")])
async def show_variants(request: Request) -> Response:
    """The matrix of variants and architectures."""
    if (clean := _without_empty(request)) is not None:
        return clean
    values = read_query(request, *_VARIANTS)
    service = service_of(request)
    found = await in_thread(_variants_page, service.catalog, values, limiter=service.reading)
    values["cursor"] = values["cursor"] and values["cursor"].variant_id
    return page(
        request,
        "/",
        "variants",
        values=values,
        filtered=any(values[name] is not None for name in _FILTERS),
        models=tuple(PRESETS),
        known_archs=tuple(map(str, service.known_archs())),
        states=STATES,
        layouts=LAYOUTS,
        sorts=SORTS,
        **found,
    )


@router.get("/variants/{variant_id}", dependencies=[require("read")])
async def show_variant(request: Request, variant_id: str) -> Response:
    """One variant: its state on every architecture, and its kernel on one of them."""
    values = read_query(request, *_VARIANT)
    spec = parse_variant_id(variant_id)
    service = service_of(request)
    variant = await in_thread(service.catalog.variant, spec, service.known_archs(), limiter=service.reading)
    chosen = _chosen(variant, values["arch"])
    found = await in_thread(_kernel, service, variant, chosen, values["view"], limiter=service.reading)
    if found["artifact"] is not None and values["view"] == "sass":
        found |= await _machine_code(request, found["artifact"])
    origin = _origin(request)
    return page(
        request,
        "/",
        "variant",
        variant=variant,
        variant_id=variant_id,
        chosen=chosen,
        asked=values["arch"],
        view=values["view"],
        path=f"/variants/{variant_id}",
        cells=[cell for cell in _by_age(variant.archs) if _is_of_interest(cell) or cell is chosen],
        others=[cell.arch for cell in _by_age(variant.archs) if not _is_of_interest(cell) and cell is not chosen],
        building=any(cell.state == "building" for cell in variant.archs),
        origin=origin,
        snippets=() if chosen is None else _snippets(origin, variant_id, str(chosen.arch)),
        signs=service.signing_key is not None,
        **found,
    )


@router.get("/warmups", dependencies=[require("read")])
async def show_warmups(request: Request) -> Response:
    """Warm-up jobs, and a form to start one."""
    limit = read_query(request, integer("limit", 1, MAX_JOBS, "jobs on the page", default=_ROWS))["limit"]
    service = service_of(request)
    jobs = await in_thread(service.jobs.store.list, limiter=service.reading)
    return page(
        request,
        "/warmups",
        "warmups",
        jobs=jobs[:limit],
        more=max(0, len(jobs) - limit),
        presets=PRESETS.values(),
        degrees=sorted({degree for preset in PRESETS.values() for degree in preset.tp_degrees}),
        archs=service.known_archs(),
        default_archs=DEFAULT_ARCHS,
        origin=_origin(request),
    )


@router.get("/warmups/{job_id}", dependencies=[require("read")])
async def show_warmup(request: Request, job_id: str) -> Response:
    """One job as it goes on, with what could not be built."""
    read_query(request)
    job = await find_job(service_of(request), job_id)
    plan: dict[str, list[str]] = {str(arch): [] for arch in ARCHS}
    for entry in job.plan.get("kernels", ()):
        for arch in entry["arch"]:
            plan.setdefault(arch, []).append(entry["variant_id"])
    return page(request, "/warmups", "warmup", job=job, plan=plan)


@router.get("/misses", dependencies=[require("read")])
async def show_misses(request: Request) -> Response:
    """What workers asked for and lacked."""
    if (clean := _without_empty(request)) is not None:
        return clean
    values = read_query(request, *MISSES_PARAMETERS)
    service = service_of(request)
    found = await in_thread(_misses_page, service, values, limiter=service.reading)
    values["cursor"] = request.query_params.get("cursor")
    values["limit"] = request.query_params.get("limit")
    archs = tuple(map(str, service.known_archs()))
    return page(request, "/misses", "misses", values=values, known_archs=archs, origin=_origin(request), **found)


@router.get("/status", dependencies=[require("read")])
async def show_status(request: Request) -> Response:
    """What /readyz says, for people."""
    read_query(request)
    service = service_of(request)
    if not service.settings.read_only:
        service.compiler.start()
    document = await in_thread(ready_document, service, request.app.state.drain.began)
    more = {name: part for name, part in document.items() if isinstance(part, dict) and name not in _SHOWN}
    return page(request, "/status", "status", document=document, more=more, archs=service.known_archs())


@router.get(PREFIX + "{name}", dependencies=[open_to_all()])
async def get_asset(request: Request, name: str) -> Response:
    """A file whose URL names its content, so caches may keep it for ever."""
    read_query(request)
    found = find_asset(name)
    if found is None:
        raise ProblemError(404, "not-found", "No such file", "Load the page again: it names the files of this release.")
    asset, exact = found
    headers = {"cache-control": "public, max-age=31536000, immutable" if exact else "no-store"}
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _variants_page(catalog: Catalog, values: dict[str, Any]) -> dict[str, Any]:
    arch = None if values["arch"] is None else Arch(values["arch"])
    wanted = Filter(
        arch=arch,
        model=values["model"],
        num_heads=values["num_heads"],
        layout=values["layout"],
        state=values["state"],
        after=values["cursor"],
    )
    found = catalog.page(wanted, values["limit"] or _ROWS, values["sort"] or "shape")
    cells = [cell for variant in found.variants for cell in variant.archs]
    columns = {cell.arch for cell in cells}
    if arch is None and wanted.state is None:
        columns |= set(DEFAULT_ARCHS)
    archs = [str(known) for known in ARCHS if known in columns]
    return {
        "page": found,
        "rows": [_row(variant, archs) for variant in found.variants],
        "archs": archs,
        "any_built": any(cell.manifest is not None for cell in cells),
        "building": any(cell.state == "building" for cell in cells),
        "next_cursor": found.variants[-1].spec.variant_id if found.total > len(found.variants) else None,
    }


def _misses_page(service: Service, values: dict[str, Any]) -> dict[str, Any]:
    arch = None if values["arch"] is None else Arch(values["arch"])
    found = service.misses.page(values["order"] or "count", values["limit"], arch, values["cursor"])
    states = service.catalog.states((spec, arch) for spec, arch, _ in found.misses)
    rows = [
        {"variant_id": spec.variant_id, "arch": str(arch), "models": models_of(spec), "miss": miss, "state": state}
        for (spec, arch, miss), state in zip(found.misses, states, strict=True)
    ]
    return {"misses": found, "rows": rows, "next_cursor": found.next and write_cursor(found.next)}


def _origin(request: Request) -> str:
    """The address that this service was asked under."""
    return str(request.base_url).rstrip("/")


def _row(variant: Variant, archs: list[str]) -> dict[str, Any]:
    known = {str(cell.arch): cell for cell in variant.archs}
    cells: dict[str, VariantArch | None] = {arch: known.get(arch) for arch in archs}
    return {"variant_id": variant.spec.variant_id, "models": variant.models, "cells": cells}


def _by_age(cells: Iterable[VariantArch]) -> list[VariantArch]:
    """The oldest architecture first, as everywhere."""
    return sorted(cells, key=lambda cell: ARCHS.index(cell.arch))


def _is_of_interest(cell: VariantArch) -> bool:
    """Whether a page shows it where nobody asked for it."""
    return cell.state != "missing" or cell.arch in DEFAULT_ARCHS


def _chosen(variant: Variant, arch: str | None) -> VariantArch | None:
    """The architecture that was asked for, else the first that is built, else the first."""
    cells = [cell for cell in _by_age(variant.archs) if arch is None or str(cell.arch) == arch]
    return next((cell for cell in cells if cell.manifest is not None), cells[0] if cells else None)


def _kernel(service: Service, variant: Variant, chosen: VariantArch | None, view: str | None) -> dict[str, Any]:
    """The kernel of a page, read from the store without counting as a hit; or what revokes it."""
    artifact = revoked = None
    if chosen is not None and chosen.manifest is not None:
        artifact = service.store.get(chosen.manifest.key)
    elif chosen is not None:
        key = service.builder.serving_key(variant.spec, chosen.arch)
        revoked = key and service.builder.revocations.find(key=key)
    lines = source_lines(artifact.source) if artifact is not None and view == "source" else ()
    return {"artifact": artifact, "revoked": revoked, "lines": lines, "inspection": None, "refusal": ""}


async def _machine_code(request: Request, artifact: KernelArtifact) -> dict[str, Any]:
    try:
        inspection = await inspect_kernel(request, artifact)
    except InspectError as error:
        return {"refusal": str(error)}
    return {"inspection": inspection, "lines": sass_lines(inspection.listing.text())}


def _snippets(origin: str, variant_id: str, arch: str) -> tuple[tuple[str, str], ...]:
    """Lines of Python that load a kernel, and what their buttons are called."""
    load = f'handle = KernelClient("{origin}").load("{variant_id}", arch="{arch}")'
    name = f"{variant_id.replace('-', '_')}_{arch}"
    return (
        (f"from mlaprep.clients import KernelClient\n{load}", "Copy the lines that load it from this service"),
        (f"from mlaprep.clients.kernels import {name}", "Copy the line that imports it by its name"),
    )


def _without_empty(request: Request) -> Response | None:
    """To the same page without the fields that a form sent empty, so that its URL says what it shows."""
    given = request.query_params.multi_items()
    if all(text for _, text in given):
        return None
    return RedirectResponse(with_query(request.url.path, {name: text for name, text in given if text}), 303)
