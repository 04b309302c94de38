"""/v1/variants: what there is, and how far it is on every architecture."""

from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.service.auth import require
from mlaprep.service.catalog import SORTS, STATES, Catalog, Filter, Sort, Variant, VariantArch
from mlaprep.service.parameters import QueryParameter, choice, integer, read_query
from mlaprep.service.routes.documentation import VariantPath, problems, query
from mlaprep.service.schemas import ARCH, VARIANT_ID, VariantReply, VariantsReply
from mlaprep.service.state import in_thread, json_response, service_of
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.schema import spec_json_schema, variant_id_json_schema
from mlaprep.templates.spec import parse_variant_id

router = APIRouter(prefix="/v1/variants", tags=["variants"])

LAYOUTS: Final = tuple(spec_json_schema()["properties"]["layout"]["anyOf"][0]["enum"])
_CURSOR: Final = QueryParameter(
    "cursor",
    variant_id_json_schema(),
    "next_cursor of the page before, with the same filters and sort",
    "next_cursor of the page before, a variant id",
    parse_variant_id,
    example=VARIANT_ID,
)
_PARAMETERS: Final = (
    choice("arch", tuple(map(str, ARCHS)), "one architecture only", str(ARCH)),
    choice("model", tuple(PRESETS), "variants of this preset's shape only", "kimi-k3"),
    integer("num_heads", 1, 256, "this many query heads on a rank only", example=12),
    integer("kv_lora_rank", 1, 65536, "this width of the latent rows only", example=512),
    integer("tp", 1, 1024, "variants of a preset, or of `model`, at this tensor-parallel degree only", example=8),
    choice("layout", LAYOUTS, "this cache layout only", "fp8"),
    choice("state", STATES, "architectures in this state only", "built"),
    choice("sort", SORTS, "small shapes first (default), or the largest figure on any architecture shown", "hits"),
    integer("limit", 1, 500, "variants on a page", default=100, example=20),
    _CURSOR,
)


@router.get(
    "",
    dependencies=[require("read")],
    summary="Variants with their state on each architecture",
    response_model=VariantsReply,
    responses=problems(422, 503),
    openapi_extra=query(*_PARAMETERS),
)
async def list_variants(request: Request) -> Response:
    """Those of the presets, and every one that is built, being built or refused by the compiler.

    ``hits`` and ``last_use`` are those of the process that answers, since it started.
    """
    values = read_query(request, *_PARAMETERS)
    wanted = Filter(
        arch=None if values["arch"] is None else Arch(values["arch"]),
        model=values["model"],
        num_heads=values["num_heads"],
        kv_lora_rank=values["kv_lora_rank"],
        tp=values["tp"],
        layout=values["layout"],
        state=values["state"],
        after=values["cursor"],
    )
    service = service_of(request)
    sort: Sort = values["sort"] or "shape"
    page = await in_thread(_page, service.catalog, wanted, values["limit"], sort, limiter=service.reading)
    return json_response(page)


@router.get(
    "/{variant_id}",
    dependencies=[require("read")],
    summary="One variant on every architecture",
    response_model=VariantReply,
    responses=problems(422, 503),
    openapi_extra=query(),
)
async def get_variant(request: Request, variant_id: VariantPath) -> Response:
    """Also for a variant that nobody has built yet."""
    read_query(request)
    spec = parse_variant_id(variant_id)
    service = service_of(request)
    variant = await in_thread(service.catalog.variant, spec, service.known_archs(), limiter=service.reading)
    return json_response(_variant(variant))


def _page(catalog: Catalog, wanted: Filter, limit: int, sort: Sort) -> dict[str, Any]:
    page = catalog.page(wanted, limit, sort)
    more = page.total > len(page.variants)
    return {
        "variants": [_variant(variant) for variant in page.variants],
        "total": page.total,
        "next_cursor": page.variants[-1].spec.variant_id if more else None,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    return {
        "variant_id": variant.spec.variant_id,
        "spec": variant.spec.to_dict(),
        "models": list(variant.models),
        "archs": [_row(row) for row in variant.archs],
    }


def _row(row: VariantArch) -> dict[str, Any]:
    built = row.manifest
    return {
        "arch": str(row.arch),
        "state": row.state,
        "size": built and built.cubin_size,
        "registers": built and built.registers,
        "spill_stores": built and built.spill_stores,
        "spill_loads": built and built.spill_loads,
        "stack_bytes": built and built.stack_bytes,
        "shared_bytes": built and built.shared_bytes,
        "digest": built and built.cubin_sha256,
        "nvrtc_version": built and built.nvrtc_version,
        "compile_ms": built and built.compile_ms,
        "created_at": built and built.created_at,
        "hits": row.use.count if row.use else 0,
        "last_use": _utc(row.use.last) if row.use else None,
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
