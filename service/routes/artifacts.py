"""/v1/artifacts: cubins by the digest of their bytes, which never change."""

import re
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.key import is_digest
from mlaprep.service.auth import require
from mlaprep.service.errors import KernelRevoked
from mlaprep.service.parameters import read_query
from mlaprep.service.problems import ProblemError, invalid_fields
from mlaprep.service.routes.documentation import DigestPath, problems
from mlaprep.service.state import Service, in_thread, service_of
from mlaprep.templates.errors import FieldProblem

router = APIRouter(prefix="/v1/artifacts", tags=["artifacts"])

_PREFIX: Final = re.compile(r"[0-9a-f]{8,63}", re.ASCII)
_ENTITY_TAG: Final = re.compile(r'(?:W/)?"([^"]*)"')


@router.get(
    "/{digest}",
    dependencies=[require("read")],
    summary="The bytes of a cubin",
    response_class=Response,
    responses={
        200: {
            "description": "an ELF file for the CUDA driver",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        304: {"description": "the caller has it already"},
        307: {"description": "a prefix that fits one cubin; Location has its whole digest"},
        **problems(404, 409, 410, 422),
    },
)
async def get_artifact(request: Request, digest: DigestPath) -> Response:
    """Verified against the digest before it is sent. May be kept for ever: a digest names the same bytes."""
    read_query(request)
    if not is_digest(digest):
        return await _redirect(service_of(request), digest)
    cubin = await in_thread(_unrevoked, service_of(request), digest)
    if cubin is None:
        raise _no_artifact()
    shared = "private" if service_of(request).settings.reads_need_token else "public"
    headers = {"etag": f'"{digest}"', "cache-control": f"{shared}, max-age=31536000, immutable"}
    if not_modified(request, digest):
        return Response(status_code=304, headers=headers)
    return Response(cubin, headers=headers, media_type="application/octet-stream")


def _unrevoked(service: Service, digest: str) -> bytes | None:
    """The cubin, if there is one. Raises KernelRevoked."""
    if (revoked := service.builder.revocations.find(digest=digest)) is not None:
        raise KernelRevoked(revoked)
    return service.store.get_blob(digest)


def not_modified(request: Request, tag: str) -> bool:
    """Whether ``If-None-Match`` holds this entity tag, by weak comparison, or ``*``."""
    given = ", ".join(request.headers.getlist("if-none-match")).strip()
    return given == "*" or tag in _ENTITY_TAG.findall(given)


async def _redirect(service: Service, prefix: str) -> Response:
    if not _PREFIX.fullmatch(prefix):
        allowed = "64 lower-case hexadecimal digits, or the first 8 or more of them"
        raise invalid_fields([FieldProblem("digest", "a string that is no digest", allowed)])
    digest = await in_thread(service.store.find_blob, prefix, limiter=service.reading)
    if digest is None:
        raise _no_artifact()
    return Response(status_code=307, headers={"location": f"/v1/artifacts/{digest}", "cache-control": "no-cache"})


def _no_artifact() -> ProblemError:
    detail = "It was evicted or never built; PUT /v1/kernels/{arch}/{variant_id} builds a kernel and tells its digest."
    return ProblemError(404, "artifact-not-found", "No artifact has this digest", detail)
