"""Cubins that are asked for over and over: the route's own replies, repeated for a tenth of a second at most."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from service_kit import Client, ClientMaker, Loop

from mlaprep.kernels_cache.revocation import Revocation, Revocations
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.service import hot_artifacts
from mlaprep.service.hot_artifacts import HotArtifacts

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


class Counting(MemoryStore):
    """Counts how often bytes are asked for."""

    asked = 0

    def get_blob(self, digest: str) -> bytes | None:
        self.asked += 1
        return super().get_blob(digest)


def built(client: Client) -> tuple[str, dict[str, Any]]:
    """The path of a cubin, and its manifest."""
    manifest = client.put(KERNEL).json()["manifest"]
    return f"/v1/artifacts/{manifest['cubin_sha256']}", manifest


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_artifacts, "FRESH_S", 3600.0)


@pytest.mark.usefixtures("lasting")
def test_a_repeated_reply_is_the_routes_own(make_client: ClientMaker) -> None:
    store = Counting()
    client = make_client(store=store)
    path, _ = built(client)
    first = client.get(path)
    assert store.asked == 1
    again = client.get(path, headers={"x-request-id": "mine", "accept-encoding": "gzip", "range": "bytes=0-9"})
    assert store.asked == 1
    head = client.request("HEAD", path)
    assert again.headers["x-request-id"] == "mine"
    assert first.headers["x-request-id"] != head.headers["x-request-id"]
    for reply in (first, again, head):
        del reply.headers["x-request-id"]
    assert (again.status_code, again.content, again.headers) == (200, first.content, first.headers)
    assert (head.status_code, head.content, head.headers) == (200, b"", first.headers)


@pytest.mark.usefixtures("lasting")
def test_whatever_is_no_plain_get_asks_the_route(make_client: ClientMaker) -> None:
    store = Counting()
    client = make_client(store=store)
    path, manifest = built(client)
    client.get(path)
    assert client.get(path, headers={"if-none-match": f'"{manifest["cubin_sha256"]}"'}).status_code == 304
    assert client.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get(path, headers={"authorization": "Bearer x"}).status_code == 200
    assert client.get(path, headers={"origin": "http://elsewhere"}).status_code == 200
    assert store.asked == 5
    assert client.get(path, headers={"host": "127.0.0.1:8400"}).status_code == 200  # another Host is another reply
    assert client.get(path, headers={"host": "a b"}).status_code == 400
    assert client.get(f"{path}?a=b").status_code == 422
    assert client.request("GET", path, content=b"x" * 70_000).status_code == 413
    assert client.request("POST", path).status_code == 405
    assert client.request("OPTIONS", path).status_code == 204
    client.app.state.drain.begin()
    assert client.get(path).status_code == 503


def test_the_route_is_asked_again_and_by_one_request(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(hot_artifacts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    asked = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200 if asked < 3 else 410, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def scenario() -> None:
        transport = httpx.ASGITransport(HotArtifacts(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def statuses(count: int) -> list[int]:
                replies = await asyncio.gather(*(http.get("/v1/artifacts/x") for _ in range(count)))
                return sorted(reply.status_code for reply in replies)

            assert (await statuses(1), await statuses(20), asked) == ([200], [200] * 20, 1)
            clock[0] += hot_artifacts.FRESH_S * 1.5
            assert (await statuses(20), asked) == ([200] * 20, 2)
            clock[0] += hot_artifacts.FRESH_S * 1.5
            assert (await statuses(20), asked) == ([200] * 19 + [410], 3)
            assert (await statuses(1), asked) == ([410], 4)

    loop.run(scenario())


@pytest.mark.usefixtures("lasting")
def test_a_revocation_by_this_service_holds_at_once(client: Client) -> None:
    path, _ = built(client)
    assert [client.get(path).status_code for _ in range(2)] == [200, 200]
    assert client.request("DELETE", KERNEL, params={"reason": "wrong"}).status_code == 200
    assert [client.get(path).status_code for _ in range(2)] == [410, 410]


def test_a_revocation_by_another_process_holds_soon(client: Client, tmp_path: Path) -> None:
    path, manifest = built(client)
    assert client.get(path).status_code == 200
    told = {"key": manifest["key"], "digest": manifest["cubin_sha256"], "arch": "sm_100a"}
    told |= {"variant_id": manifest["variant_id"], "reason": "wrong", "revoked_at": "2026-01-01T00:00:00Z"}
    Revocations(tmp_path / "cache").add(Revocation.from_dict(told))
    deadline = time.monotonic() + 2
    while client.get(path).status_code != 410 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get(path).status_code == 410


@pytest.mark.usefixtures("lasting")
def test_a_reply_that_a_deletion_overtook_is_not_kept(loop: Loop) -> None:
    async def scenario() -> int:
        asked, entered, released = 0, asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal asked
            if scope["method"] == "GET":
                asked += 1
                if asked == 1:
                    entered.set()
                    await released.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        transport = httpx.ASGITransport(HotArtifacts(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            slow = asyncio.create_task(http.get("/v1/artifacts/x"))
            await entered.wait()
            await http.delete("/v1/kernels/x")
            released.set()
            await slow
            await http.get("/v1/artifacts/x")
            await http.get("/v1/artifacts/x")
        return asked

    assert loop.run(scenario()) == 2


@pytest.mark.usefixtures("lasting")
def test_memory_is_bounded(loop: Loop) -> None:
    async def scenario() -> list[str]:
        asked: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["path"][-1])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * 100})

        transport = httpx.ASGITransport(HotArtifacts(app, max_bytes=250))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for name in "abacabc":
                assert (await http.get(f"/v1/artifacts/{name}")).content == b"x" * 100
        return asked

    assert loop.run(scenario()) == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.usefixtures("lasting")
def test_no_memory_for_kernels_means_none_here(make_client: ClientMaker) -> None:
    store = Counting()
    client = make_client(store=store, memory_max_bytes=0)
    path, _ = built(client)
    assert [client.get(path).status_code for _ in range(3)] == [200] * 3
    assert store.asked == 3
