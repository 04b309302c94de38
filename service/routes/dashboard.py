"""/: the dashboard, pages for people. They read without JavaScript; it adds progress and what changes something."""

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mlaprep.service.catalog import STATES, Catalog, Filter, Variant, VariantArch
from mlaprep.service.parameters import QueryParameter, choice, integer, read_query
from mlaprep.service.problems import ProblemError
from mlaprep.service.routes.variants import LAYOUTS
from mlaprep.service.state import in_thread, service_of
from mlaprep.service.web.assets import PREFIX, find_asset
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
    integer("limit", 1, 500, "variants on a page"),
    QueryParameter("cursor", {}, "where the page starts", "a variant id", parse_variant_id),
)
_FILTERS: Final = ("model", "arch", "state", "layout", "num_heads")


@router.get("/")
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
        **found,
    )


@router.get(PREFIX + "{name}")
async def get_asset(request: Request, name: str) -> Response:
    """A file whose URL names its content, so caches may keep it for ever."""
    read_query(request)
    asset = find_asset(name)
    if asset is None:
        raise ProblemError(404, "not-found", "No such file", "Load the page again: it names the files of this release.")
    headers = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
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
    found = catalog.page(wanted, values["limit"] or _ROWS)
    cells = [cell for variant in found.variants for cell in variant.archs]
    columns = {cell.arch for cell in cells} | (set(DEFAULT_ARCHS) if arch is None else {arch})
    archs = [str(known) for known in ARCHS if known in columns]
    return {
        "page": found,
        "rows": [_row(variant, archs) for variant in found.variants],
        "archs": archs,
        "any_built": any(cell.manifest is not None for cell in cells),
        "building": any(cell.state == "building" for cell in cells),
        "next_cursor": found.variants[-1].spec.variant_id if found.total > len(found.variants) else None,
    }


def _row(variant: Variant, archs: list[str]) -> dict[str, Any]:
    known = {str(cell.arch): cell for cell in variant.archs}
    cells: dict[str, VariantArch | None] = {arch: known.get(arch) for arch in archs}
    return {"variant_id": variant.spec.variant_id, "models": variant.models, "cells": cells}


def _without_empty(request: Request) -> Response | None:
    """To the same page without the fields that a form sent empty, so that its URL says what it shows."""
    given = request.query_params.multi_items()
    if all(text for _, text in given):
        return None
    return RedirectResponse(with_query(request.url.path, {name: text for name, text in given if text}), 303)
