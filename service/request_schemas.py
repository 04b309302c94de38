"""Bodies of requests, for the service's OpenAPI document; what no JSON Schema can say, the routes decide."""

from collections.abc import Iterator, Sequence
from typing import Any

from mlaprep.service.schemas import ARCH, VARIANT_ID
from mlaprep.templates.arch import ARCHS
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.schema import spec_fields_json_schema, spec_json_schema, variant_id_json_schema


def shared_schemas() -> dict[str, Any]:
    """Schemas that several bodies refer to, for the document's components."""
    return {schema["title"]: schema for schema in (spec_json_schema(), spec_fields_json_schema())}


def _ref(title: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{title}"}


def spec_body() -> dict[str, Any]:
    """OpenAPI request body of a PUT."""
    schema = {
        "type": "object",
        "properties": {"spec": _ref("KernelSpec")},
        "additionalProperties": False,
    }
    return {
        "required": False,
        "description": "The variant in full, where a caller wants it checked against the path.",
        "content": {"application/json": {"schema": schema, "example": {"spec": {"num_heads": 12}}}},
    }


def plan_body(max_entries: int, max_kernels: int) -> dict[str, Any]:
    """OpenAPI request body of a warm-up plan."""
    name = {"type": "string", "enum": [*map(str, ARCHS), "all"]}
    archs = {"oneOf": [name, {"type": "array", "items": name, "minItems": 1}]}
    entries = [
        {
            "type": "object",
            "properties": members | {"arch": archs},
            "required": [next(iter(members))],
            "additionalProperties": False,
        }
        for members in (
            *_presets_by_degrees(),
            {"variant_id": variant_id_json_schema()},
            {"spec": _ref("KernelSpec")},
        )
    ]
    schema = {
        "type": "object",
        "properties": {
            "arch": archs,
            "kernels": {"type": "array", "items": {"oneOf": entries}, "maxItems": max_entries},
            "misses": {"type": "integer", "minimum": 0, "maximum": max_kernels},
        },
        "anyOf": [
            {"properties": {"kernels": {"minItems": 1}}, "required": ["kernels"]},
            {"properties": {"misses": {"minimum": 1}}, "required": ["misses"]},
        ],
        "additionalProperties": False,
    }
    example = {"arch": [str(ARCH)], "kernels": [{"preset": "kimi-k3", "tp": [8]}]}
    description = "which kernels to build: models, variants or specs, by architecture, and what workers lacked"
    content = {"application/json": {"schema": schema, "example": example}}
    return {"required": True, "description": description, "content": content}


def _presets_by_degrees() -> Iterator[dict[str, Any]]:
    """Members of an entry that names a preset, for those that are served at the same degrees."""
    by_degrees: dict[tuple[int, ...], list[str]] = {}
    for name, preset in PRESETS.items():
        by_degrees.setdefault(preset.tp_degrees, []).append(name)
    for degrees, names in by_degrees.items():
        degree = {"type": "integer", "enum": list(degrees)}
        degrees_of = {"oneOf": [degree, {"type": "array", "items": degree, "minItems": 1}, {"const": "all"}]}
        yield {"preset": {"type": "string", "enum": names}, "tp": degrees_of, "set": _ref("KernelSpecFields")}


def misses_body(reasons: Sequence[str], max_entries: int, max_count: int) -> dict[str, Any]:
    """OpenAPI request body of a report of misses."""
    entry = {
        "type": "object",
        "properties": {
            "variant_id": variant_id_json_schema(),
            "arch": {"type": "string", "enum": list(map(str, ARCHS))},
            "count": {"type": "integer", "minimum": 1, "maximum": max_count, "default": 1},
            "reason": {"type": "string", "enum": list(reasons), "default": reasons[0]},
        },
        "required": ["variant_id", "arch"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"misses": {"type": "array", "items": entry, "minItems": 1, "maxItems": max_entries}},
        "required": ["misses"],
        "additionalProperties": False,
    }
    example = {"misses": [{"variant_id": VARIANT_ID, "arch": str(ARCH), "count": 1, "reason": reasons[0]}]}
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}
