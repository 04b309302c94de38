"""/v1/kernels: one kernel by architecture and variant."""

import base64
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.auth import require
from mlaprep.service.body import plain_name, read_json
from mlaprep.service.builder import Built
from mlaprep.service.parameters import flag, read_query
from mlaprep.service.problems import ProblemError, invalid_fields
from mlaprep.service.request_schemas import spec_body
from mlaprep.service.routes.artifacts import not_modified
from mlaprep.service.routes.documentation import ArchPath, VariantPath, problems, query
from mlaprep.service.schemas import KernelReply
from mlaprep.service.state import Service, json_response, service_of
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem
from mlaprep.templates.spec import KernelSpec

router = APIRouter(prefix="/v1/kernels", tags=["kernels"])

_INLINE = flag("inline", "put the cubin and its source into the reply, so that one round trip is enough")


@router.get(
    "/{arch}/{variant_id}",
    dependencies=[require("read")],
    summary="A kernel that is built",
    response_model=KernelReply,
    response_model_exclude_none=True,
    responses=problems(404, 410, 422),
    openapi_extra=query(_INLINE),
)
async def get_kernel(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """The manifest. Never compiles: a kernel that is not built is a 404."""
    service = service_of(request)
    inline = read_query(request, _INLINE)["inline"]
    built = Built(await find_kernel(service, arch, variant_id), cached=True)
    return json_response(_document(service, built, inline=inline))


@router.put(
    "/{arch}/{variant_id}",
    dependencies=[require("build")],
    summary="Get a kernel, compiling it if need be",
    response_model=KernelReply,
    response_model_exclude_none=True,
    responses={
        201: {"model": KernelReply, "description": "compiled for this request"},
        **problems(410, 413, 415, 422, 429, 503, 504),
    },
    openapi_extra=query(_INLINE, requestBody=spec_body()),
)
async def put_kernel(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Idempotent: whoever asks first has it compiled, all others wait for that, or find it built (200)."""
    service = service_of(request)
    inline = read_query(request, _INLINE)["inline"]
    spec, target = service.parse_target(arch, variant_id)
    _require_same_spec(await read_json(request), spec)
    if service.settings.read_only:
        artifact = await service.find(spec, target)
        if artifact is None:
            raise ProblemError(
                403, "building-disabled", "This service builds nothing", "It is read-only; ask one that builds."
            )
        built = artifact
    else:
        built = await service.build(spec, target)
    return json_response(_document(service, built, inline=inline), 200 if built.cached else 201)


@router.get(
    "/{arch}/{variant_id}/source",
    dependencies=[require("read")],
    summary="The source a kernel was compiled from",
    response_class=Response,
    responses={
        200: {"description": "CUDA C++", "content": {"text/plain": {"schema": {"type": "string"}}}},
        304: {"description": "the caller has it already"},
        **problems(404, 410, 422),
    },
)
async def get_source(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Plain text, with its sha256 as ETag. A kernel that is not built is a 404."""
    read_query(request)
    artifact = await find_kernel(service_of(request), arch, variant_id)
    headers = {"etag": f'"{artifact.manifest.source_sha256}"', "cache-control": "no-cache"}
    if not_modified(request, artifact.manifest.source_sha256):
        return Response(status_code=304, headers=headers)
    return Response(artifact.source, headers=headers, media_type="text/plain; charset=utf-8")


async def find_kernel(service: Service, arch: str, variant_id: str) -> KernelArtifact:
    """The kernel that a path names, never compiled for it.

    Raises:
        SpecError: no such variant or architecture.
        ProblemError: 404, it is not built.
        KernelRevoked: it is not to be used.
    """
    spec, target = service.parse_target(arch, variant_id)
    built = await service.find(spec, target)
    if built is None:
        raise not_built(target)
    return built.artifact


def not_built(arch: Arch) -> ProblemError:
    """404 for a kernel that the store lacks."""
    return ProblemError(
        404,
        "kernel-not-built",
        "The kernel is not built",
        f"There is none for {arch} yet; PUT the same path to build it.",
    )


def _require_same_spec(body: Any, spec: KernelSpec) -> None:
    """Refuse a body that says anything else than the path does.

    Raises:
        ProblemError: the body is no object, or has other members than ``spec``.
        SpecError: a ``spec`` that is not valid.
    """
    if body is None:
        return
    if not isinstance(body, dict):
        raise invalid_fields([FieldProblem("body", "no JSON object", 'an object with "spec", or no body')])
    unknown = [plain_name(name) for name in body if name != "spec"]
    if unknown:
        raise invalid_fields([FieldProblem(name, "an unknown field", "spec") for name in unknown])
    if "spec" in body and KernelSpec.from_dict(body["spec"]) != spec:
        raise invalid_fields([FieldProblem("spec", "a spec of another variant", spec.variant_id)], "invalid-spec")


def _document(service: Service, built: Built, *, inline: bool) -> dict[str, Any]:
    artifact = built.artifact
    document: dict[str, Any] = {"manifest": service.signed(artifact.manifest).to_dict(), "cached": built.cached}
    if inline:
        document["cubin_base64"] = base64.b64encode(artifact.cubin).decode()
        document["source"] = artifact.source
    return document
