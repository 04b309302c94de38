"""The REST calls: what they answer, and that bad input gets a problem that names it."""

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from service_kit import Client, ClientMaker

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import CompileCrashed, CompileFailed, CompilerUnavailable, CompileTimeout, QueueFull
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import TemplateError
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
KERNEL = f"/v1/kernels/sm_100a/{VARIANT}"


def problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """The reply as problem details, which it must be."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["type"] == f"urn:mlaprep:problem:{slug}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


def fields_of(response: httpx.Response) -> dict[str, str]:
    """Field at fault to what is allowed."""
    return {item["field"]: item["allowed"] for item in response.json()["problems"]}


def test_put_builds_once_and_get_finds_it(client: Client) -> None:
    problem(client.get(KERNEL), 404, "kernel-not-built")
    first = client.put(KERNEL)
    assert first.status_code == 201
    assert first.json()["cached"] is False
    again = client.put(KERNEL)
    assert (again.status_code, again.json()["cached"]) == (200, True)
    found = client.get(KERNEL)
    assert (found.status_code, found.json()["cached"]) == (200, True)
    assert found.json()["manifest"] == first.json()["manifest"]
    assert set(found.json()) == {"manifest", "cached"}


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_inline_is_a_whole_artifact(client: Client, method: str) -> None:
    client.put(KERNEL)
    reply = client.request(method, f"{KERNEL}?inline=true").json()
    manifest = Manifest.from_dict(reply["manifest"])
    artifact = KernelArtifact(manifest, base64.b64decode(reply["cubin_base64"]), reply["source"])
    artifact.verify(arch="sm_100a", spec=KernelSpec(num_heads=12).to_dict())


def test_a_body_may_repeat_the_spec(client: Client) -> None:
    assert client.put_json(KERNEL, b'{"spec": {"num_heads": 12}}').status_code == 201
    assert client.put_json(KERNEL, b"{}").status_code == 200
    other = client.put_json(KERNEL, b'{"spec": {"num_heads": 13}}')
    problem(other, 422, "invalid-spec")
    assert fields_of(other) == {"spec": VARIANT}


@pytest.mark.parametrize(
    ("body", "slug", "field", "allowed"),
    [
        (b'{"spec": {"num_heads": true}}', "invalid-spec", "num_heads", "an integer from 1 to 256"),
        (b'{"spec": {"num_heads": "16"}}', "invalid-spec", "num_heads", "an integer from 1 to 256"),
        (b'{"spec": {"num_heads": 16.0}}', "invalid-spec", "num_heads", "an integer from 1 to 256"),
        (b'{"spec": {"num_heads": 0}}', "invalid-spec", "num_heads", "an integer from 1 to 256"),
        (b'{"spec": {}}', "invalid-spec", "num_heads", "an integer from 1 to 256"),
        (b'{"spec": {"num_heads": 1, "kv_lora_rank": 1000000}}', "invalid-spec", "kv_lora_rank", "multiple of 16"),
        (b'{"spec": {"num_heads": 1, "layout": "e5m2"}}', "invalid-spec", "layout", "fp8"),
        (b'{"spec": {"num_heads": 1, "unroll": 8}}', "invalid-spec", "unroll", "num_heads"),
        (b'{"spec": [1]}', "invalid-spec", "spec", "an object"),
        (b'{"speck": {"num_heads": 1}}', "invalid-request", "speck", "spec"),
        (b"[]", "invalid-request", "body", "an object"),
        (b"7", "invalid-request", "body", "an object"),
    ],
)
def test_a_bad_body_names_field_and_range(client: Client, body: bytes, slug: str, field: str, allowed: str) -> None:
    reply = client.put_json(KERNEL, body)
    problem(reply, 422, slug)
    assert allowed in fields_of(reply)[field]


def test_everything_wrong_is_listed_at_once(client: Client) -> None:
    reply = client.put_json(KERNEL, b'{"spec": {"num_heads": 0, "rope_dim": 7, "dtype": "fp64"}}')
    assert set(fields_of(reply)) == {"num_heads", "rope_dim", "dtype"}
    reply = client.get("/v1/kernels/sm_1/mla_prepare-h0-r512-d64-bf16-fp8-norope-i64-pdl")
    assert set(fields_of(reply)) == {"arch", "num_heads"}
    reply = client.get("/v1/variants?limit=0&arch=x&nonsense=1&limit=2")
    assert set(fields_of(reply)) == {"limit", "arch", "nonsense"}


def test_another_media_type_is_refused(client: Client) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        reply = client.put(KERNEL, content=b"{}", headers={"content-type": media_type})
        problem(reply, 415, "unsupported-media-type")
    reply = client.put(KERNEL, content=b"{}", headers={"content-type": "Application/JSON; charset=utf-8"})
    assert reply.status_code == 201


@pytest.mark.parametrize(
    "arch",
    ["sm_70", "sm_80", "sm_110a", "sm_123", "sm_90b", "90a", "sm_0", "sm_90a%20", "SM_90A", "sm_90a%00", "a" * 5000],
)
def test_B044_an_unknown_architecture_lists_what_can_be_built(client: Client, compiler: Compiler, arch: str) -> None:
    compiler.version()
    for method, tail in (("GET", ""), ("PUT", ""), ("GET", "/source")):
        reply = client.request(method, f"/v1/kernels/{arch}/{VARIANT}{tail}")
        problem(reply, 422, "unknown-arch")
        assert fields_of(reply) == {"arch": "one of " + ", ".join(map(str, compiler.archs()))}
    assert client.service.builder.compiles == 0


def test_B044_an_architecture_this_compiler_lacks_is_not_built(
    make_client: ClientMaker, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "archs", lambda: (Arch("sm_90a"),))
    client = make_client()
    reply = client.put(KERNEL)
    problem(reply, 422, "unknown-arch")
    assert fields_of(reply) == {"arch": "one of sm_90a"}
    assert client.put(KERNEL.replace("sm_100a", "sm_90a")).status_code == 201


def test_a_spec_that_an_architecture_cannot_run_is_refused(client: Client) -> None:
    for method in ("GET", "PUT"):
        reply = client.request(method, f"/v1/kernels/sm_89/{VARIANT}")
        problem(reply, 422, "invalid-spec")
        assert "pdl" in fields_of(reply)


def test_B048_head_options_and_conditions_on_the_cubin(client: Client) -> None:
    digest = client.put(KERNEL).json()["manifest"]["cubin_sha256"]
    path = f"/v1/artifacts/{digest}"
    got = client.get(path, headers={"accept-encoding": "gzip"})
    assert got.status_code == 200
    assert hashlib.sha256(got.content).hexdigest() == digest
    assert got.headers["etag"] == f'"{digest}"'
    assert "immutable" in got.headers["cache-control"]
    assert got.headers["content-length"] == str(len(got.content))
    assert "content-encoding" not in got.headers

    head = client.request("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    same = {name: value for name, value in got.headers.items() if name != "x-request-id"}
    assert {name: value for name, value in head.headers.items() if name != "x-request-id"} == same

    options = client.request("OPTIONS", path)
    assert options.status_code == 204
    assert options.headers["allow"] == "GET, HEAD, OPTIONS"

    matching = [f'"{digest}"', f'W/"{digest}"', f'"other", "{digest}"', "*", f'W/"x",W/"{digest}"']
    for condition in matching:
        for method in ("GET", "HEAD"):
            reply = client.request(method, path, headers={"if-none-match": condition, "accept-encoding": "gzip"})
            assert (reply.status_code, reply.content) == (304, b""), condition
            assert reply.headers["etag"] == f'"{digest}"'
            assert "content-length" not in reply.headers
    for condition in ('"other"', digest, "", f'"{digest}x"', f'x"{digest[:-1]}"'):
        assert client.get(path, headers={"if-none-match": condition}).status_code == 200, condition
    reply = client.request("POST", path, headers={"if-none-match": "*"})
    problem(reply, 405, "method-not-allowed")
    assert reply.headers["allow"] == "GET, HEAD, OPTIONS"


def test_B048_head_never_compiles(client: Client) -> None:
    for path in (KERNEL, f"{KERNEL}/source", f"/v1/artifacts/{'0' * 64}"):
        reply = client.request("HEAD", path)
        assert (reply.status_code, reply.content) == (404, b"")
        assert reply.headers["content-type"] == "application/problem+json"
    assert client.service.builder.compiles == 0


def test_B048_head_answers_wherever_get_does(client: Client) -> None:
    client.put(KERNEL)
    paths = [
        re.sub(r"{\w+}", "x", path)
        for path, item in client.get("/openapi.json").json()["paths"].items()
        if "get" in item
    ]
    assert len(paths) >= 9
    paths.remove("/metrics")  # counts the request that asks, so no two replies are alike
    for path in [*paths, KERNEL, f"{KERNEL}/source", "/openapi.json", "/docs"]:
        get, head = client.get(path), client.request("HEAD", path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers.get("content-length") == get.headers.get("content-length"), path
        assert head.headers.get("content-type") == get.headers.get("content-type"), path


def test_options_and_405_name_every_method(client: Client) -> None:
    assert client.request("OPTIONS", KERNEL).headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"
    for method in ("POST", "PATCH", "TRACE", "BREW"):
        reply = client.request(method, KERNEL)
        problem(reply, 405, "method-not-allowed")
        assert reply.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"
    problem(client.request("OPTIONS", "/nowhere"), 404, "not-found")


def test_source_is_what_was_compiled(client: Client, spec: KernelSpec) -> None:
    manifest = client.put(KERNEL).json()["manifest"]
    reply = client.get(f"{KERNEL}/source")
    assert reply.text == render(spec).text
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    tag = reply.headers["etag"]
    assert tag == f'"{manifest["source_sha256"]}"'
    assert client.get(f"{KERNEL}/source", headers={"if-none-match": tag}).status_code == 304


def test_B038_a_prefix_leads_to_one_artifact_or_none(make_client: ClientMaker, compiler: Compiler) -> None:
    store = MemoryStore()
    client = make_client(store=store)
    digest = client.put(KERNEL).json()["manifest"]["cubin_sha256"]
    reply = client.get(f"/v1/artifacts/{digest[:8]}")
    assert (reply.status_code, reply.headers["location"]) == (307, f"/v1/artifacts/{digest}")
    problem(client.get("/v1/artifacts/00000000"), 404, "artifact-not-found")
    other = client.put(KERNEL.replace("sm_100a", "sm_90a")).json()["manifest"]["cubin_sha256"]

    alike = MemoryStore()
    alike._blobs = {digest: {"1" * 64}, digest[:10] + other[10:]: {"2" * 64}}
    client = make_client(store=alike)
    problem(client.get(f"/v1/artifacts/{digest[:9]}"), 409, "ambiguous-prefix")


@pytest.mark.parametrize(
    "text",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%2fetc%2fpasswd",
        "a%00b",
        "%0a",
        "a" * 5000,
        "{{7*7}}",
        VARIANT.replace("bf16", "bf16%0a%23include%20%22%2fetc%2fpasswd%22%0a"),
        VARIANT.replace("bf16", "bf16%00x"),
        VARIANT + "%0a",
        VARIANT.upper(),
        "%ff%fe",
        "%ed%a0%80",
    ],
)
def test_B054_no_callers_text_reaches_a_path_or_a_template(client: Client, text: str) -> None:
    paths = (
        f"/v1/kernels/sm_100a/{text}",
        f"/v1/kernels/{text}/{VARIANT}",
        f"/v1/kernels/sm_100a/{text}/source",
        f"/v1/variants/{text}",
        f"/v1/artifacts/{text}",
        f"/v1/variants?model={text}",
        f"/v1/variants?cursor={text}&arch={text}&layout={text}&state={text}&num_heads={text}",
    )
    for path in paths:
        for method in ("GET", "PUT", "HEAD"):
            # A client would normalise the dots away.
            reply = client.request(method, "http://127.0.0.1:8400" + path)
            assert reply.status_code in (404, 405, 422), (method, path)
            assert "passwd" not in reply.text
            assert "root:" not in reply.text
            assert "49" not in reply.json()["detail"] if reply.content else True
    assert client.service.builder.compiles == 0


@pytest.mark.parametrize(
    "value", ['bf16\\n#include \\"/etc/passwd\\"\\n', "{{7*7}}", "bf16\\u0000x", "${x}", "bf16\\r\\nSET k v", "../../x"]
)
@pytest.mark.parametrize("field", ["dtype", "layout", "rope", "loc_dtype", "q_scale", "q_nope_token_stride"])
def test_B054_enums_and_integers_only(client: Client, field: str, value: str) -> None:
    reply = client.put_json(KERNEL, f'{{"spec": {{"num_heads": 12, "{field}": "{value}"}}}}'.encode())
    assert reply.status_code == 422
    assert set(fields_of(reply)) == {field}
    assert json.loads(f'"{value}"') not in reply.text


def test_variants_show_every_architecture(client: Client) -> None:
    client.put(KERNEL)
    reply = client.get(f"/v1/variants/{VARIANT}").json()
    assert reply["variant_id"] == VARIANT
    assert KernelSpec.from_dict(reply["spec"]) == KernelSpec(num_heads=12)
    assert "kimi-k3" in reply["models"]
    rows = {row["arch"]: row for row in reply["archs"]}
    assert {"sm_90a", "sm_100a", "sm_103a", "sm_120a"} <= set(rows)
    assert "sm_89" not in rows  # it cannot run this one
    built, missing = rows["sm_100a"], rows["sm_90a"]
    assert built["state"] == "built"
    assert built["size"] > 1000
    assert built["registers"] > 0
    assert built["digest"] == client.get(KERNEL).json()["manifest"]["cubin_sha256"]
    assert built["hits"] == 1
    assert built["last_use"].endswith("Z")
    assert missing["state"] == "missing"
    assert missing["digest"] is None


def test_variants_are_filtered_and_paged(client: Client) -> None:
    client.put(KERNEL)
    client.put(KERNEL.replace("h12", "h7").replace("sm_100a", "sm_90a"))

    def listed(query: str) -> list[dict[str, Any]]:
        variants: list[dict[str, Any]] = client.get(f"/v1/variants?{query}").json()["variants"]
        return variants

    assert [v["variant_id"] for v in listed("state=built")] == [VARIANT.replace("h12", "h7"), VARIANT]
    assert [v["variant_id"] for v in listed("state=built&arch=sm_90a")] == [VARIANT.replace("h12", "h7")]
    assert [[r["arch"] for r in v["archs"]] for v in listed("state=built&num_heads=12")] == [["sm_100a"]]
    assert listed("num_heads=7&state=missing") == []
    assert {v["spec"]["num_heads"] for v in listed("model=kimi-k3")} == {96, 48, 24, 12, 6}
    assert {v["spec"]["layout"] for v in listed("layout=fp8")} == {"fp8"}
    assert {v["spec"]["layout"] for v in listed("layout=ds_mla")} == {"ds_mla"}
    assert listed("layout=same") == []

    everything = listed("limit=500")
    paged, query = [], "limit=7"
    while True:
        page = client.get(f"/v1/variants?{query}").json()
        paged += page["variants"]
        assert len(page["variants"]) <= 7
        if page["next_cursor"] is None:
            break
        query = f"limit=7&cursor={page['next_cursor']}"
    assert [v["variant_id"] for v in paged] == [v["variant_id"] for v in everything]
    assert len({v["variant_id"] for v in paged}) == len(paged)


def test_what_is_built_elsewhere_is_seen(make_client: ClientMaker, compiler: Compiler, tmp_path: Any) -> None:
    client = make_client()
    with Builder(DiskStore(tmp_path / "cache"), compiler) as other:
        other.get_or_compile(KernelSpec(num_heads=12), Arch("sm_100a"))
    assert client.get(KERNEL).status_code == 200
    assert client.put(KERNEL).status_code == 200


def test_presets_and_architectures(client: Client, compiler: Compiler) -> None:
    presets = client.get("/v1/presets").json()["presets"]
    assert [preset["name"] for preset in presets] == list(PRESETS)
    (kimi,) = (preset for preset in presets if preset["name"] == "kimi-k3")
    assert {v["tp"]: v["num_heads"] for v in kimi["variants"]} == {1: 96, 2: 48, 4: 24, 8: 12, 16: 6}
    assert VARIANT in {v["variant_id"] for v in kimi["variants"]}
    archs = client.get("/v1/archs").json()
    assert archs["nvrtc_version"] == compiler.version()
    assert [arch["name"] for arch in archs["archs"] if arch["default"]] == ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    assert all(arch["buildable"] for arch in archs["archs"])


def test_health_and_readiness(client: Client, compiler: Compiler) -> None:
    compiler.version()
    assert client.get("/healthz").json() == {"status": "ok"}
    client.put(KERNEL)
    client.put(KERNEL)
    ready = client.get("/readyz")
    assert ready.status_code == 200
    document = ready.json()
    assert document["ready"] is True
    assert document["reasons"] == []
    assert document["compiler"]["nvrtc_version"] == compiler.version()
    assert (document["counters"]["compiles"], document["counters"]["hits"]) == (1, 1)
    assert document["store"]["entries"] == 1


def test_no_reply_names_a_directory_of_a_library(
    make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_child(*_: object, **__: object) -> None:
        raise CompilerUnavailable("libnvrtc", "/opt/place/x/libnvrtc.so.12: file too short, see https://x.y/z")

    monkeypatch.setattr("mlaprep.service.compiler.CompileChild", no_child)
    with Compiler(processes=1) as compiler, caplog.at_level("WARNING"):
        client = make_client(compiler=compiler)
        assert client.put(KERNEL).status_code == 503
        ready = client.get("/readyz")
        assert ready.status_code == 503
        for text in (client.put(KERNEL).text, ready.text, client.get("/status").text):
            assert "libnvrtc.so.12: file too short, see https://x.y/z" in text
            assert "/opt" not in text
            assert "/x/lib" not in text
    assert caplog.text.count("/opt/place/x/libnvrtc.so.12") == 1


def test_B042_two_cupy_packages_show_in_readiness(
    make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        folder = tmp_path / f"{name.replace('-', '_')}-14.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    client = make_client()
    (warning,) = client.get("/readyz").json()["warnings"]
    assert "cupy-cuda13x" in warning
    with caplog.at_level("WARNING"):
        client.loop.run(_lifespan_start(client))
    assert "cupy-cuda13x" in caplog.text


async def _lifespan_start(client: Client) -> None:
    async with client.app.router.lifespan_context(client.app):
        pass


def test_every_reply_has_a_request_id(client: Client) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/healthz", "/nowhere", "/v1/variants?x=1")}
    assert len(ids) == 3
    given = client.get("/healthz", headers={"x-request-id": "trace-7.a_B"})
    assert given.headers["x-request-id"] == "trace-7.a_B"
    for bad in ("a b", "x" * 65, "<script>", ""):
        assert client.get("/healthz", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_an_unexpected_fault_says_nothing_of_itself(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(client.service.builder, "get", fail)
    reply = client.get(KERNEL)
    problem(reply, 500, "internal")
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "slug", "retry"),
    [
        (CompilerUnavailable("libnvrtc", "hidden"), 503, "compiler-unavailable", True),
        (CompileFailed("refused", "line 1"), 422, "compile-failed", False),
        (CompileTimeout(30), 504, "compile-timeout", False),
        (CompileCrashed("died"), 503, "compile-crashed", True),
        (QueueFull(5), 429, "queue-full", True),
    ],
)
def test_what_keeps_a_kernel_from_being_built(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, slug: str, retry: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(client.service.builder, "_build_or_raise", fail)
    reply = client.put(KERNEL)
    problem(reply, status, slug)
    assert ("retry-after" in reply.headers) is retry


TOKEN = {"authorization": "Bearer s3cret"}


def test_with_a_token_building_asks_for_it(make_client: ClientMaker) -> None:
    client = make_client(host="0.0.0.0", token="s3cret")
    problem(client.put(KERNEL), 401, "token-required")
    for headers in (
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer s3cret2"},
        {"authorization": "Basic s3cret"},
        {"authorization": "s3cret"},
        {"authorization": "Bearer "},
        {"authorization": b"Bearer \xff\xfe"},
    ):
        reply = client.put(KERNEL, headers=headers)
        problem(reply, 401, "invalid-token")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    assert client.service.builder.compiles == 0
    assert client.put(KERNEL, headers=TOKEN).status_code == 201
    assert client.put(KERNEL, headers={"authorization": "bearer s3cret"}).status_code == 200
    assert client.get(KERNEL).status_code == 200  # reading stays open
    problem(client.put(KERNEL), 401, "token-required")  # also where it is built


def test_without_a_token_only_loopback_builds(client: Client) -> None:
    """As the connection came in, whatever address the settings name."""
    assert client.put(KERNEL).status_code == 201
    reply = client.put("http://10.1.2.3:8400" + KERNEL)
    problem(reply, 403, "building-disabled")
    assert client.put("http://127.3.2.1:8400" + KERNEL).status_code == 200
    assert client.put("http://[::1]:8400" + KERNEL).status_code == 200


def test_a_read_only_service_builds_nothing(make_client: ClientMaker) -> None:
    make_client().put(KERNEL)
    client = make_client(host="0.0.0.0", read_only=True, token="s3cret", compiler=Compiler())
    assert client.put(KERNEL, headers=TOKEN).status_code == 200
    problem(client.put(KERNEL.replace("h12", "h13"), headers=TOKEN), 403, "building-disabled")
    assert client.get("/readyz").status_code == 200
    assert client.get("/readyz").json()["compiler"]["status"] == "idle"
    assert {arch["buildable"] for arch in client.get("/v1/archs").json()["archs"]} == {None}


def test_B023_sixteen_requests_compile_once(client: Client) -> None:
    replies = client.together([("PUT", KERNEL)] * 16)
    assert sorted(reply.status_code for reply in replies) == [200] * 15 + [201]
    assert len({reply.json()["manifest"]["cubin_sha256"] for reply in replies}) == 1
    assert client.service.builder.compiles == 1


def test_B031_a_damaged_entry_is_rebuilt_and_counted(make_client: ClientMaker, tmp_path: Any) -> None:
    good = make_client().put(KERNEL).json()["manifest"]
    folder = tmp_path / "cache" / "sm_100a" / good["key"][:2] / good["key"]
    cubin = folder / "kernel.cubin"
    cubin.chmod(0o600)
    cubin.write_bytes(cubin.read_bytes()[:-1])
    client = make_client()
    problem(client.get(KERNEL), 404, "kernel-not-built")
    problem(client.get(f"/v1/artifacts/{good['cubin_sha256']}"), 404, "artifact-not-found")
    reply = client.put(KERNEL)
    assert reply.status_code == 201
    assert reply.json()["manifest"]["cubin_sha256"] == good["cubin_sha256"]
    assert client.get(f"/v1/artifacts/{good['cubin_sha256']}").status_code == 200
    assert client.get("/readyz").json()["store"]["damaged"] >= 1


def test_B046_a_wrong_kernel_in_the_store_is_not_served(make_client: ClientMaker, compiler: Compiler) -> None:
    """A store that hands out another architecture's kernel, as a swapped file or a poisoned tier would."""
    wrong = compiler.compile(render(KernelSpec(num_heads=12)), Arch("sm_103a"))

    class Lying(MemoryStore):
        def get(self, key: str) -> KernelArtifact | None:
            return wrong

    client = make_client(store=Lying())
    problem(client.get(KERNEL), 404, "kernel-not-built")
    reply = client.put(KERNEL)
    assert reply.status_code == 201
    assert reply.json()["manifest"]["arch"] == "sm_100a"


