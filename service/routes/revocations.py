"""Kernels that must not be used any more: revoked, listed, lifted."""

import re
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.revocation import MAX_REASON, is_reason, revocations_digest
from mlaprep.service.auth import require
from mlaprep.service.parameters import QueryParameter, read_query
from mlaprep.service.problems import ProblemError, invalid_fields
from mlaprep.service.revoking import revoke
from mlaprep.service.routes.artifacts import not_modified
from mlaprep.service.routes.documentation import ArchPath, KeyPath, VariantPath, problems, query
from mlaprep.service.routes.kernels import not_built
from mlaprep.service.schemas import KEY, RevocationReply, RevocationsReply, RevokedReply
from mlaprep.service.state import Service, in_thread, json_response, service_of
from mlaprep.templates.errors import FieldProblem

router = APIRouter(prefix="/v1", tags=["revocations"])

_KEY: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def _read_reason(text: str) -> str:
    if not is_reason(text):
        raise ValueError
    return text


def _read_key(text: str) -> str:
    if not _KEY.fullmatch(text):
        raise ValueError
    return text


_REASON: Final = QueryParameter(
    "reason",
    {"type": "string", "format": "printable-text", "minLength": 1, "maxLength": MAX_REASON},
    "why, for whoever meets the refusal",
    f"1 to {MAX_REASON} printable characters",
    _read_reason,
    default="no reason given",
    example="wrong results at 129 tokens",
)
_BUILD: Final = QueryParameter(
    "key",
    {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "another build of the variant that the store holds, by its key",
    "a key of 64 lower-case hexadecimal digits",
    _read_key,
    example=KEY,
)


@router.delete(
    "/kernels/{arch}/{variant_id}",
    dependencies=[require("admin")],
    summary="Revoke a kernel",
    response_model=RevokedReply,
    responses=problems(404, 422, 503),
    openapi_extra=query(_REASON, _BUILD),
)
async def delete_kernel(request: Request, arch: ArchPath, variant_id: VariantPath) -> Response:
    """Remove it, and never give it out or build it again under its key. Idempotent.

    Workers learn of it the next time they ask for kernels, and refuse what they hold on disk.
    """
    service = service_of(request)
    _require_changes(service)
    values = read_query(request, _REASON, _BUILD)
    spec, target = service.parse_target(arch, variant_id)
    revoked = await in_thread(revoke, service.builder, spec, target, values["reason"], values["key"])
    if revoked is None:
        raise not_built(target)
    return json_response({"revocation": revoked.to_dict()})


@router.get(
    "/revocations",
    dependencies=[require("read")],
    summary="Kernels that are revoked",
    response_model=RevocationsReply,
    responses={304: {"description": "the caller has the list already"}, **problems(422)},
    openapi_extra=query(),
)
async def list_revocations(request: Request) -> Response:
    """All of them at once, with the list's digest as ETag: workers ask for it again and again."""
    read_query(request)
    revocations = await in_thread(service_of(request).builder.revocations.list)
    tag = revocations_digest(revocations)
    headers = {"etag": f'"{tag}"'}
    if not_modified(request, tag):
        return Response(status_code=304, headers=headers | {"cache-control": "no-cache"})
    return json_response({"revocations": [each.to_dict() for each in revocations]}, headers=headers)


@router.delete(
    "/revocations/{key}",
    dependencies=[require("admin")],
    summary="Lift a revocation",
    response_model=RevocationReply,
    responses=problems(404, 422, 503),
    openapi_extra=query(),
)
async def delete_revocation(request: Request, key: KeyPath) -> Response:
    """Let the kernel of a key be built and used again. What was lifted is in the reply."""
    service = service_of(request)
    _require_changes(service)
    read_query(request)
    if not is_digest(key):
        raise invalid_fields([FieldProblem("key", "a string that is no key", _BUILD.allowed)])
    lifted = await in_thread(service.builder.revocations.lift, key)
    if lifted is None:
        raise ProblemError(404, "not-revoked", "No such revocation", "No kernel of this key is revoked.")
    return json_response(lifted.to_dict())


def _require_changes(service: Service) -> None:
    if service.settings.read_only:
        raise ProblemError(
            403, "building-disabled", "This service changes nothing", "It is read-only; ask one that builds."
        )
