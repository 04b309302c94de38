"""What every reply tells a browser, other origins, and what a proxy may say."""

import json

import httpx
import pytest
from service_kit import Client, ClientMaker, ServerMaker

from mlaprep.service.headers import GUARDS, guarded
from mlaprep.service.settings import read_settings
from mlaprep.templates.errors import SpecError

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
KERNEL = f"/v1/kernels/sm_100a/{VARIANT}"
ORIGIN = "https://dash.example"


def test_every_reply_is_guarded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = client.put(KERNEL).json()["manifest"]["cubin_sha256"]
    paths = ["/healthz", "/docs", "/openapi.json", "/nowhere", "/v1/variants?x=1", KERNEL, f"{KERNEL}/source"]
    replies = [client.request(method, path) for path in paths for method in ("GET", "HEAD", "OPTIONS", "POST")]
    replies.append(client.get(f"/v1/artifacts/{digest}"))
    replies.append(client.get(f"/v1/artifacts/{digest}", headers={"if-none-match": "*"}))
    replies.append(client.put(KERNEL, content=b"x" * 100_000))
    monkeypatch.setattr(client.service.builder, "get", lambda *_: 1 / 0)
    replies.append(client.get(KERNEL))
    assert {reply.status_code for reply in replies} >= {200, 204, 304, 404, 405, 413, 422, 500}
    for reply in replies:
        for name, value in GUARDS:
            (told,) = reply.headers.get_list(name.decode())
            if name != b"content-security-policy" or reply.request.url.path != "/docs":
                assert told == value.decode(), (reply.request.url, name)
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


def test_what_a_route_says_itself_stays() -> None:
    own = (b"content-security-policy", b"default-src 'none'")
    assert [value for name, value in guarded([own]) if name == own[0]] == [own[1]]
    assert len(guarded([own])) == len(GUARDS)


def test_other_origins_may_nothing_by_default(client: Client) -> None:
    preflight = {"origin": ORIGIN, "access-control-request-method": "GET"}
    for reply in (client.get("/v1/archs", headers=preflight), client.request("OPTIONS", KERNEL, headers=preflight)):
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_named_origins_may_read_and_build_with_a_token(make_client: ClientMaker) -> None:
    client = make_client(token="one-token-for-all", cors_origins=f"{ORIGIN}, http://localhost:3000")
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "PUT",
        "access-control-request-headers": "authorization,content-type",
    }
    reply = client.request("OPTIONS", KERNEL, headers=preflight)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in reply.headers
    reply = client.get("/v1/archs", headers={"origin": ORIGIN})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert client.put(KERNEL, headers={"origin": ORIGIN}).status_code == 401
    other = client.get("/v1/archs", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = client.request("OPTIONS", KERNEL, headers=preflight | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
    without = make_client(cors_origins=ORIGIN)
    assert without.put(KERNEL, headers={"origin": ORIGIN}).status_code == 403  # reading is what it may


@pytest.mark.parametrize("value", ["*", "dash.example", "https://dash.example/", "null", "https://a b", "ftp://x"])
def test_an_origin_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MLAPREP_CORS_ORIGINS", f"{ORIGIN},{value}")
    with pytest.raises(SpecError, match="MLAPREP_CORS_ORIGINS"):
        read_settings()


@pytest.mark.parametrize("value", ["*", "proxy", "10.0.0.1/8", "10.0.0", "::1,*"])
def test_a_proxy_is_named_by_address(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MLAPREP_TRUSTED_PROXIES", value)
    with pytest.raises(SpecError, match="MLAPREP_TRUSTED_PROXIES"):
        read_settings()


@pytest.mark.parametrize(
    ("trusted", "logged"), [("", "127.0.0.1"), ("10.0.0.0/8", "127.0.0.1"), ("127.0.0.0/8", "203.0.113.7")]
)
def test_what_a_proxy_says_is_believed_where_it_is_trusted(run_server: ServerMaker, trusted: str, logged: str) -> None:
    variables = {"MLAPREP_TRUSTED_PROXIES": trusted, "MLAPREP_ACCESS_LOG": "on", "FORWARDED_ALLOW_IPS": "*"}
    with run_server(wait=False, **variables) as server:
        told = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "https"}
        assert httpx.get(server.url + "/v1/presets", headers=told).status_code == 200
        assert httpx.put(server.url + KERNEL, headers=told).status_code == 403
        assert server.stop() == 0
        (line,) = [line for line in server.log.read_text().splitlines() if "/v1/presets" in line]
    assert json.loads(line)["client"] == logged