@pytest.mark.parametrize(
    ("headers", "built"),
    [
        ({"host": "127.0.0.1:8400"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]:8400"}, True),
        ({"host": "127.0.0.1:8400", "origin": "http://127.0.0.1:8400"}, True),
        ({"host": "rebound.example:8400"}, False),
        ({"host": "localhost.example"}, False),
        ({"host": "127.0.0.1.example"}, False),
        ({"host": "0.0.0.0:8400"}, False),
        ({"host": ""}, False),
        ({"host": "127.0.0.1:8400", "origin": "http://evil.example"}, False),
        ({"host": "127.0.0.1:8400", "origin": "http://127.0.0.1:9000"}, False),
        ({"host": "127.0.0.1:8400", "origin": "https://127.0.0.1:8400"}, False),
        ({"host": "127.0.0.1:8400", "origin": "null"}, False),
    ],
)
def test_without_a_token_no_page_of_another_site_builds(
    make_client: ClientMaker, headers: dict[str, str], built: bool
) -> None:
    client = make_client()
    reply = client.put(KERNEL, headers=headers)
    if built:
        assert reply.status_code == 201
    else:
        problem(reply, 403, "foreign-origin")
        assert client.service.builder.compiles == 0
    assert client.get("/v1/archs", headers=headers).status_code == 200  # reading is open
    with_token = make_client(token="s3cret")
    assert with_token.put(KERNEL, headers={**headers, "authorization": "Bearer s3cret"}).status_code in (200, 201)


def test_a_mistake_in_a_template_is_told_by_name_and_line(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: KernelSpec) -> None:
        raise TemplateError("scatter.cuh.j2", 7, "'nope' is undefined")

    monkeypatch.setattr("mlaprep.service.builder.render", broken)
    reply = client.put(KERNEL)
    problem(reply, 500, "template-error")
    assert "scatter.cuh.j2, line 7" in reply.json()["detail"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_takes_no_query_either(client: Client, path: str) -> None:
    reply = client.get(f"{path}?verbose=1")
    assert [fault["field"] for fault in problem(reply, 422, "invalid-request")["problems"]] == ["verbose"]
