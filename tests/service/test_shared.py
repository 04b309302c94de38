"""The service on a shared Redis: one compile a key over replicas, and a Redis in trouble that stops nobody."""

import builtins
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_server import RedisServer, redis_server, running_redis
from service_kit import Client, ClientMaker, Server, running_server, wait_for

from mlaprep.kernels_cache import shared_revocations
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.service.settings import Settings, read_settings
from mlaprep.service.state import Service
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec

__all__ = ["redis_server"]

PATH = "/v1/kernels/sm_90a/" + KernelSpec(num_heads=12).variant_id
PATHS = [f"/v1/kernels/sm_90a/{KernelSpec(num_heads=heads).variant_id}" for heads in (3, 5, 6, 9)]
REVOKE = {"reason": "wrong rows"}


@pytest.fixture
def make_replica(make_client: ClientMaker, tmp_path: Path) -> Iterator[Any]:
    """Applications with directories of their own over one Redis, and one compiler."""
    made: list[Client] = []

    def make(url: str, **settings: Any) -> Client:
        settings.setdefault("redis_timeout_s", 5.0)
        client = make_client(cache_dir=tmp_path / f"replica-{len(made)}", redis_url=url, **settings)
        made.append(client)
        return client

    yield make
    for client in made:
        assert client.service.shared is not None
        client.service.shared.redis.close()


def compiles(client: Client) -> int:
    return client.service.builder.compiles


def test_a_replica_serves_what_another_built(make_replica: Any, redis_server: RedisServer) -> None:
    first, second = make_replica(redis_server.url), make_replica(redis_server.url)
    assert second.get(PATH).status_code == 404
    built = first.put(PATH)
    assert built.status_code == 201
    found = second.put(PATH, params={"inline": "true"})
    assert found.status_code == 200
    assert found.json()["manifest"] == built.json()["manifest"]
    assert (compiles(first), compiles(second)) == (1, 0)
    digest = found.json()["manifest"]["cubin_sha256"]
    third = make_replica(redis_server.url)
    blob = third.get(f"/v1/artifacts/{digest}")
    assert blob.status_code == 200
    assert blob.headers["etag"] == f'"{digest}"'
    redis_server.kill()
    assert second.get(PATH).status_code == 200  # it was kept there too
    assert third.get(f"/v1/artifacts/{digest}").content == blob.content
    listed = second.get("/v1/variants", params={"state": "built"}).json()
    assert [variant["variant_id"] for variant in listed["variants"]] == [PATH.rpartition("/")[2]]


def test_a_revocation_reaches_every_replica(
    make_replica: Any, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_revocations, "_LOOK_S", 0.0)
    first, second = make_replica(redis_server.url), make_replica(redis_server.url)
    manifest = first.put(PATH).json()["manifest"]
    assert second.get(PATH).status_code == 200
    assert first.request("DELETE", PATH, params=REVOKE).status_code == 200
    for replica in (second, first):
        assert replica.get(PATH).status_code == 410
        assert replica.put(PATH).status_code == 410
        assert replica.get(f"/v1/artifacts/{manifest['cubin_sha256']}").status_code == 410
        assert len(replica.get("/v1/revocations").json()["revocations"]) == 1
    assert second.request("DELETE", f"/v1/revocations/{manifest['key']}").status_code == 200
    assert first.put(PATH).status_code in (200, 201)


@pytest.mark.parametrize("kind", ["record", "blob"])
def test_B031_damage_in_redis_is_built_anew_and_counted(
    make_replica: Any, redis_server: RedisServer, kind: str
) -> None:
    built = make_replica(redis_server.url).put(PATH, params={"inline": "true"}).json()
    with redis_server.client() as client:
        for place in client.keys(f"mlaprep:1:{kind}:*"):
            data = client.get(place)
            client.set(place, data[:200] + bytes([data[200] ^ 4]) + data[201:])
    second = make_replica(redis_server.url)
    assert second.get(PATH).status_code == 404
    again = second.put(PATH, params={"inline": "true"})
    assert again.status_code == 201
    assert again.json()["cubin_base64"] == built["cubin_base64"]
    shared = second.get("/readyz").json()["shared"]
    assert (shared["damaged"], shared["state"]) == (1, "up")
    assert make_replica(redis_server.url).get(PATH).status_code == 200


def test_B028_readyz_tells_of_a_redis_that_is_down_and_of_one_that_is_back(
    make_replica: Any, redis_server: RedisServer
) -> None:
    client = make_replica(redis_server.url, redis_timeout_s=0.25)
    assert client.get("/readyz").json()["shared"]["state"] == "up"
    redis_server.kill()
    began = time.monotonic()
    assert client.put(PATH).status_code == 201
    waited = time.monotonic() - began
    reply = client.get("/readyz")
    assert reply.status_code == 200
    document = reply.json()
    assert document["ready"]
    assert (document["shared"]["state"], document["shared"]["opened"], document["shared"]["owed"]) == ("down", 1, 1)
    place = f"redis://127.0.0.1:{redis_server.port}/0"
    assert [told for told in document["warnings"] if told.startswith(f"shared cache down: {place}: ")]
    assert waited < 10
    redis_server.start()
    wait_for(lambda: client.get("/readyz").json()["shared"]["state"] == "up")
    assert not [told for told in client.get("/readyz").json()["warnings"] if "shared" in told]
    wait_for(lambda: client.get("/readyz").json()["shared"]["owed"] == 0)
    assert make_replica(redis_server.url).get(PATH).status_code == 200  # published once it could be


