"""Warm-ups: plans, jobs that survive their process, and /v1/warmups."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_kit import Client, ClientMaker, ServerMaker, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service import job_store as job_store_module
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import CompileFailed, TooManyJobs
from mlaprep.service.job_store import MAX_FAILURES, MAX_JOBS, JobFailure, JobStore, WarmupJob, decode_job, encode_job
from mlaprep.service.jobs import MAX_WAITING, Jobs
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.plans import MAX_KERNELS, WarmupPlan, parse_plan
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
PLAN = {"arch": "sm_100a", "kernels": [{"preset": "kimi-k3", "tp": [8, 16]}]}
LARGE = {"arch": ["sm_100a", "sm_103a"], "kernels": [{"preset": name} for name in ("kimi-k3", "glm-5", "minicpm3-4b")]}


def names(plan: WarmupPlan) -> list[tuple[str, str]]:
    return [(spec.variant_id, str(arch)) for spec, arch in plan.targets]


class TestPlan:
    def test_entries_of_every_kind_make_each_kernel_once(self) -> None:
        plan = parse_plan(
            {
                "arch": ["sm_100a"],
                "kernels": [
                    {"preset": "kimi-k3", "tp": 8},
                    {"variant_id": VARIANT, "arch": ["sm_100a", "sm_90a"]},
                    {"spec": {"num_heads": 12}},
                    {"preset": "kimi-k3", "tp": 8, "set": {"loc_dtype": "i32"}},
                ],
            }
        )
        assert names(plan) == [(VARIANT, "sm_100a"), (VARIANT, "sm_90a"), (VARIANT.replace("i64", "i32"), "sm_100a")]

    def test_defaults_are_every_degree_and_the_default_architectures(self) -> None:
        plan = parse_plan({"kernels": [{"preset": "minicpm3-4b"}]})
        assert {arch for _, arch in plan.targets} == set(DEFAULT_ARCHS)
        assert sorted({spec.num_heads for spec, _ in plan.targets}) == [5, 10, 20, 40]

    def test_a_plan_spelled_out_is_the_same_plan(self) -> None:
        plan = parse_plan(LARGE)
        again = parse_plan(json.loads(json.dumps(plan.to_document())))
        assert set(again.targets) == set(plan.targets)
        assert again.digest == plan.digest

    def test_misses_are_asked_for_where_somebody_knows_them(self) -> None:
        lacking = [(KernelSpec(num_heads=7), Arch("sm_90a"))]
        assert parse_plan({"misses": 5}, lambda most: lacking[:most]).targets == tuple(lacking)
        assert parse_plan({"misses": 5}, lambda most: []).targets == ()
        with pytest.raises(SpecError, match="misses"):
            parse_plan({"misses": 5})

    def test_every_bad_entry_is_named(self) -> None:
        with pytest.raises(SpecError) as caught:
            parse_plan(
                {
                    "arch": ["sm_1"],
                    "bogus\n": 1,
                    "kernels": [
                        7,
                        {"preset": "kimi"},
                        {"variant_id": "../../etc"},
                        {"preset": "kimi-k3", "tp": True},
                        {"preset": "kimi-k3", "spec": {}},
                        {"spec": {"num_heads": 0, "rope_dim": -1}},
                        {"preset": "kimi-k3", "set": {"dtype": "fp64"}},
                        {"variant_id": VARIANT, "arch": []},
                        {"variant_id": VARIANT, "arch": "sm_89"},
                        {"preset": ["kimi-k3"]},
                        {"preset": "kimi-k3", "set": 3},
                        {"variant_id": VARIANT, "x": 1},
                    ],
                    "misses": -1,
                }
            )
        fields = {problem.field for problem in caught.value.problems}
        assert {"arch", "field", "misses", "kernels.0.entry", "kernels.1.preset", "kernels.4.entry"} <= fields
        assert {"kernels.5.num_heads", "kernels.5.rope_dim", "kernels.6.dtype", "kernels.8.pdl"} <= fields
        assert {int(field.split(".")[1]) for field in fields if field.startswith("kernels.")} == set(range(12))
        assert "bogus" not in str(caught.value)

    @pytest.mark.parametrize("odd", [None, [], "kimi-k3", 3, {}, {"kernels": {}}, {"kernels": [{}] * 300}])
    def test_what_is_no_plan_is_refused(self, odd: object) -> None:
        with pytest.raises(SpecError):
            parse_plan(odd)

    def test_a_plan_is_bounded(self) -> None:
        entries = [
            {"spec": {"num_heads": heads, "kv_lora_rank": rank}, "arch": "all"}
            for heads in range(1, 17)
            for rank in range(16, 272, 16)
        ]
        assert len(parse_plan({"kernels": entries}).targets) == 256 * 5
        lacking = [
            (KernelSpec(num_heads=h, kv_lora_rank=r), Arch("sm_90a"))
            for h in range(1, 180)
            for r in range(16, 1024, 16)
        ]
        with pytest.raises(SpecError, match=f"more than {MAX_KERNELS}"):
            parse_plan({"kernels": entries, "misses": MAX_KERNELS}, lambda most: lacking[:most])

    def test_the_digest_tells_plans_apart(self) -> None:
        assert parse_plan(PLAN).digest == parse_plan(PLAN | {"arch": ["sm_100a"]}).digest
        assert parse_plan(PLAN).digest != parse_plan(PLAN | {"arch": "sm_103a"}).digest


class SlowBuilder(Builder):
    """One whose kernels take a while, and some of which fail."""

    pause = 0.02
    refused: frozenset[int] = frozenset()

    def begin(self, spec: KernelSpec, arch: Arch) -> Any:
        if spec.num_heads in self.refused:
            raise CompileFailed("refused", "line 1: no")
        time.sleep(self.pause)
        return super().begin(spec, arch)


@pytest.fixture
def jobs(tmp_path: Path, compiler: Compiler) -> Any:
    store = DiskStore(tmp_path / "cache")
    with SlowBuilder(store, compiler) as builder:
        made = Jobs(builder, JobStore(store.root))
        yield made
        made.close()


def finished(jobs: Jobs, job: WarmupJob) -> WarmupJob:
    def look() -> WarmupJob | None:
        found = jobs.store.get(job.id)
        return found if found is not None and found.finished else None

    found: WarmupJob = wait_for(look, 60)
    return found


class TestJobs:
    def test_a_plan_is_built_and_the_second_time_found_built(self, jobs: Jobs) -> None:
        job, new = jobs.submit(parse_plan(PLAN))
        assert new
        assert job.state == "queued"
        done = finished(jobs, job)
        assert (done.state, done.total, done.built, done.cached, done.failed) == ("done", 2, 2, 0, 0)
        assert done.started_at is not None
        assert done.finished_at is not None
        assert done.revision > job.revision
        again = finished(jobs, jobs.submit(parse_plan(PLAN))[0])
        assert (again.id != done.id, again.built, again.cached) == (True, 0, 2)
        assert [kept.id for kept in jobs.store.list()] == [again.id, done.id]

    def test_an_equal_plan_joins_the_job_that_is_not_finished(self, jobs: Jobs) -> None:
        first, _ = jobs.submit(parse_plan(LARGE))
        second, new = jobs.submit(parse_plan(LARGE))
        assert (second.id, new) == (first.id, False)
        jobs.cancel(first)
        finished(jobs, first)

    def test_failures_are_listed_and_the_rest_is_built(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SlowBuilder, "refused", frozenset({12}))
        job = finished(jobs, jobs.submit(parse_plan(PLAN))[0])
        assert (job.state, job.built, job.failed, job.done) == ("failed", 1, 1, 2)
        assert job.failures == (JobFailure(VARIANT, "sm_100a", job.failures[0].detail),)
        assert "refused" in job.failures[0].detail
        monkeypatch.undo()
        resumed = finished(jobs, jobs.resume(job))
        assert (resumed.id, resumed.state, resumed.built, resumed.cached) == (job.id, "done", 1, 1)

    def test_a_cancelled_job_stops_and_goes_on_when_it_is_resumed(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SlowBuilder, "pause", 0.1)
        job, _ = jobs.submit(parse_plan(LARGE))
        waiting, _ = jobs.submit(parse_plan(PLAN))
        wait_for(lambda: (jobs.store.get(job.id) or job).state == "running")
        assert jobs.cancel(waiting).state == "cancelled"
        jobs.cancel(job)
        stopped = finished(jobs, job)
        assert stopped.state == "cancelled"
        assert stopped.done < stopped.total
        monkeypatch.setattr(SlowBuilder, "pause", 0.0)
        resumed = finished(jobs, jobs.resume(stopped))
        assert (resumed.state, resumed.done, resumed.failed) == ("done", resumed.total, 0)

    def test_closing_leaves_jobs_that_can_be_resumed(self, tmp_path: Path, compiler: Compiler) -> None:
        store = DiskStore(tmp_path / "cache")
        with SlowBuilder(store, compiler) as builder:
            jobs = Jobs(builder, JobStore(store.root))
            running, _ = jobs.submit(parse_plan(LARGE))
            waiting, _ = jobs.submit(parse_plan(PLAN))
            wait_for(lambda: (jobs.store.get(running.id) or running).state == "running")
            jobs.close()
            later = JobStore(store.root)
            assert [(later.get(job.id) or job).state for job in (running, waiting)] == ["interrupted"] * 2
            again = Jobs(builder, later)
            found = later.get(waiting.id)
            assert found is not None
            assert finished(again, again.resume(found)).state == "done"
            again.close()

    def test_too_many_jobs_are_refused(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SlowBuilder, "pause", 1.0)
        started = []
        plans = [parse_plan({"kernels": [{"spec": {"num_heads": heads}}]}) for heads in range(1, MAX_WAITING + 3)]
        started.append(jobs.submit(plans[0])[0])
        wait_for(lambda: (jobs.store.get(started[0].id) or started[0]).state == "running")
        started += [jobs.submit(plan)[0] for plan in plans[1 : MAX_WAITING + 1]]
        with pytest.raises(TooManyJobs):
            jobs.submit(plans[-1])
        for job in started:
            jobs.cancel(job)

    def test_a_kernel_that_somebody_asks_for_does_not_wait_for_a_job(self, jobs: Jobs) -> None:
        job, _ = jobs.submit(parse_plan(LARGE))
        wait_for(lambda: (jobs.store.get(job.id) or job).state == "running")
        began = time.monotonic()
        jobs._builder.get_or_compile(KernelSpec(num_heads=77), Arch("sm_90a"))
        assert time.monotonic() - began < 5
        jobs.cancel(job)
        finished(jobs, job)


class TestStore:
    def job(self, number: int, **more: Any) -> WarmupJob:
        fields = {"id": f"{number:016x}", "digest": "0" * 64, "plan": {}, "total": 3, "created_at": float(number)}
        return WarmupJob(**(fields | more))

    def test_jobs_of_a_dead_process_are_interrupted_and_those_of_a_live_one_are_not(self, tmp_path: Path) -> None:
        root = tmp_path / "cache"
        child = os.fork()
        if not child:
            JobStore(DiskStore(root).root).put(self.job(1, state="running"))
            os._exit(0)
        os.waitpid(child, 0)
        store = JobStore(DiskStore(root).root)
        found = store.get(f"{1:016x}")
        assert found is not None
        assert found.state == "interrupted"
        store.put(self.job(2, state="running"))
        other = JobStore(root)
        object.__setattr__(other, "owner", "elsewhere")
        assert [job.state for job in other.list()] == ["running", "interrupted"]

    def test_a_job_of_another_host_is_interrupted_once_it_is_silent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = JobStore(DiskStore(tmp_path / "cache").root)
        object.__setattr__(store, "owner", "other-host:1:1")
        store.put(self.job(1, state="running"))
        reader = JobStore(tmp_path / "cache")
        assert [job.state for job in reader.list()] == ["running"]
        monkeypatch.setattr(job_store_module, "SILENCE_S", -1.0)
        assert [job.state for job in reader.list()] == ["interrupted"]

    def test_jobs_are_bounded_and_the_oldest_go(self, tmp_path: Path) -> None:
        store = JobStore(DiskStore(tmp_path / "cache").root)
        for number in range(MAX_JOBS + 20):
            store.put(self.job(number, state="done"))
            if number < 20:
                store.ask_to_stop(f"{number:016x}")
        kept = store.list()
        assert len(kept) == MAX_JOBS
        assert len([*(tmp_path / "cache" / "jobs").iterdir()]) == MAX_JOBS  # and no sign to stop of one that is gone
        assert kept[0].id == f"{MAX_JOBS + 19:016x}"

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema":1}', b"\xff" * 100, b'{"schema":9}'])
    def test_a_damaged_file_is_no_job(self, tmp_path: Path, damage: bytes) -> None:
        store = JobStore(DiskStore(tmp_path / "cache").root)
        store.put(self.job(1, state="done", failures=(JobFailure("a", "b", "c"),)))
        (file,) = (tmp_path / "cache" / "jobs").glob("*.json")
        assert JobStore(tmp_path / "cache").list()[0].failures == (JobFailure("a", "b", "c"),)
        file.write_bytes(damage)
        assert JobStore(tmp_path / "cache").list() == []
        assert [path.name for path in (tmp_path / "cache" / "tmp").iterdir()] == []

    @pytest.mark.parametrize("moment", [1e300, -1.0, 253_402_300_800])
    def test_a_time_that_no_calendar_has_is_damage(self, moment: float) -> None:
        assert decode_job(encode_job(self.job(1, state="done"))) is not None
        for name in ("created_at", "started_at", "finished_at"):
            assert decode_job(encode_job(self.job(1, state="done", **{name: moment}))) is None

    def test_without_a_directory_jobs_are_kept_in_memory(self) -> None:
        store = JobStore(None)
        store.put(self.job(1, state="done"))
        assert [job.id for job in store.list()] == [f"{1:016x}"]

    @pytest.mark.parametrize("odd", ["", "..", "../../etc/passwd", "0" * 17, "G" * 16, "0123456789abcde\n"])
    def test_an_id_is_looked_at_before_any_path_is_made(self, tmp_path: Path, odd: str) -> None:
        assert JobStore(DiskStore(tmp_path / "cache").root).get(odd) is None

    def test_failures_are_bounded(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SlowBuilder, "refused", frozenset(range(1, 257)))
        entries = [{"spec": {"num_heads": heads}, "arch": "sm_90a"} for heads in range(1, MAX_FAILURES + 11)]
        job = finished(jobs, jobs.submit(parse_plan({"kernels": entries}))[0])
        assert (len(job.failures), job.failed) == (MAX_FAILURES, MAX_FAILURES + 10)


def ended(client: Client, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        job: dict[str, Any] = client.get(f"/v1/warmups/{job_id}").json()
        return job if job["state"] in ("done", "failed", "cancelled", "interrupted") else None

    found: dict[str, Any] = wait_for(look, 60)
    return found


class TestRoutes:
    def test_a_warm_up_from_start_to_end(self, client: Client) -> None:
        reply = client.request("POST", "/v1/warmups", json=PLAN)
        assert reply.status_code == 202
        job = reply.json()
        assert job["plan"]["kernels"][0]["variant_id"].startswith("mla_prepare-")
        done = ended(client, job["id"])
        assert (done["state"], done["total"], done["done"], done["failures"]) == ("done", 2, 2, [])
        assert client.get(f"/v1/kernels/sm_100a/{VARIANT}").status_code == 200
        (listed,) = client.get("/v1/warmups").json()["warmups"]
        assert listed["id"] == job["id"]
        assert "plan" not in listed
        events = client.get(f"/v1/warmups/{job['id']}/events")
        assert events.headers["content-type"].startswith("text/event-stream")
        event, number, data = events.text.strip().splitlines()
        assert event == "event: progress"
        assert json.loads(data.removeprefix("data: "))["state"] == "done"
        seen = {"last-event-id": number.removeprefix("id: ")}
        assert client.get(f"/v1/warmups/{job['id']}/events", headers=seen).text == ""

    def test_a_malformed_plan_starts_nothing(self, client: Client) -> None:
        body = {"kernels": [{"preset": "no-such"}, {"spec": {"num_heads": 0}}, {"variant_id": VARIANT}]}
        reply = client.request("POST", "/v1/warmups", json=body)
        assert reply.status_code == 422
        assert [problem["field"] for problem in reply.json()["problems"]] == ["kernels.0.preset", "kernels.1.num_heads"]
        assert client.get("/v1/warmups").json() == {"warmups": []}
        big = json.dumps({"kernels": [], "arch": ["sm_90a"] * 20_000}).encode()
        assert client.request("POST", "/v1/warmups", content=big).status_code == 413

    def test_what_workers_lacked_is_a_plan(self, client: Client) -> None:
        client.service.compiler.version()
        client.request("POST", "/v1/misses", json={"misses": [{"variant_id": VARIANT, "arch": "sm_90a"}]})
        job = client.request("POST", "/v1/warmups", json={"misses": 10}).json()
        assert ended(client, job["id"])["built"] == 1
        again = client.request("POST", "/v1/warmups", json={"misses": 10}).json()
        assert again["total"] == 0

    def test_who_may_build_may_warm_up(self, make_client: ClientMaker) -> None:
        client = make_client(token="a-long-secret-token")
        assert client.request("POST", "/v1/warmups", json=PLAN).status_code == 401
        client = make_client(read_only=True)
        assert client.request("POST", "/v1/warmups", json=PLAN).status_code == 403
        assert client.get("/v1/warmups").status_code == 200

    @pytest.mark.parametrize("job_id", ["0" * 16, "..%2f..", "x", "0" * 5000])
    def test_an_unknown_job_is_a_404(self, client: Client, job_id: str) -> None:
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", ""), ("POST", "/resume")):
            assert client.request(method, f"/v1/warmups/{job_id}{path}").status_code == 404

    def test_a_job_is_cancelled_and_resumed(self, client: Client) -> None:
        job = client.request("POST", "/v1/warmups", json=LARGE).json()
        assert client.request("POST", f"/v1/warmups/{job['id']}/resume").status_code == 409
        assert client.request("DELETE", f"/v1/warmups/{job['id']}").status_code == 202
        assert ended(client, job["id"])["state"] in ("cancelled", "done")
        assert client.request("POST", f"/v1/warmups/{job['id']}/resume").status_code == 202
        assert ended(client, job["id"])["state"] == "done"


def test_a_job_survives_its_server(run_server: ServerMaker) -> None:
    """kill -9 in the middle: the next server shows it as interrupted, resumes it, and streams it to the end."""
    with run_server(MLAPREP_COMPILE_PROCESSES="1") as server:
        job = httpx.post(f"{server.url}/v1/warmups", json=LARGE).json()
        wait_for(lambda: httpx.get(f"{server.url}/v1/warmups/{job['id']}").json()["done"] > 1, 30)
        server.process.kill()
        server.process.wait()
    with run_server() as server:
        found = httpx.get(f"{server.url}/v1/warmups/{job['id']}").json()
        assert found["state"] == "interrupted"
        assert httpx.post(f"{server.url}/v1/warmups/{job['id']}/resume").status_code == 202
        with httpx.stream("GET", f"{server.url}/v1/warmups/{job['id']}/events", timeout=60) as events:
            told = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
        assert told[-1]["state"] == "done"
        assert told[-1]["cached"] >= 1
        assert told[-1]["done"] == told[-1]["total"]
        assert server.stop() == 0


def test_eta_is_the_pace_so_far() -> None:
    job = WarmupJob("0" * 16, "", {}, 10, "running", built=2, started_at=100.0)
    assert job.eta_s(104.0) == 16.0
    assert dataclasses.replace(job, built=0).eta_s(104.0) is None
    assert dataclasses.replace(job, state="done").eta_s(104.0) is None
