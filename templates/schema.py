"""The JSON Schema of a specification's document."""

from dataclasses import fields
from typing import Any

from mlaprep.templates.fields import CHOICES, DYNAMIC, FLAGS, MAX_STRIDE, RANGES, SIZES, allowed_values
from mlaprep.templates.spec import KernelSpec


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
