"""What every route says of itself in the OpenAPI document."""

from typing import Annotated, Any, Final

from fastapi import Path

from mlaprep.service.parameters import QueryParameter
from mlaprep.service.problems import MEDIA_TYPE, TYPE_PREFIX
from mlaprep.service.schemas import ARCH, DIGEST, KEY, VARIANT_ID, ProblemReply
from mlaprep.templates.arch import ARCHS
from mlaprep.templates.schema import variant_id_json_schema

_TITLES: Final = {
    401: "no token, or none that holds",
    403: "the token has another scope, or the service does not allow this",
    404: "not built, or no such resource",
    409: "a prefix that fits several kernels, or a warm-up that is not finished",
    410: "revoked: not given out, and not built again under its key",
    413: "a body above the limit",
    415: "a body that is not application/json",
    422: "a value that is not allowed; every field at fault is named",
    429: "too many kernels wait for a compiler, or too many warm-ups for their turn",
    503: "the tool that this needs is missing or died; Retry-After says when to ask again, where that may help",
    504: "the compile passed its deadline",
}

ArchPath = Annotated[
    str,
    Path(
        description="architecture, exactly as spelled: the suffix matters",
        examples=[str(ARCH)],
        json_schema_extra={"enum": [str(arch) for arch in ARCHS]},
    ),
]
VariantPath = Annotated[
    str,
    Path(
        description="variant id, the name of a kernel specification",
        examples=[VARIANT_ID],
        json_schema_extra=variant_id_json_schema(),
    ),
]
DigestPath = Annotated[
    str,
    Path(
        description="sha256 of a cubin; its first 8 digits or more redirect to it where they fit one only",
        examples=[DIGEST],
        json_schema_extra={"pattern": "^[0-9a-f]{8,64}$"},
    ),
]
KeyPath = Annotated[
    str,
    Path(description="key of a kernel", examples=[KEY], json_schema_extra={"pattern": "^[0-9a-f]{64}$"}),
]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses that are problem details."""
    return {status: {"description": _TITLES[status], "content": _content(status)} for status in statuses}


def query(*parameters: QueryParameter, **more: Any) -> dict[str, Any]:
    """Additions to an operation: its query parameters and whatever else it has."""
    return {"parameters": [parameter.openapi() for parameter in parameters], **more}


def _content(status: int) -> dict[str, Any]:
    example = {"type": f"{TYPE_PREFIX}...", "title": _TITLES[status], "status": status, "detail": "..."}
    return {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemReply.__name__}"}, "example": example}}
