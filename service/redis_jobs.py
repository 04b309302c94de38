"""RedisJobs: warm-up jobs in the Redis that replicas share, read and told to stop from any of them.

::

    mlaprep:1:jobs                 ids, scored by when they were made
    mlaprep:1:job:<id>             the job without its plan, JSON
    mlaprep:1:job-plan:<id>        its plan, JSON
    mlaprep:1:job-of:<digest>      id of the latest job for a plan
    mlaprep:1:job-stop:<id>        somebody cancelled it
    mlaprep:1:job-runner:<id>      token of the worker that runs it; gone a few seconds after that worker
    mlaprep:1:job-again:<id>       held by whoever puts it back into the queue
    mlaprep:1:job-runs:<id>        times that it was started
    mlaprep:1:worker               there is a worker; gone a few seconds after the last one
    mlaprep:1:rq:…                 RQ's own: the queue of ids
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis_keys import PREFIX
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.strict_json import parse_strict
from mlaprep.service.job_store import MAX_JOBS, WarmupJob, decode_job, encode_job, is_job_id
from mlaprep.service.rq_queue import queued_ids

ALIVE_S: Final = 6.0
"""How long after its worker a running job, and the word that there is a worker, stay."""
TTL_S: Final = 30 * 86400
WAITS: Final = "waiting for a worker"

_LOOK_S: Final = 0.2
_SETTLE_S: Final = 5.0  # a job may be on its way between the queue and its worker for so long
_RUNS: Final = 3  # a job that three workers died of has had its chances
_MAX_BYTES: Final = 4 * 2**20
_BATCH: Final = 32  # jobs in one call: all of them, with all their failures, take longer than a call may
_INDEX: Final = f"{PREFIX}jobs"
_WORKER: Final = f"{PREFIX}worker"
_SWAP: Final = """
-- KEYS: job-of. ARGV: the id it had, "" for none; the id it gets; seconds.
local held = redis.call('GET', KEYS[1]) or ''
if held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""
_BEAT: Final = """
-- KEYS: runner. ARGV: token, milliseconds. Also takes back what ran out while the server was away.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_FREE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisJobs:
    """Jobs behind one link. Reading and starting raise StoreError while the server is in trouble."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    def put(self, job: WarmupJob) -> WarmupJob:
        """Keep a job as its next revision. Raises StoreError."""
        job = dataclasses.replace(job, revision=job.revision + 1, updated_at=time.time(), note="")
        self._link.run(_put, job)
        return job

    def get(self, job_id: str) -> WarmupJob | None:
        """A job with its plan; one whose worker is gone is interrupted."""
        if not is_job_id(job_id):
            return None
        return self._link.run(_get, job_id)

    def list(self) -> list[WarmupJob]:
        """Every job, the latest first, without their plans."""
        ids = self._link.run(_ids)
        jobs = (
            job for start in range(0, len(ids), _BATCH) for job in self._link.run(_read, ids[start : start + _BATCH])
        )
        return sorted(jobs, key=lambda job: (-job.created_at, job.id))

    def join_or_add(self, job: WarmupJob) -> tuple[WarmupJob, bool]:
        """Keep a new job, unless an equal plan has one that is not finished: then that, and False."""
        job = self.put(job)
        for _ in range(8):
            held = self._link.run(_latest, job.digest)
            other = self.get(held) if held else None
            if other is not None and not other.finished:
                self._link.run(_forget, job.id)
                return other, False
            if self._link.run(_swap, job.digest, held, job.id):
                break
        return job, True

    def ask_to_stop(self, job_id: str) -> None:
        self._link.run(lambda client: client.set(_name("job-stop", job_id), b"", ex=TTL_S))

    def may_go_on(self, job_id: str) -> None:
        """Take back what :meth:`ask_to_stop` told, and give it all its chances anew."""
        self._link.run(lambda client: client.delete(_name("job-stop", job_id), _name("job-runs", job_id)))

    def claim(self, job_id: str, token: str) -> WarmupJob | None:
        """The job, now this worker's; None where another has it, or it is over. Raises StoreError."""
        job = self.get(job_id)
        if job is None or (job.finished and job.state != "interrupted"):
            return None
        return job if self._link.run(_claim, job_id, token) else None

    def release(self, job_id: str, token: str) -> None:
        with contextlib.suppress(StoreError):
            self._link.run(lambda client: client.eval(_FREE, 1, _name("job-runner", job_id), token))

    def beat(self, token: str, job_id: str | None) -> bool:
        """Say that this worker is there and runs a job. False where the job is another's by now."""
        return self._link.run(_beat, token, job_id)

    def put_back(self, enqueue: Callable[[str], None]) -> None:
        """Queue again what lost its worker, or its place in the queue; one that keeps killing them is interrupted."""
        ids = self._link.run(_ids)
        batches = (self._link.run(_stranded, ids[start : start + _BATCH]) for start in range(0, len(ids), _BATCH))
        for job_id in itertools.chain.from_iterable(batches):
            job = self.get(job_id)
            if job is None:
                continue
            if self._link.run(_times_run, job_id) >= _RUNS:
                self.put(dataclasses.replace(job, state="interrupted", finished_at=time.time()))
                continue
            self.put(dataclasses.replace(job, state="queued", finished_at=None))
            enqueue(job_id)