def test_B028_what_is_not_about_jobs_answers_while_redis_is_down(make_replica: Any, redis_server: RedisServer) -> None:
    client = make_replica(redis_server.url, redis_timeout_s=0.25)
    assert 'mlaprep_warmups{state="done"} 0.0' in client.get("/metrics").text
    redis_server.kill()
    client.get(PATH)
    paths = [
        path
        for path, calls in client.get("/openapi.json").json()["paths"].items()
        if "get" in calls and "{" not in path
    ]
    unwell = {path: status for path in paths if (status := client.get(path).status_code) >= 500}
    assert unwell == {"/v1/warmups": 503}
    assert {path: client.get(path).status_code for path in ("/", "/misses", "/status", "/warmups")} == {
        "/": 200, "/misses": 200, "/status": 200, "/warmups": 503
    }  # fmt: skip
    told = client.get("/metrics").text
    assert f'mlaprep_redis_up{{place="redis://127.0.0.1:{redis_server.port}/0"}} 0.0' in told


def test_B028_readyz_tells_of_a_full_redis(make_replica: Any, tmp_path: Path) -> None:
    with running_redis(tmp_path, maxmemory="1", maxmemory_policy="noeviction") as server:
        client = make_replica(server.url)
        assert client.put(PATH).status_code == 201
        document = client.get("/readyz").json()
        assert document["ready"]
        assert (document["shared"]["state"], document["shared"]["reason"]) == ("refusing", "it is full")
        assert any(told.endswith(": it is full") for told in document["warnings"])


