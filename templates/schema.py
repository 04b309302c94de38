"""The JSON Schemas of a specification: of its document, and of its name."""

from dataclasses import fields
from typing import Any, Final

from mlaprep.templates.fields import CHOICES, DYNAMIC, FLAGS, MAX_STRIDE, RANGES, SIZES, allowed_values
from mlaprep.templates.spec import MAX_VARIANT_ID, VARIANT_ID_PATTERN, KernelSpec

VARIANT_ID_FORMAT: Final = "variant-id"
"""Format of strings that :func:`parse_variant_id` reads: the pattern's grammar, and fields that go together."""


def variant_id_json_schema() -> dict[str, Any]:
    """JSON Schema of a variant id."""
    return {
        "type": "string",
        "format": VARIANT_ID_FORMAT,
        "maxLength": MAX_VARIANT_ID,
        "pattern": VARIANT_ID_PATTERN,
    }


def spec_json_schema() -> dict[str, Any]:
    """JSON Schema of a spec's document, as :meth:`KernelSpec.from_dict` accepts it."""
    properties: dict[str, Any] = {}
    for field in fields(KernelSpec):
        name = field.name
        if name in RANGES:
            low, high, multiple = RANGES[name]
            schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
            if multiple > 1:
                schema["multipleOf"] = multiple
        elif name in CHOICES:
            schema = {"type": "string", "enum": list(CHOICES[name])}
        elif name in SIZES:
            schema = {"type": "integer", "enum": list(SIZES[name])}
        elif name in FLAGS:
            schema = {"type": "boolean"}
        else:
            integer = {"type": "integer", "minimum": 0, "maximum": MAX_STRIDE}
            schema = {"anyOf": [{"const": DYNAMIC, "type": "string"}, integer]}
        if name != "num_heads":
            schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}
        schema["description"] = allowed_values(name)
        properties[name] = schema
    return {
        "type": "object",
        "title": "KernelSpec",
        "properties": properties,
        "required": ["num_heads"],
        "additionalProperties": False,
    }


def spec_fields_json_schema() -> dict[str, Any]:
    """JSON Schema of some of a spec's fields, as a plan sets them beside a preset."""
    return {
        "type": "object",
        "title": "KernelSpecFields",
        "properties": spec_json_schema()["properties"],
        "additionalProperties": False,
    }