class StopSigns:
    """Whether one running job is to stop: asks a few times a second, however often it is asked."""

    def __init__(self, link: RedisLink, job_id: str) -> None:
        self._link, self._job_id = link, job_id
        self._looked, self._seen = float("-inf"), False

    def __call__(self) -> bool:
        if not self._seen and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            with contextlib.suppress(StoreError):
                self._seen = self._link.run(lambda client: bool(client.exists(_name("job-stop", self._job_id))))
        return self._seen


def _name(kind: str, job_id: str) -> str:
    if not is_job_id(job_id):
        raise ValueError("a job's name is made of its id")
    return f"{PREFIX}{kind}:{job_id}"


def _put(client: Any, job: WarmupJob) -> None:
    pipeline = client.pipeline(transaction=True)
    # What is not over has no end: a Redis that is full may evict what has one.
    kept_s = TTL_S if job.finished else None
    pipeline.set(_name("job", job.id), encode_job(dataclasses.replace(job, plan={})), ex=kept_s)
    if job.plan:
        pipeline.set(_name("job-plan", job.id), json.dumps(job.plan, separators=(",", ":")), ex=kept_s)
    pipeline.zadd(_INDEX, {job.id: job.created_at})
    pipeline.zrange(_INDEX, 0, -MAX_JOBS - 1)
    for old in pipeline.execute()[-1]:
        _forget(client, old.decode("ascii", "replace"))


def _forget(client: Any, job_id: str) -> None:
    client.zrem(_INDEX, job_id)
    if is_job_id(job_id):
        client.delete(*(_name(kind, job_id) for kind in ("job", "job-plan", "job-stop", "job-runs")))


def _get(client: Any, job_id: str) -> WarmupJob | None:
    (job,) = _read(client, [job_id]) or (None,)
    if job is None:
        return None
    with contextlib.suppress(ValueError):
        text = client.getrange(_name("job-plan", job_id), 0, _MAX_BYTES - 1) or "{}"
        plan = parse_strict(text, max_bytes=_MAX_BYTES)
        return dataclasses.replace(job, plan=plan if isinstance(plan, dict) else {})
    return job


def _ids(client: Any) -> list[str]:
    """Of every job, the latest first."""
    ids = (text.decode("ascii", "replace") for text in client.zrevrange(_INDEX, 0, MAX_JOBS - 1))
    return [each for each in ids if is_job_id(each)]


def _read(client: Any, ids: Sequence[str]) -> list[WarmupJob]:
    """Jobs without plans, as their readers are to see them."""
    if not ids:
        return []
    texts, runners = (client.mget([_name(kind, job_id) for job_id in ids]) for kind in ("job", "job-runner"))
    worker = client.exists(_WORKER)
    jobs = []
    for text, runner in zip(texts, runners, strict=True):
        job = decode_job(text) if text else None
        if job is None:
            continue
        if job.state == "running" and runner is None:
            job = dataclasses.replace(job, state="interrupted", revision=job.revision + 1)
        elif job.state == "queued" and not worker:
            job = dataclasses.replace(job, note=WAITS)
        jobs.append(job)
    return jobs


def _latest(client: Any, digest: str) -> str:
    text: bytes = client.getrange(f"{PREFIX}job-of:{digest}", 0, 16)
    return text.decode("ascii", "replace")


def _swap(client: Any, digest: str, held: str, job_id: str) -> bool:
    return bool(client.eval(_SWAP, 1, f"{PREFIX}job-of:{digest}", held, job_id, TTL_S))


def _claim(client: Any, job_id: str, token: str) -> bool:
    if not client.set(_name("job-runner", job_id), token, nx=True, px=round(1000 * ALIVE_S)):
        return False
    client.pipeline().incr(_name("job-runs", job_id)).expire(_name("job-runs", job_id), TTL_S).execute()
    return True


def _times_run(client: Any, job_id: str) -> int:
    text = client.get(_name("job-runs", job_id)) or b"0"
    return int(text) if text.isdigit() and len(text) < 10 else _RUNS


def _beat(client: Any, token: str, job_id: str | None) -> bool:
    client.set(_WORKER, b"", px=round(1000 * ALIVE_S))
    if job_id is None:
        return True
    return bool(client.eval(_BEAT, 1, _name("job-runner", job_id), token, round(1000 * ALIVE_S)))


def _stranded(client: Any, ids: Sequence[str]) -> list[str]:
    """Of these, jobs that were not finished, that nobody runs, and that no queue knows; each is given to one caller."""
    found = []
    lost = {job.id: job for job in _read(client, ids) if job.state in ("queued", "interrupted")}
    for text in client.mget([_name("job", job_id) for job_id in lost]) if lost else ():
        job = decode_job(text) if text else None
        if job is not None and not job.finished and time.time() - job.updated_at > _SETTLE_S:
            found.append(job.id)
    waiting = queued_ids(client) if found else set()
    return [
        job_id
        for job_id in found
        if job_id not in waiting and client.set(_name("job-again", job_id), b"", nx=True, px=round(1000 * _SETTLE_S))
    ]
