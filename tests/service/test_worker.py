"""Warm-up jobs of a fleet: replicas on one Redis, and workers that come, go and are killed."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_server import RedisServer, free_port, redis_server
from service_kit import Client, ClientMaker, running_server, wait_for

from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.service import redis_jobs
from mlaprep.service.builder import Builder
from mlaprep.service.errors import TooManyJobs
from mlaprep.service.jobs import MAX_WAITING, new_job
from mlaprep.service.markers import Markers
from mlaprep.service.redis_jobs import WAITS, RedisJobs
from mlaprep.service.rq_queue import QUEUE, RQ_PREFIX, enqueue, rq_package
from mlaprep.service.worker import Worker
from mlaprep.templates.plans import parse_plan

__all__ = ["redis_server"]

PLAN = {"arch": "sm_100a", "kernels": [{"preset": "kimi-k3", "tp": [8, 16]}]}
LARGE = {"arch": ["sm_100a", "sm_103a"], "kernels": [{"preset": name} for name in ("kimi-k3", "glm-5", "minicpm3-4b")]}
WORK = "from mlaprep.clients.cli import main; main()"


@contextlib.contextmanager
def running_worker(folder: Path, url: str, *options: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    environ = {**os.environ, "MLAPREP_REDIS_URL": url, "MLAPREP_CACHE_DIR": str(folder / "cache"), **environment}
    folder.mkdir(exist_ok=True)
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, "worker", *options], env=environ, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def replica(make_client: ClientMaker, tmp_path: Path, redis_server: RedisServer) -> Iterator[Client]:
    client = make_client(cache_dir=tmp_path / "replica", redis_url=redis_server.url, redis_timeout_s=5.0)
    yield client
    assert client.service.shared is not None
    client.service.shared.redis.close()


@pytest.fixture
def link(redis_server: RedisServer) -> Iterator[RedisLink]:
    link = RedisLink(RedisUrl(redis_server.url), 5.0)
    yield link
    link.close()


def state(url: str, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/warmups/{job_id}").json()
    return found


def test_two_replicas_and_a_worker_compile_each_key_once(tmp_path: Path, redis_server: RedisServer) -> None:
    """Both replicas are given the plan: it is one job, seen, streamed and finished on either."""
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                running_server(
                    tmp_path / name,
                    MLAPREP_REDIS_URL=redis_server.url,
                    MLAPREP_COMPILE_PROCESSES="1",
                    MLAPREP_REDIS_TIMEOUT_S="5",
                )
            )
            for name in ("one", "two")
        )
        first = httpx.post(f"{one.url}/v1/warmups", json=LARGE).json()
        assert (first["state"], first["note"]) == ("queued", WAITS)
        second = httpx.post(f"{two.url}/v1/warmups", json=LARGE)
        assert (second.status_code, second.json()["id"]) == (200, first["id"])
        stack.enter_context(running_worker(tmp_path / "worker", redis_server.url, MLAPREP_REDIS_TIMEOUT_S="5"))
        asked = [
            httpx.put(f"{server.url}/v1/kernels/{arch}/{entry['variant_id']}", timeout=30).status_code
            for entry in first["plan"]["kernels"][-2:]
            for arch in entry["arch"]
            for server in (one, two)
        ]
        with httpx.stream("GET", f"{two.url}/v1/warmups/{first['id']}/events", timeout=60) as events:
            told = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
        total = told[-1]["total"]
        assert (told[-1]["state"], told[-1]["done"]) == ("done", total)
        assert told[-1]["built"] + asked.count(201) == total  # compiles of the worker and of both replicas
        assert len(told) > 2
        for server in (one, two):
            assert state(server.url, first["id"])["state"] == "done"
            assert [job["id"] for job in httpx.get(f"{server.url}/v1/warmups").json()["warmups"]] == [first["id"]]
        with redis_server.client() as client:
            assert client.zcard("mlaprep:1:index") == total
            assert not [key for key in client.keys("*") if not key.startswith(b"mlaprep:1:")]
        began = time.monotonic()
        again = httpx.post(f"{two.url}/v1/warmups", json=LARGE).json()
        assert (again["state"], again["cached"], again["built"]) == ("done", total, 0)
        assert time.monotonic() - began < 1


def test_what_a_killed_worker_had_in_hand_is_finished_by_another(
    tmp_path: Path, redis_server: RedisServer, replica: Client
) -> None:
    job = replica.request("POST", "/v1/warmups", json=LARGE).json()

    def now() -> dict[str, Any]:
        found: dict[str, Any] = replica.get(f"/v1/warmups/{job['id']}").json()
        return found

    with running_worker(tmp_path / "a", redis_server.url, MLAPREP_COMPILE_PROCESSES="1") as worker:
        wait_for(lambda: now()["done"] > 1, 30)
        worker.kill()
        worker.wait(10)
    wait_for(lambda: now()["state"] == "interrupted", 15)
    with running_worker(tmp_path / "b", redis_server.url) as worker:
        done = wait_for(lambda: found if (found := now())["state"] == "done" else None, 40)
        assert done["cached"] >= 1
        assert done["done"] == done["total"]
        worker.terminate()
        assert worker.wait(10) == 0


def test_a_stopped_worker_puts_its_job_back(tmp_path: Path, redis_server: RedisServer, replica: Client) -> None:
    job = replica.request("POST", "/v1/warmups", json=LARGE).json()
    path = f"/v1/warmups/{job['id']}"
    with running_worker(tmp_path / "a", redis_server.url, MLAPREP_COMPILE_PROCESSES="1") as worker:
        wait_for(lambda: replica.get(path).json()["done"] > 1, 30)
        worker.terminate()
        assert worker.wait(15) == 0
    assert replica.get(path).json()["state"] == "queued"
    assert replica.request("DELETE", path).json()["state"] == "cancelled"
    with running_worker(tmp_path / "a", redis_server.url, "--burst") as worker:
        assert worker.wait(20) == 0
    assert replica.get(path).json()["state"] == "cancelled"


def test_a_running_job_is_cancelled_from_any_replica(
    tmp_path: Path, redis_server: RedisServer, replica: Client
) -> None:
    job = replica.request("POST", "/v1/warmups", json=LARGE).json()
    path = f"/v1/warmups/{job['id']}"
    with running_worker(tmp_path / "a", redis_server.url, MLAPREP_COMPILE_PROCESSES="1"):
        wait_for(lambda: replica.get(path).json()["done"] > 1, 30)
        assert replica.request("DELETE", path).status_code == 202
        stopped = wait_for(lambda: found if (found := replica.get(path).json())["state"] == "cancelled" else None, 20)
        assert stopped["done"] < stopped["total"]
        assert replica.request("POST", f"{path}/resume").status_code == 202
        wait_for(lambda: replica.get(path).json()["state"] == "done", 40)


def test_a_burst_that_reaches_no_redis_has_done_nothing_and_says_so(tmp_path: Path) -> None:
    url = f"redis://:s3cret-s3cret@127.0.0.1:{free_port()}/0"
    with running_worker(tmp_path / "worker", url, "--burst") as process:
        assert process.wait(30) == 3
    lines = (tmp_path / "worker" / "worker.log").read_text().splitlines()
    assert lines[-1].startswith("error cannot work: redis://127.0.0.1:")
    assert all(json.loads(line)["level"] == "warning" for line in lines[:-1])  # one line an event, as the service has
    assert len(lines) > 1
    assert "s3cret" not in "".join(lines)


def test_a_signal_raises_nothing_within_the_work_that_it_meets(link: RedisLink) -> None:
    worker = Worker(link, Builder.__new__(Builder), Markers.__new__(Markers))
    with worker.stopped_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert worker.is_ending
    worker.run()  # and returns


def test_B028_a_worker_stops_though_redis_does_not_answer(tmp_path: Path, redis_server: RedisServer) -> None:
    with running_worker(tmp_path / "worker", redis_server.url) as worker:
        client = redis_server.client()
        wait_for(lambda: any(row["cmd"] in ("blmove", "brpoplpush", "blpop") for row in client.client_list()), 30)
        redis_server.pause()
        time.sleep(0.2)
        worker.terminate()
        assert worker.wait(20) == 0
        redis_server.resume()


def test_an_entry_that_is_no_job_runs_nothing(tmp_path: Path, redis_server: RedisServer, link: RedisLink) -> None:
    """Whoever writes to the queue names neither a function nor a callback, and no pickle is opened."""
    rq = rq_package()
    marks = [tmp_path / name for name in ("function", "callback")]
    with redis_server.client() as client:
        queue = rq.Queue(QUEUE, connection=client, serializer="json")
        callback = rq.Callback("os.system")
        queue.enqueue_call("os.mkdir", args=[str(marks[0])], on_success=callback, on_failure=callback, timeout=-1)
        queue.enqueue_call("os.mkdir", args=["0" * 16], timeout=-1)
        pickled = rq.Queue(QUEUE, connection=client, serializer="pickle")
        pickled.enqueue_call("os.mkdir", args=[str(marks[1])], timeout=-1)
        link.run(enqueue, "0" * 16)  # which there is not
        with running_worker(tmp_path / "a", redis_server.url, "--burst") as worker:
            assert worker.wait(20) == 0
        assert client.llen(f"{RQ_PREFIX}:queue:{QUEUE}") == 0
    assert not any(mark.exists() for mark in marks)
    assert "Traceback" not in (tmp_path / "a" / "worker.log").read_text()


class TestRecords:
    def test_equal_plans_at_once_are_one_job_and_others_are_bounded(self, replica: Client) -> None:
        jobs = replica.service.jobs
        first, new = jobs.submit(parse_plan(PLAN))
        assert (new, first.note) == (True, WAITS)
        assert jobs.submit(parse_plan(PLAN)) == (first, False)
        plans = [parse_plan({"kernels": [{"spec": {"num_heads": heads}}]}) for heads in range(1, MAX_WAITING + 1)]
        for plan in plans[:-1]:
            jobs.submit(plan)
        with pytest.raises(TooManyJobs):
            jobs.submit(plans[-1])

    def test_a_job_that_kills_its_workers_is_given_up(self, link: RedisLink, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redis_jobs, "_SETTLE_S", 0.001)
        store, queued = RedisJobs(link), []
        job, _ = store.join_or_add(new_job(parse_plan(PLAN)))
        for turn in range(3):
            time.sleep(0.02)
            store.put_back(queued.append)
            assert len(queued) == turn + 1
            assert store.claim(job.id, "a")
            assert store.claim(job.id, "b") is None
            store.release(job.id, "a")
        time.sleep(0.02)
        store.put_back(queued.append)
        given_up = store.get(job.id)
        assert given_up is not None
        assert (given_up.state, len(queued)) == ("interrupted", 3)
        time.sleep(0.02)
        store.put_back(queued.append)
        assert len(queued) == 3

    def test_a_worker_that_was_silent_for_too_long_has_lost_its_job(self, link: RedisLink) -> None:
        store = RedisJobs(link)
        job, _ = store.join_or_add(new_job(parse_plan(PLAN)))
        assert store.claim(job.id, "a")
        assert store.beat("a", job.id)
        assert not store.beat("b", job.id)
        store.release(job.id, "b")
        assert not store.beat("b", job.id)
        store.release(job.id, "a")
        assert store.beat("b", job.id)

    def test_damage_is_no_job(self, link: RedisLink, redis_server: RedisServer) -> None:
        store = RedisJobs(link)
        store.join_or_add(new_job(parse_plan(PLAN)))
        with redis_server.client() as client:
            (place,) = client.keys("mlaprep:1:job:*")
            job_id = place.decode().rpartition(":")[2]
            client.set(f"mlaprep:1:job-plan:{job_id}", '{"kernels":' + "[" * 100_000)
            job = store.get(job_id)
            assert job is not None
            assert job.plan == {}
            client.set(place, b"\x80\x04}")
            client.zadd("mlaprep:1:jobs", {"../../etc": 1})
        assert store.list() == []
        assert store.get("../../etc") is None

    def test_a_redis_that_is_gone_is_told(self, replica: Client, redis_server: RedisServer) -> None:
        redis_server.kill()
        for method, path in (("GET", "/v1/warmups"), ("POST", "/v1/warmups"), ("GET", "/v1/warmups/" + "0" * 16)):
            reply = replica.request(method, path, json=PLAN) if method == "POST" else replica.get(path)
            assert reply.status_code == 503
            assert "retry-after" in reply.headers
        assert replica.get("/healthz").status_code == 200
        for path, methods in replica.get("/openapi.json").json()["paths"].items():
            if path.startswith("/v1/warmups"):
                assert all("503" in described["responses"] for described in methods.values()), path


def test_only_a_job_that_is_over_has_an_end(redis_server: RedisServer, link: RedisLink) -> None:
    """A Redis that is full evicts what has one, and a job that waits must not be among that."""
    store = RedisJobs(link)
    job = store.put(new_job(parse_plan(PLAN)))
    client = redis_server.client()
    names = [name for name in client.scan_iter("*") if job.id.encode() in name and client.type(name) == b"string"]
    assert len(names) == 2
    assert [client.ttl(name) for name in names] == [-1, -1]
    store.put(dataclasses.replace(job, state="done", finished_at=time.time()))
    assert all(client.ttl(name) > 0 for name in names)
