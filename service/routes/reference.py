"""/docs: the OpenAPI document as a page. It loads nothing from anywhere and runs no script."""

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Final

import jinja2
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mlaprep.service.auth import require
from mlaprep.service.parameters import read_query
from mlaprep.service.state import json_response

router = APIRouter()

_PAGE: Final = "reference.html.j2"
_MAX_DEPTH: Final = 8


@router.get("/docs", dependencies=[require("read")], include_in_schema=False, response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    """For people; programs read /openapi.json."""
    read_query(request)
    page = reference_page(request.app.openapi())
    return HTMLResponse(page, headers={"cache-control": "no-cache", "content-security-policy": _policy(page)})


@router.get("/openapi.json", dependencies=[require("read")], include_in_schema=False)
async def openapi(request: Request) -> Response:
    """For programs; people read /docs."""
    read_query(request)
    return json_response(request.app.openapi())


def _policy(page: str) -> str:
    """A Content-Security-Policy that allows the page's own stylesheet, by its digest, and nothing else."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def reference_page(document: dict[str, Any]) -> str:
    """HTML for an OpenAPI document: every call with its parameters, bodies, replies and examples."""
    schemas = document.get("components", {}).get("schemas", {})
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            call = {"id": operation["operationId"], "method": method.upper(), "path": path, "about": operation}
            call["bodies"] = _bodies(operation.get("requestBody", {}), schemas)
            call["replies"] = {
                status: {"about": reply.get("description", ""), "bodies": _bodies(reply, schemas)}
                for status, reply in sorted(operation.get("responses", {}).items())
            }
            groups.setdefault((operation.get("tags") or ["other"])[0], []).append(call)
    page = _environment().get_template(_PAGE)
    return page.render(info=document["info"], groups=groups, schemas=schemas, words=_words, reference=_referred)


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent.parent)
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _bodies(holder: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = []
    for media_type, content in holder.get("content", {}).items():
        schema = content.get("schema", {})
        example = content["example"] if "example" in content else _example(schema, schemas)
        shown = None if example is None else json.dumps(example, indent=2, ensure_ascii=False)
        bodies.append({"media_type": media_type, "schema": _reference(schema), "example": shown})
    return bodies


def _example(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """A value of a schema, made of the examples of its members; None where there are none."""
    if depth > _MAX_DEPTH:
        return None
    if name := _reference(schema):
        return _example(schemas.get(name, {}), schemas, depth + 1)
    if schema.get("examples"):
        return schema["examples"][0]
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "properties" in schema:
        return {name: _example(member, schemas, depth + 1) for name, member in schema["properties"].items()}
    if schema.get("type") == "array":
        item = _example(schema.get("items", {}), schemas, depth + 1)
        return [] if item is None else [item]
    return True if schema.get("type") == "boolean" else None


def _reference(schema: dict[str, Any]) -> str:
    """The name of the schema that this one refers to, "" where it stands for itself."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _referred(schema: dict[str, Any]) -> str:
    """The schema that a member holds, alone or in an array."""
    return _reference(schema) or _reference(schema.get("items", {}))


def _words(schema: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if name := _reference(schema):
        return name
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_words(choice) for choice in choices))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        return f"array of {_words(schema.get('items', {}))}"
    bounds = {"minimum": "from", "maximum": "to", "minLength": "from length", "maxLength": "up to length"}
    limits = [f"{word} {schema[name]}" for name, word in bounds.items() if name in schema]
    if "format" in schema:  # whose pattern is long
        limits.append(f"of format {schema['format']}")
    elif "pattern" in schema:
        limits.append(f"matching {schema['pattern']}")
    if "default" in schema:
        limits.append(f"default {json.dumps(schema['default'])}")
    return " ".join(["null" if kind == "null" else kind, *limits])
