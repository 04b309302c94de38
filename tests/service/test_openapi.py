"""The OpenAPI document: that it is true of the replies, and that nothing drawn from it breaks the service."""

from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance
from service_kit import Client
from starlette.types import ASGIApp, Receive, Scope, Send

from mlaprep.service import schemas

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name)
def test_nothing_drawn_from_the_document_breaks_the_service(client: Client, mode: GenerationMode) -> None:
    load_all_checks()
    refusals = {"expected-statuses": ["4xx"]}  # 413 among them, for a body that is drawn too long
    config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": refusals}})
    api = schemathesis.openapi.from_asgi("/openapi.json", without_lifespan(client.app), config=config)
    statuses: Counter[int] = Counter()
    for result in api.get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        def call(case: schemathesis.Case) -> None:
            # A valid spec in a body must also be the one in the path, which no schema can say.
            reply = case.call_and_validate(excluded_checks=[positive_data_acceptance], headers={"host": "localhost"})
            statuses[reply.status_code] += 1

        try:
            call()
        except hypothesis.errors.Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # an operation without parameters cannot be got wrong
    assert sum(statuses.values()) > 50
    assert set(statuses) <= {200, 201, 202, 304, 404, 405, 406, 410, 413, 415, 422, 429}


def without_lifespan(app: ASGIApp) -> ASGIApp:
    """The application for a client that starts and ends it at every call."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return served


@pytest.mark.parametrize(
    ("method", "path", "status", "model"),
    [
        ("PUT", KERNEL, 201, schemas.KernelReply),
        ("PUT", f"{KERNEL}?inline=true", 200, schemas.KernelReply),
        ("GET", KERNEL, 200, schemas.KernelReply),
        ("GET", f"{KERNEL}?inline=true", 200, schemas.KernelReply),
        ("GET", f"{KERNEL}/resources", 200, schemas.ResourcesReply),
        ("GET", "/v1/variants", 200, schemas.VariantsReply),
        ("GET", "/v1/variants?state=built&limit=1", 200, schemas.VariantsReply),
        ("GET", f"/v1/variants/{KERNEL.rpartition('/')[2]}", 200, schemas.VariantReply),
        ("GET", "/v1/presets", 200, schemas.PresetsReply),
        ("GET", "/v1/archs", 200, schemas.ArchsReply),
        ("GET", "/v1/misses", 200, schemas.MissesReply),
        ("GET", "/v1/warmups", 200, schemas.WarmupsReply),
        ("GET", "/v1/revocations", 200, schemas.RevocationsReply),
        ("GET", "/healthz", 200, schemas.HealthReply),
        ("GET", "/readyz", 200, schemas.ReadyReply),
        ("GET", "/v1/artifacts/0", 422, schemas.ProblemReply),
        ("GET", "/v1/nothing", 404, schemas.ProblemReply),
        ("PUT", "/v1/archs", 405, schemas.ProblemReply),
    ],
)
def test_replies_are_what_the_document_says(
    client: Client, method: str, path: str, status: int, model: type[BaseModel]
) -> None:
    client.service.compiler.version()
    if status == 200:
        client.put(KERNEL)
    reply = client.request(method, path)
    assert reply.status_code == status
    parsed = model.model_validate_json(reply.content, strict=True)
    assert parsed.model_dump(by_alias=True, exclude_unset=True) == reply.json()


def test_the_document_and_the_page_have_every_call(client: Client, root: Path) -> None:
    document = client.get("/openapi.json").json()
    calls = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert calls == {
        ("GET", "/v1/variants"),
        ("GET", "/v1/variants/{variant_id}"),
        ("GET", "/v1/kernels/{arch}/{variant_id}"),
        ("PUT", "/v1/kernels/{arch}/{variant_id}"),
        ("GET", "/v1/kernels/{arch}/{variant_id}/source"),
        ("GET", "/v1/kernels/{arch}/{variant_id}/sass"),
        ("GET", "/v1/kernels/{arch}/{variant_id}/resources"),
        ("GET", "/v1/kernels/{arch}/{variant_id}/builds"),
        ("GET", "/v1/kernels/{arch}/{variant_id}/diff"),
        ("GET", "/v1/artifacts/{digest}"),
        ("GET", "/v1/presets"),
        ("GET", "/v1/archs"),
        ("GET", "/v1/misses"),
        ("POST", "/v1/misses"),
        ("POST", "/v1/warmups"),
        ("GET", "/v1/warmups"),
        ("GET", "/v1/warmups/{job_id}"),
        ("GET", "/v1/warmups/{job_id}/events"),
        ("POST", "/v1/warmups/{job_id}/resume"),
        ("DELETE", "/v1/warmups/{job_id}"),
        ("GET", "/v1/revocations"),
        ("DELETE", "/v1/revocations/{key}"),
        ("DELETE", "/v1/kernels/{arch}/{variant_id}"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    }
    page = (root / "docs" / "service.md").read_text()
    assert {call for call in calls if "`{} {}`".format(*call) not in page} == set()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            for parameter in operation.get("parameters", ()):
                assert parameter["description"], (method, path, parameter["name"])
                if parameter["in"] == "path":
                    assert parameter["schema"].get("examples") or parameter.get("examples"), (path, parameter["name"])
    assert example_of(document, "KernelReply")["manifest"]["arch"] == "sm_100a"
    assert (
        "example"
        in document["paths"]["/v1/kernels/{arch}/{variant_id}"]["put"]["requestBody"]["content"]["application/json"]
    )


@pytest.mark.parametrize(
    "name",
    [
        "ManifestReply", "ResourcesReply", "VariantArchReply", "PresetReply", "ArchReply", "FieldProblemReply",
        "ProblemReply", "MissReply", "MissesRecordedReply", "WarmupReply", "JobFailureReply",
        "HealthReply", "ReadyReply", "CompilerReply", "StoreReply", "CountersReply",
    ],
)  # fmt: skip
def test_every_field_shows_an_example(client: Client, name: str) -> None:
    schema = client.get("/openapi.json").json()["components"]["schemas"][name]
    for field, described in schema["properties"].items():
        plain = {"examples", "enum", "const", "items", "anyOf", "$ref"} & set(described)
        assert plain or described.get("type") == "boolean", field


def example_of(document: Any, name: str) -> Any:
    """The example of a schema, made of those of its members."""
    schema = document["components"]["schemas"][name]
    members = {}
    for field, described in schema["properties"].items():
        if "$ref" in described:
            members[field] = example_of(document, described["$ref"].rpartition("/")[2])
        elif "examples" in described:
            members[field] = described["examples"][0]
    return members
