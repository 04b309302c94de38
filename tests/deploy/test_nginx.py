"""deploy/nginx.conf, run by the real nginx in front of the real service."""

import functools
import hashlib
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from deploy_kit import Proxy, ProxyMaker, ends, upstream
from service_kit import SERVE, Server, ServerMaker, running_server, wait_for

from mlaprep.service.settings import Settings

TOKEN = "for-tests"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
KERNEL = f"/v1/kernels/sm_100a/{VARIANT}"
# Half a second a compile, so that a job has a middle.
SLOW = """
import time
import mlaprep.service.compiler as compiler
honest = compiler.CompileChild.compile
def slow(self, source, options, timeout_s):
    time.sleep(0.5)
    return honest(self, source, options, timeout_s)
compiler.CompileChild.compile = slow
"""


@pytest.fixture
def run_service(tmp_path: Path) -> ServerMaker:
    return functools.partial(
        running_server,
        tmp_path / "service",
        MLAPREP_TOKEN=TOKEN,
        MLAPREP_ACCESS_LOG="on",
        MLAPREP_COMPILE_PROCESSES="1",
    )


def fetches(server: Server, digest: str) -> int:
    """How often the service itself was asked for an artifact."""
    return server.log.read_text().count(f"/v1/artifacts/{digest}")


def build(http: httpx.Client) -> str:
    reply = http.put(KERNEL, headers=AUTHORIZED)
    assert reply.status_code == 201, reply.text
    digest: str = reply.json()["manifest"]["cubin_sha256"]
    return digest


def test_an_artifact_is_fetched_once_for_a_fleet(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with run_service() as server, run_nginx(f"127.0.0.1:{server.port}") as proxy:
        with proxy.client() as http:
            digest = build(http)

        def fetch(_: int) -> httpx.Response:
            with proxy.client() as one:
                return one.get(f"/v1/artifacts/{digest}")

        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(fetch, range(32)))
        assert {reply.status_code for reply in replies} == {200}
        assert {hashlib.sha256(reply.content).hexdigest() for reply in replies} == {digest}
        wait_for(lambda: fetches(server, digest))
        assert fetches(server, digest) == 1
        assert sorted({reply.headers["x-cache"] for reply in replies}) == ["HIT", "MISS"]

        with proxy.client() as http:
            path = f"/v1/artifacts/{digest}"
            for tag in (f'"{digest}"', f'W/"{digest}"', f'"other", "{digest}"', "*"):
                reply = http.get(path, headers={"if-none-match": tag})
                assert (reply.status_code, reply.content) == (304, b""), tag
                assert reply.headers["etag"] == f'"{digest}"'
            assert http.get(path, headers={"if-none-match": '"other"'}).status_code == 200
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) == len(replies[0].content)
            assert "immutable" in head.headers["cache-control"]
            assert head.headers["x-content-type-options"] == "nosniff"
            assert head.headers["strict-transport-security"]
        assert fetches(server, digest) == 1

        server.stop()
        with proxy.client() as http:
            assert http.get(f"/v1/artifacts/{digest}").status_code == 200, "with every replica gone"
            gone = http.get(KERNEL)
            assert (gone.status_code, gone.headers["retry-after"]) == (502, "1")


def test_a_revoked_artifact_leaves_the_cache_when_it_is_confirmed(
    run_service: ServerMaker, run_nginx: ProxyMaker
) -> None:
    soon = {"proxy_cache_valid 200 10m": "proxy_cache_valid 200 1s"}
    with run_service() as server, run_nginx(f"127.0.0.1:{server.port}", **soon) as proxy, proxy.client() as http:
        path = f"/v1/artifacts/{build(http)}"
        assert http.get(path).headers["x-cache"] == "MISS"
        # Expired: the bytes at hand are served while the service is asked, by ETag, whether they still hold.
        wait_for(lambda: http.get(path).headers["x-cache"] in ("STALE", "REVALIDATED"))
        wait_for(lambda: http.get(path).headers["x-cache"] == "HIT")
        wait_for(lambda: re.search(rf'"path": "{path}".*"status": 304', server.log.read_text()))
        assert http.delete(KERNEL, headers=AUTHORIZED).status_code == 200
        wait_for(lambda: http.get(path).status_code == 410)


