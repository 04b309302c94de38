"""Revocation over REST: a revoked kernel is gone, stays gone, and leaves everything else alone."""

import dataclasses
from pathlib import Path

import httpx
import pytest
from service_kit import Client, ClientMaker, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.revocation import Revocation
from mlaprep.service import product
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import KernelRevoked
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

ARCH = "sm_100a"
VARIANT = KernelSpec(num_heads=12).variant_id
KERNEL = f"/v1/kernels/{ARCH}/{VARIANT}"
OTHER = f"/v1/kernels/sm_103a/{VARIANT}"


@pytest.fixture
def client(make_client: ClientMaker) -> Client:
    return make_client()


def slug(reply: httpx.Response) -> str:
    assert reply.headers["content-type"] == "application/problem+json"
    return str(reply.json()["type"]).rpartition(":")[2]


def revoked(client: Client) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = client.get("/v1/revocations").json()["revocations"]
    return listed


def test_a_revoked_kernel_is_gone_and_stays_gone(client: Client, make_client: ClientMaker) -> None:
    manifest = client.put(KERNEL).json()["manifest"]
    client.put(OTHER)
    reply = client.request("DELETE", f"{KERNEL}?reason=wrong%20rows")
    assert reply.status_code == 200
    told = reply.json()["revocation"]
    assert (told["key"], told["digest"], told["reason"]) == (manifest["key"], manifest["cubin_sha256"], "wrong rows")
    assert client.request("DELETE", f"{KERNEL}?reason=again").json()["revocation"] == told
    compiles = client.service.builder.compiles
    restarted = make_client()
    for served in (client, restarted):
        for answer in (
            served.get(KERNEL),
            served.put(KERNEL),
            served.get(f"{KERNEL}/source"),
            served.get(f"/v1/artifacts/{manifest['cubin_sha256']}"),
        ):
            assert (answer.status_code, slug(answer)) == (410, "kernel-revoked")
            assert "wrong rows" in answer.json()["detail"]
        assert served.get(OTHER).status_code == 200
        assert revoked(served) == [told]
    assert client.service.builder.compiles == compiles
    assert [held.arch for held in client.service.store.list()] == ["sm_103a"]


def test_lifted_it_is_built_again(client: Client) -> None:
    key = client.put(KERNEL).json()["manifest"]["key"]
    client.request("DELETE", KERNEL)
    lifted = client.request("DELETE", f"/v1/revocations/{key}")
    assert (lifted.status_code, lifted.json()["key"]) == (200, key)
    assert slug(client.get(KERNEL)) == "kernel-not-built"
    assert client.put(KERNEL).status_code == 201
    assert slug(client.request("DELETE", f"/v1/revocations/{key}")) == "not-revoked"


def test_the_list_has_a_tag(client: Client) -> None:
    empty = client.get("/v1/revocations")
    assert empty.json() == {"revocations": []}
    tag = empty.headers["etag"]
    again = client.get("/v1/revocations", headers={"if-none-match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    client.put(KERNEL)
    client.request("DELETE", KERNEL)
    changed = client.get("/v1/revocations", headers={"if-none-match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    head = client.request("HEAD", "/v1/revocations")
    assert (head.headers["etag"], head.content) == (changed.headers["etag"], b"")


def test_what_is_not_built_cannot_be_revoked(client: Client) -> None:
    assert slug(client.request("DELETE", KERNEL)) == "kernel-not-built"
    assert slug(client.request("DELETE", f"{KERNEL}?key={'0' * 64}")) == "kernel-not-built"
    other = client.put(OTHER).json()["manifest"]["key"]
    assert slug(client.request("DELETE", f"{KERNEL}?key={other}")) == "kernel-not-built"  # another kernel's key
    assert revoked(client) == []


@pytest.mark.parametrize(
    "path",
    [
        f"{KERNEL}?reason=",
        f"{KERNEL}?reason=a%0Ab",
        f"{KERNEL}?reason=%00",
        f"{KERNEL}?reason={'x' * 201}",
        f"{KERNEL}?key=..%2f..%2fetc",
        f"{KERNEL}?key={'A' * 64}",
        f"{KERNEL}?why=x",
        "/v1/kernels/sm_70/" + VARIANT,
        f"/v1/kernels/{ARCH}/..%00",
        "/v1/revocations/%2e%2e",
        f"/v1/revocations/{'g' * 64}",
        "/v1/revocations/" + "a" * 5000,
    ],
)
def test_B054_hostile_names_revoke_nothing(client: Client, path: str) -> None:
    reply = client.request("DELETE", path)
    assert reply.status_code in (404, 405, 422)
    assert revoked(client) == []


def test_revoking_needs_the_rights_that_building_needs(make_client: ClientMaker) -> None:
    client = make_client(token="secret")
    bearer = {"authorization": "Bearer secret"}
    key = client.put(KERNEL, headers=bearer).json()["manifest"]["key"]
    assert slug(client.request("DELETE", KERNEL)) == "token-required"
    assert client.request("DELETE", KERNEL, headers=bearer).status_code == 200
    assert client.get("/v1/revocations").status_code == 200
    assert slug(client.request("DELETE", f"/v1/revocations/{key}")) == "token-required"
    reader = make_client(read_only=True)
    assert slug(reader.request("DELETE", f"/v1/revocations/{key}")) == "building-disabled"
    assert slug(reader.get(KERNEL)) == "kernel-revoked"


def test_the_same_bytes_under_another_key_are_refused(
    tmp_path: Path, compiler: Compiler, spec: KernelSpec, arch: Arch
) -> None:
    store = DiskStore(tmp_path)
    with Builder(store, compiler) as builder:
        artifact = builder.get_or_compile(spec, arch).artifact
        builder.revocations.add(Revocation("0" * 64, artifact.digest, "", "", "wrong bytes", "2026-01-31T12:00:00Z"))
        with pytest.raises(KernelRevoked):
            builder.get(spec, arch)
        store.delete(artifact.key)
        with pytest.raises(KernelRevoked):
            builder.get_or_compile(spec, arch)
        assert list(store.list()) == []


def test_a_warm_up_lists_what_is_revoked_as_failed(client: Client) -> None:
    client.put(KERNEL)
    client.request("DELETE", f"{KERNEL}?reason=wrong")
    plan = {"kernels": [{"variant_id": VARIANT, "arch": [ARCH, "sm_103a"]}]}
    job = client.request("POST", "/v1/warmups", json=plan).json()
    wait_for(lambda: client.get(f"/v1/warmups/{job['id']}").json()["state"] in ("done", "failed"))
    done = client.get(f"/v1/warmups/{job['id']}").json()
    assert (done["state"], done["failed"], done["built"] + done["cached"]) == ("failed", 1, 1)
    assert "revoked" in done["failures"][0]["detail"]


def test_a_kernel_that_spills_is_not_published(
    make_client: ClientMaker, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = product.parse_resources
    monkeypatch.setattr(
        product, "parse_resources", lambda *given: dataclasses.replace(parse(*given), spill_stores=8, spill_loads=16)
    )
    client = make_client()
    reply = client.put(KERNEL)
    assert (reply.status_code, slug(reply)) == (422, "kernel-spills")
    assert VARIANT in reply.json()["detail"]
    assert "8 bytes of stores" in reply.json()["detail"]
    again = client.put(KERNEL)
    assert (again.status_code, slug(again)) == (422, "kernel-spills")
    assert client.service.builder.stats().remembered_failures == 1
    assert slug(client.get(KERNEL)) == "kernel-not-built"
    assert make_client(refuse_spills=False).put(KERNEL).status_code == 201
