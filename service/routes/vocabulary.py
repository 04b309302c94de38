"""/v1/presets and /v1/archs: the models and the targets there are."""

import functools
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.service.auth import require
from mlaprep.service.errors import BuildError
from mlaprep.service.parameters import read_query
from mlaprep.service.routes.documentation import problems, query
from mlaprep.service.schemas import ArchsReply, PresetsReply
from mlaprep.service.state import json_response, service_of
from mlaprep.service.toolchain import buildable_archs
from mlaprep.templates.arch import ARCHS, DEFAULT_ARCHS
from mlaprep.templates.presets import PRESETS

router = APIRouter(prefix="/v1", tags=["vocabulary"])


@router.get(
    "/presets",
    dependencies=[require("read")],
    summary="Known models",
    response_model=PresetsReply,
    responses=problems(422),
    openapi_extra=query(),
)
async def list_presets(request: Request) -> Response:
    """Their shapes, and the default variant at each tensor-parallel degree."""
    read_query(request)
    return json_response(_presets())


@functools.cache  # 6 ms of a core, and the same as long as the process runs
def _presets() -> dict[str, Any]:
    presets = []
    for name, preset in PRESETS.items():
        specs = {tp: preset.spec(tp) for tp in preset.tp_degrees}
        variants = [
            {"tp": tp, "num_heads": spec.num_heads, "variant_id": spec.variant_id} for tp, spec in specs.items()
        ]
        presets.append(
            {
                "name": name,
                "num_heads": preset.num_heads,
                "kv_lora_rank": preset.kv_lora_rank,
                "rope_dim": preset.rope_dim,
                "rope": preset.rope,
                "layout": preset.layout,
                "variants": variants,
            }
        )
    return {"presets": presets}


@router.get(
    "/archs",
    dependencies=[require("read")],
    summary="Known architectures",
    response_model=ArchsReply,
    responses=problems(422),
    openapi_extra=query(),
)
async def list_archs(request: Request) -> Response:
    """The allow-list, and which of it the compiler of this service builds."""
    read_query(request)
    service = service_of(request)
    toolchain = service.compiler.known_toolchain
    if toolchain is None and not service.settings.read_only:
        try:
            toolchain = await service.toolchain()
        except BuildError:
            toolchain = None
    buildable = None if toolchain is None else buildable_archs(toolchain)
    archs = [
        {
            "name": str(arch),
            "capability": "{}.{}".format(*arch.capability),
            "pdl": arch.supports_pdl,
            "default": arch in DEFAULT_ARCHS,
            "buildable": None if buildable is None else arch in buildable,
        }
        for arch in ARCHS
    ]
    return json_response({"nvrtc_version": toolchain and toolchain.version, "archs": archs})