def test_misses_and_private_artifacts_are_not_kept(run_nginx: ProxyMaker) -> None:
    digest = "0" * 64
    answers = iter(
        [
            b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncache-control: private, max-age=9\r\ncontent-length: 1\r\n\r\na",
            b"HTTP/1.1 200 OK\r\ncache-control: private, max-age=9\r\ncontent-length: 1\r\n\r\nb",
            b"HTTP/1.1 200 OK\r\ncache-control: public, max-age=9\r\ncontent-length: 1\r\n\r\nc",
        ]
    )
    with upstream(lambda _: next(answers)) as port, run_nginx(f"127.0.0.1:{port}") as proxy, proxy.client() as http:
        got = [http.get(f"/v1/artifacts/{digest}") for _ in range(5)]
    assert [reply.status_code for reply in got] == [404, 200, 200, 200, 200]
    assert [reply.text for reply in got] == ["", "a", "b", "c", "c"]


def test_a_private_artifact_is_not_kept_when_a_replica_was_passed_over(run_nginx: ProxyMaker) -> None:
    def drains(_: bytes) -> bytes:
        return b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

    def private(_: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncache-control: private\r\nconnection: close\r\ncontent-length: 1\r\n\r\na"

    with (
        upstream(drains) as old,
        upstream(private) as new,
        run_nginx(f"127.0.0.1:{old}", f"127.0.0.1:{new}") as proxy,
        proxy.client() as http,
    ):
        replies = [http.get(f"/v1/artifacts/{'0' * 64}") for _ in range(4)]
        assert {(reply.status_code, reply.headers["x-cache"]) for reply in replies} == {(200, "MISS")}


def test_what_a_token_fetched_is_not_handed_to_a_stranger(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with (
        run_service(MLAPREP_READS_NEED_TOKEN="on") as server,
        run_nginx(f"127.0.0.1:{server.port}") as proxy,
        proxy.client() as http,
    ):
        path = f"/v1/artifacts/{build(http)}"
        answers = [http.get(path, headers=headers).status_code for headers in (AUTHORIZED, {}, AUTHORIZED, {})]
        assert answers == [200, 401, 200, 401]


def test_events_of_a_warm_up_pass_as_they_come(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    plan = {"kernels": [{"spec": {"num_heads": heads}} for heads in (3, 5, 7, 9)], "arch": ["sm_90a"]}
    with (
        run_service(code=SLOW + SERVE) as server,
        run_nginx(f"127.0.0.1:{server.port}") as proxy,
        proxy.client() as http,
    ):
        job = http.post("/v1/warmups", json=plan, headers=AUTHORIZED).json()
        seen: list[tuple[float, dict[str, object]]] = []
        with http.stream("GET", f"/v1/warmups/{job['id']}/events", headers=AUTHORIZED) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    seen.append((time.monotonic(), json.loads(line[5:])))
    states = [event["state"] for _, event in seen]
    assert states[-1] == "done"
    assert "running" in states
    assert len({event["done"] for _, event in seen}) >= 3, "progress, not only the end"
    assert seen[-1][0] - seen[0][0] > 0.8, "all events came at the end"


def test_B053_slow_senders_are_cut_and_healthy_requests_served(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    soon = {
        "client_header_timeout 10s": "client_header_timeout 2s",
        "client_body_timeout 10s": "client_body_timeout 2s",
    }
    with run_service() as server, run_nginx(f"127.0.0.1:{server.port}", **soon) as proxy, proxy.client() as http:
        assert http.get("/healthz").status_code == 200
        slow = [proxy.connect() for _ in range(200)]
        began = time.monotonic()
        for number, connection in enumerate(slow):
            body = (
                f"PUT {KERNEL} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 60\r\n"
            )
            connection.sendall(b"GET /healthz HTT" if number % 2 else f"{body}\r\n{{".encode())
        waits = []
        for _ in range(10):
            sent = time.monotonic()
            assert http.get("/healthz").status_code == 200
            waits.append(time.monotonic() - sent)
        assert max(waits) < 1, waits
        assert KERNEL not in server.log.read_text(), "half a body reached the service"
        # One byte a second does not extend the time for a head.
        trickle = slow[1]
        ended = [ends(connection, trickling=connection is trickle) for connection in slow]
        assert all(ended)
        assert time.monotonic() - began < 15


def test_bodies_and_heads_are_bounded_before_the_service(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with run_service() as server, run_nginx(f"127.0.0.1:{server.port}") as proxy, proxy.client() as http:
        big = b"x" * (Settings().max_body_bytes + 1)
        assert http.post("/v1/warmups", content=big, headers=AUTHORIZED).status_code == 413
        assert http.get("/healthz", headers={"x-long": "x" * 9000}).status_code == 400
        assert "/v1/warmups" not in server.log.read_text()
        # What the service takes, the proxy takes too; this one it refuses for what it is.
        whole = b'"' + b"x" * (Settings().max_body_bytes - 2) + b'"'
        reply = http.post("/v1/warmups", content=whole, headers=AUTHORIZED | {"content-type": "application/json"})
        assert reply.status_code == 422
        assert http.get("/metrics").status_code == 404


def test_a_flood_of_builds_is_told_when_to_come_back(run_nginx: ProxyMaker) -> None:
    def answer(_: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    few = {"rate=50r/s": "rate=1r/s", "burst=200 ": "burst=5 "}
    with upstream(answer) as port, run_nginx(f"127.0.0.1:{port}", **few) as proxy, proxy.client() as http:
        replies = [http.put(KERNEL) for _ in range(20)]
        refused = [reply for reply in replies if reply.status_code == 429]
        assert 10 <= len(refused) <= 14
        assert {reply.headers["retry-after"] for reply in refused} == {"1"}
        assert {http.get(KERNEL).status_code for _ in range(20)} == {200}, "reading is not limited"


def test_a_replica_that_drains_is_passed_over(run_nginx: ProxyMaker) -> None:
    def drains(_: bytes) -> bytes:
        return b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

    def works(_: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    with (
        upstream(drains) as old,
        upstream(works) as new,
        run_nginx(f"127.0.0.1:{old}", f"127.0.0.1:{new}") as proxy,
        proxy.client() as http,
    ):
        assert {http.request(method, KERNEL).status_code for method in ("GET", "PUT") * 4} == {200}


def test_no_request_fails_while_a_replica_is_replaced(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with (
        run_service() as old,
        run_service() as other,
        run_nginx(f"127.0.0.1:{old.port}", f"127.0.0.1:{other.port}", **{"rate=50r/s": "rate=9999r/s"}) as proxy,
        proxy.client() as http,
    ):
        build(http)
        answers: list[int] = []
        replaced = threading.Event()

        def work() -> None:
            with proxy.client() as worker:
                while not replaced.is_set():
                    answers.append(worker.get(KERNEL).status_code)
                    answers.append(worker.put(KERNEL, headers=AUTHORIZED).status_code)

        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(work) for _ in range(4)]
            wait_for(lambda: len(answers) > 40)
            assert old.stop() == 0
            before = len(answers)
            wait_for(lambda: len(answers) > before + 40)
            replaced.set()
        for task in tasks:
            task.result()
        assert set(answers) == {200}
        assert old.log.read_text().count(KERNEL) > 0, "the old replica had no part in it"


def test_a_refusal_of_the_service_keeps_its_own_time(run_nginx: ProxyMaker) -> None:
    def busy(_: bytes) -> bytes:
        return b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n"

    with upstream(busy) as port, run_nginx(f"127.0.0.1:{port}") as proxy, proxy.client() as http:
        assert http.put(KERNEL).headers.get_list("retry-after") == ["7"]


def test_request_ids_pass_both_ways(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with run_service() as server, run_nginx(f"127.0.0.1:{server.port}") as proxy, proxy.client() as http:
        assert http.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = http.get("/healthz").headers["x-request-id"]
        lines = wait_for(lambda: access_log(proxy, made))
        assert lines[0]["status"] == 200


def test_pages_name_the_address_that_people_see(run_service: ServerMaker, run_nginx: ProxyMaker) -> None:
    with (
        run_service(MLAPREP_TRUSTED_PROXIES="127.0.0.1") as server,
        run_nginx(f"127.0.0.1:{server.port}") as proxy,
        proxy.client() as http,
    ):
        page = http.get("/warmups")
        assert page.status_code == 200
        assert f"https://127.0.0.1:{proxy.port}" in page.text
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def access_log(proxy: Proxy, request_id: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (proxy.folder / "access.log").read_text().splitlines()]
    return [line for line in lines if line["request_id"] == request_id]