def test_B028_no_reply_and_no_line_holds_the_secrets_of_the_address(
    make_replica: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running_redis(tmp_path, requirepass="right") as server:
        client = make_replica(server.url.replace("//", "//:wr0ng-s3cret@"), redis_timeout_s=0.25)
        assert client.put(PATH).status_code == 201
        ready = client.get("/readyz").text
        assert "it refuses the user or password" in ready
        told = ready + caplog.text + repr(client.service.settings) + repr(client.service.shared)
        assert "s3cret" not in told


def test_B028_a_missing_package_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name == "redis" or name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    found = builtins.__import__

    def without_redis(name: str, *args: Any, **more: Any) -> Any:
        if name == "redis" or name.startswith("redis."):
            raise ModuleNotFoundError("no redis", name="redis")
        return found(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    monkeypatch.setattr("importlib.import_module", lambda name: without_redis(name))
    Service.assemble(Settings(cache_dir=tmp_path)).close()
    with pytest.raises(SpecError) as caught:
        Service.assemble(Settings(cache_dir=tmp_path, redis_url="redis://:s3cret@127.0.0.1:1"))
    (problem,) = caught.value.problems
    assert problem.field == "MLAPREP_REDIS_URL"
    assert "pip install 'mlaprep[redis]'" in problem.found
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://:s3cret@h", "s3cret", "redis://h:s3cret/0", "redis://h?timeout=s3cret"])
def test_an_address_that_is_none_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("MLAPREP_REDIS_URL", url)
    with pytest.raises(SpecError) as caught:
        read_settings()
    (problem,) = caught.value.problems
    assert problem.field == "MLAPREP_REDIS_URL"
    assert "rediss://" in problem.allowed
    assert "s3cret" not in str(caught.value)


def test_pinned_keys_are_asked_for_and_a_key_of_ones_own_that_is_none_of_them_is_told(
    make_replica: Any, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = make_replica(redis_server.url)
    assert unsigned.put(PATH).status_code == 201
    own = generate_key(tmp_path / "own")
    generate_key(tmp_path / "other")
    monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", own.public.text)
    signing = make_replica(redis_server.url, signing_key=tmp_path / "own")
    assert signing.get(PATH).status_code == 404
    assert signing.put(PATH).status_code == 201
    reading = make_replica(redis_server.url)
    assert reading.get(PATH).status_code == 200
    foreign = make_replica(redis_server.url, signing_key=tmp_path / "other")
    assert foreign.get(PATH).status_code == 200
    for replica, wrong in ((signing, 0), (reading, 1), (foreign, 1)):
        told = [line for line in replica.get("/readyz").json()["warnings"] if "MLAPREP_SIGNING_KEY" in line]
        assert len(told) == wrong


# Real servers


def start(stack: ExitStack, folder: Path, server: RedisServer, **variables: str) -> Server:
    variables.setdefault("MLAPREP_REDIS_TIMEOUT_S", "10")
    variables |= {"MLAPREP_REDIS_URL": server.url, "MLAPREP_COMPILE_PROCESSES": "1"}
    return stack.enter_context(running_server(folder, **variables))


def counters(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{server.url}/readyz", timeout=30).json()
    return document


def put(url: str) -> httpx.Response:
    return httpx.put(url, timeout=60)


TWO_WORKERS = """
import os, uvicorn
port = int(os.environ["MLAPREP_PORT"])
uvicorn.run("mlaprep.service.app:create_app", factory=True, port=port, workers=2, log_level="warning")
"""


@pytest.mark.slow
def test_B023_sixteen_http_clients_at_two_replicas_share_one_compile(redis_server: RedisServer, tmp_path: Path) -> None:
    """One replica is a process, the other two workers of uvicorn: three processes that know each other by Redis."""
    with ExitStack() as stack:
        single = start(stack, tmp_path / "0", redis_server)
        double = start(stack, tmp_path / "1", redis_server, code=TWO_WORKERS)
        stack.callback(double.stop)  # a kill would leave its workers
        replicas = (single, double)
        barrier = threading.Barrier(16)

        def ask(number: int) -> httpx.Response:
            barrier.wait(30)
            return put(f"{replicas[number % 2].url}{PATH}?inline=true")

        with ThreadPoolExecutor(16) as threads:
            replies = list(threads.map(ask, range(16)))
        assert {reply.status_code for reply in replies} <= {200, 201}
        assert len({reply.json()["cubin_base64"] for reply in replies}) == 1
        assert [reply.status_code for reply in replies].count(201) == 1
        asked = [f"{replica.url}{path}" for path in PATHS for replica in replicas * 3]
        with ThreadPoolExecutor(len(asked)) as threads:
            replies = list(threads.map(put, asked))
        assert [reply.status_code for reply in replies].count(201) == len(PATHS)
        assert [reply.status_code for reply in replies].count(200) == len(asked) - len(PATHS)
        assert not [*tmp_path.glob("*/cache/tmp/*"), *redis_server.client().keys("mlaprep:1:lease:*")]


@pytest.mark.slow
def test_B023_a_replica_killed_amid_a_compile_keeps_nobody_waiting_for_long(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        doomed = start(stack, tmp_path / "0", redis_server)
        other = start(stack, tmp_path / "1", redis_server)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(put, f"{doomed.url}{PATH}")
            client = redis_server.client()
            while not asked.done() and not client.keys("mlaprep:1:lease:*"):
                time.sleep(0.001)
            doomed.process.kill()
            began = time.monotonic()
            assert put(f"{other.url}{PATH}").status_code in (200, 201)
            assert time.monotonic() - began < 10
            with contextlib.suppress(httpx.TransportError):
                asked.result(30)


@pytest.mark.slow
def test_B028_a_stopped_redis_costs_a_real_server_a_bounded_delay(redis_server: RedisServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = start(stack, tmp_path, redis_server, MLAPREP_REDIS_TIMEOUT_S="0.25")
        assert put(server.url + PATHS[0]).status_code == 201
        redis_server.pause()
        with ThreadPoolExecutor(16) as threads:
            replies = list(threads.map(put, [server.url + path for path in PATHS[1:] for _ in range(5)]))
        assert {reply.status_code for reply in replies} <= {200, 201}
        assert max(reply.elapsed.total_seconds() for reply in replies) < 15
        assert put(server.url + PATHS[0]).elapsed.total_seconds() < 2
        document = counters(server)
        assert document["ready"]
        assert document["shared"]["state"] == "down"
        redis_server.resume()
        wait_for(lambda: counters(server)["shared"]["state"] == "up")
        wait_for(lambda: len(redis_server.client().keys("mlaprep:1:record:*")) == len(PATHS))


@pytest.mark.slow
def test_B028_requests_that_are_cancelled_never_mix_replies(redis_server: RedisServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = start(stack, tmp_path, redis_server, MLAPREP_MEMORY_MAX_BYTES="0")
        keys = {path: put(server.url + path).json()["manifest"]["key"] for path in PATHS}
        wrong: list[str] = []

        def ask(number: int) -> None:
            path = PATHS[number % len(PATHS)]
            for turn in range(6):
                if number == 0:  # what is not on disk any more is asked of Redis
                    (tmp_path / "cache" / "sm_90a").rename(tmp_path / f"aside-{turn}")
                try:
                    reply = httpx.get(server.url + path, timeout=0.001 * (1 + number) if number % 2 else 30)
                except httpx.TransportError:
                    continue
                if reply.status_code != 200 or reply.json()["manifest"]["key"] != keys[path]:
                    wrong.append(reply.text)

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(ask, range(12)))
        assert wrong == []
        assert counters(server)["shared"]["hits"] > 0


def test_a_service_without_one_says_so(client: Client) -> None:
    assert client.get("/readyz").json()["shared"] is None
