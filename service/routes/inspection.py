"""/v1/kernels/…/sass and …/resources: what a kernel was compiled to."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple, Unpack

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.auth import require
from mlaprep.service.inspect import Inspection, inspect
from mlaprep.service.parameters import read_query
from mlaprep.service.routes.artifacts import not_modified
from mlaprep.service.routes.documentation import ArchPath, VariantPath, problems
from mlaprep.service.routes.kernels import find_kernel
from mlaprep.service.schemas import ResourcesReply
from mlaprep.service.state import in_thread, json_response, service_of

router = APIRouter(prefix="/v1/kernels", tags=["kernels"])

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_AT_ONCE: Final = 2  # reading is open to all, and each disassembly takes a third of a second of a core


@router.get(
    "/{arch}/{variant_id}/sass",
    dependencies=[require("read")],
    summary="The machine code of a kernel",
    response_class=Response,
    responses={
        200: {"description": "one instruction a line", "content": {"text/plain": {"schema": {"type": "string"}}}},
        304: {"description": "the caller has it already"},
        **problems(404, 410, 422, 503),
    },
)
async def get_sass(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Plain text with labels, and kernel arguments by name. A kernel that is not built is a 404."""
    read_query(request)
    artifact = await find_kernel(service_of(request), arch, variant_id)
    tag = f"sass-{artifact.digest}"
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if not_modified(request, tag):
        return Response(status_code=304, headers=headers)
    found = await inspect_kernel(request, artifact)
    return Response(found.listing.text(), headers=headers, media_type="text/plain; charset=utf-8")


@router.get(
    "/{arch}/{variant_id}/resources",
    dependencies=[require("read")],
    summary="What a kernel takes",
    response_model=ResourcesReply,
    responses=problems(404, 410, 422, 503),
)
async def get_resources(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Registers, memory, code size and instructions by class, read off the cubin."""
    read_query(request)
    artifact = await find_kernel(service_of(request), arch, variant_id)
    found = await inspect_kernel(request, artifact)
    head = {"variant_id": found.name, "arch": str(found.arch), "digest": artifact.digest}
    return json_response(head | found.resources.to_dict())


async def inspect_kernel(request: Request, artifact: KernelArtifact) -> Inspection:
    """A kernel taken apart, as few at a time as the service takes; errors as for :func:`inspect`."""
    return await few_at_once(request, inspect, artifact)


async def few_at_once(request: Request, call: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """What starts a disassembler, in a thread, once no more than a few others run."""
    state = request.app.state
    if not hasattr(state, "disassemblies"):
        state.disassemblies = asyncio.Semaphore(_AT_ONCE)
    async with state.disassemblies:
        return await in_thread(call, *args)
