"""/v1/kernels/…/builds and …/diff: what the store holds of a variant, and how two builds differ."""

import re
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.auth import require
from mlaprep.service.build_schemas import BuildsReply, DiffReply
from mlaprep.service.builds import builds_of, compare, find_build
from mlaprep.service.parameters import QueryParameter, read_query
from mlaprep.service.problems import ProblemError
from mlaprep.service.routes.documentation import ArchPath, VariantPath, problems, query
from mlaprep.service.routes.inspection import few_at_once
from mlaprep.service.routes.kernels import find_kernel
from mlaprep.service.schemas import DIGEST
from mlaprep.service.state import Service, in_thread, json_response, service_of

router = APIRouter(prefix="/v1/kernels", tags=["kernels"])

_PREFIX: Final = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


def _digest(name: str, description: str) -> QueryParameter:
    def read(text: str) -> str:
        if not _PREFIX.fullmatch(text):
            raise ValueError
        return text

    schema = {"type": "string", "pattern": "^[0-9a-f]{8,64}$"}
    return QueryParameter(name, schema, description, "8 to 64 lower-case hexadecimal digits", read, example=DIGEST[:12])


_SIDES: Final = (
    _digest("from", "the build before: its cubin's sha256, or the first 8 digits or more of it"),
    _digest("to", "the build after, in the same way"),
)


@router.get(
    "/{arch}/{variant_id}/builds",
    dependencies=[require("read")],
    summary="Every build of a variant in the store",
    response_model=BuildsReply,
    responses=problems(422),
    openapi_extra=query(),
)
async def get_builds(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """The latest first, those of other releases and other compilers too; empty where there is none."""
    read_query(request)
    service = service_of(request)
    spec, target = service.parse_target(arch, variant_id)
    found = await in_thread(builds_of, service.builder, spec, target, limiter=service.reading)
    return json_response({"builds": [build.to_dict() for build in found]})


@router.get(
    "/{arch}/{variant_id}/diff",
    dependencies=[require("read")],
    summary="How two builds differ",
    response_model=DiffReply,
    responses=problems(404, 409, 410, 422, 503),
    openapi_extra=query(*_SIDES),
)
async def get_diff(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Each side is any build in the store, of this variant or another, and by default the one of the path.

    So `?from=` alone tells what became of an older build, and both compare any two, also across architectures.
    """
    wanted = read_query(request, *_SIDES)
    service = service_of(request)
    service.parse_target(arch, variant_id)

    async def side(name: str) -> KernelArtifact:
        given: str | None = wanted[name]
        return await find_kernel(service, arch, variant_id) if given is None else await _find(service, name, given)

    return json_response(await few_at_once(request, compare, await side("from"), await side("to")))


async def _find(service: Service, name: str, prefix: str) -> KernelArtifact:
    artifact = await in_thread(find_build, service.builder, prefix, limiter=service.reading)
    if artifact is None:
        raise ProblemError(
            404,
            "artifact-not-found",
            "No artifact has this digest",
            f"`{name}` names no build in the store; …/builds lists those of a variant.",
        )
    return artifact
