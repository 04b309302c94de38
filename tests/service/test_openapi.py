"""The OpenAPI document: that it is true of the replies, and that nothing drawn from it breaks the service."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance
from service_kit import Client
from starlette.types import ASGIApp, Receive, Scope, Send

from mlaprep.kernels_cache.revocation import is_reason
from mlaprep.service import schemas
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.fields import CHOICES, FLAGS, RANGES, SIZES, STRIDE_FIELDS
from mlaprep.templates.plans import parse_plan
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import KernelSpec, parse_variant_id

HEADERS = {"host": "localhost"}
STATUSES = {
    "negative_data_rejection": {"expected-statuses": ["4xx"]},  # 413 among them, for a body that is drawn too long
    # What is revoked is gone, whatever the request looks like, as what is not built is not found.
    "positive_data_acceptance": {"expected-statuses": ["2xx", "3xx", "401", "403", "404", "409", "410", "429"]},
}
KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    """One that can be: of what is drawn, the fields that do not go with those before are left out."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        name: st.sampled_from(range(low, high + 1, multiple)) for name, (low, high, multiple) in RANGES.items()
    }
    choices |= {name: st.sampled_from(values) for name, values in (*CHOICES.items(), *SIZES.items())}
    choices |= dict.fromkeys(FLAGS, st.booleans())
    choices |= dict.fromkeys(STRIDE_FIELDS, st.integers(1, 256).map(lambda rows: 16 * rows))
    names = draw(st.lists(st.sampled_from(sorted(choices.keys() - {"num_heads"})), unique=True, max_size=6))
    fields = {"num_heads": draw(choices["num_heads"])}
    for name in names:
        more = fields | {name: draw(choices[name])}
        with contextlib.suppress(SpecError):
            KernelSpec.from_dict(more)
            fields = more
    return KernelSpec.from_dict(fields)


# What the document's own formats mean. Which fields of a kernel go together no pattern can say.
variant_ids = specs().map(lambda spec: spec.variant_id).filter(lambda text: len(text) <= 400)
schemathesis.openapi.format("variant-id", variant_ids)
schemathesis.openapi.format(
    "miss-cursor",
    st.tuples(st.integers(1, 2**40), st.integers(1, 2**31), st.sampled_from(ARCHS), variant_ids).map(
        lambda parts: ".".join(map(str, parts))
    ),
)
schemathesis.openapi.format("printable-text", st.text(min_size=1, max_size=200).filter(is_reason))


def is_possible(case: schemathesis.Case) -> bool:
    """Whether what fits the schema is also a kernel, and one that its architecture can run: by the rooms below REST."""
    named = case.path_parameters or {}
    body = case.body if isinstance(case.body, dict) else {}
    if repr(body) != repr(whole_numbers(body)):
        return False
    try:
        if "variant_id" in named:
            spec = parse_variant_id(named["variant_id"])
            if "arch" in named and not case.operation.label.endswith("/builds"):  # of which there are none then
                check_target(spec, Arch(named["arch"]))
            if "spec" in body and KernelSpec.from_dict(body["spec"]) != spec:
                return False
        if case.operation.label == "POST /v1/warmups":
            parse_plan(body, lambda most: ())
        for miss in body.get("misses", ()) if case.operation.label == "POST /v1/misses" else ():
            check_target(parse_variant_id(miss["variant_id"]), Arch(miss["arch"]))
    except SpecError:
        return False
    return True


def made_possible(case: schemathesis.Case) -> None:
    """Change of a drawn request what keeps it from being possible."""
    label = case.operation.label
    if isinstance(case.body, dict):
        case.body = whole_numbers(case.body)
    if "arch" in (case.path_parameters or {}):
        case.path_parameters["arch"] = "sm_120a"
    if label == "POST /v1/misses":
        case.body = {"misses": [miss | {"arch": "sm_120a"} for miss in case.body["misses"]]}
    elif label == "POST /v1/warmups":
        kernels = [
            {key: entry[key] for key in ("preset", "tp", "variant_id") if key in entry} for entry in entries(case)
        ]
        case.body = {"arch": "sm_120a", "kernels": [entry or {"spec": {"num_heads": 7}} for entry in kernels]}
    elif isinstance(case.body, dict) and "spec" in case.body:
        case.body = {"spec": parse_variant_id(case.path_parameters["variant_id"]).to_dict()}


def whole_numbers(value: Any) -> Any:
    """JSON without the fractions of its whole numbers: 16.0, an integer to JSON Schema, is none to this service."""
    if isinstance(value, dict):
        return {name: whole_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [whole_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def entries(case: schemathesis.Case) -> list[dict[str, Any]]:
    return case.body.get("kernels") or [{}]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name)
def test_nothing_drawn_from_the_document_breaks_the_service(
    client: Client, mode: GenerationMode, request: pytest.FixtureRequest
) -> None:
    """With every check. What fits the schema is accepted, but for a kernel that cannot be: that is a 422."""
    load_all_checks()
    config = schemathesis.Config.from_dict({"checks": STATUSES})
    api = schemathesis.openapi.from_asgi("/openapi.json", without_lifespan(client.app), config=config)
    statuses: Counter[int] = Counter()
    examples: int = request.config.getoption("--openapi-examples")
    for result in api.get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        def call(case: schemathesis.Case) -> None:
            # Where there is nothing to get wrong, what is drawn to be wrong is right.
            if case.meta.generation.mode is GenerationMode.POSITIVE and not is_possible(case):
                reply = case.call_and_validate(excluded_checks=[positive_data_acceptance], headers=HEADERS)
                assert reply.status_code in (404, 422)
                statuses[reply.status_code] += 1
                made_possible(case)
                assert is_possible(case)
            reply = case.call_and_validate(headers=HEADERS)
            statuses[reply.status_code] += 1

        try:
            call()
        except hypothesis.errors.Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # an operation without parameters cannot be got wrong
    print(f"{mode.name}: {sum(statuses.values())} requests, by status {dict(sorted(statuses.items()))}")
    assert sum(statuses.values()) > 50
    assert set(statuses) <= {200, 201, 202, 304, 404, 405, 406, 410, 413, 415, 422, 429}
    if mode is GenerationMode.POSITIVE:
        assert {200, 201, 202, 404} <= set(statuses)


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
