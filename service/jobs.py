"""Jobs: runs warm-up plans through the builder, behind whoever waits for a kernel."""

import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.service.builder import Builder, Built, Flight
from mlaprep.service.errors import BuilderClosed, QueueFull, TooManyJobs
from mlaprep.service.job_store import MAX_FAILURES, JobFailure, JobRecords, JobState, JobStore, WarmupJob
from mlaprep.service.markers import Markers
from mlaprep.templates.errors import MlaprepError
from mlaprep.templates.plans import Target, WarmupPlan, parse_plan

MAX_WAITING: Final = 32
"""Jobs that may wait for their turn."""
_SAVE_S: Final = 0.5
"""Seconds between two writes of a running job."""
_POLL_S: Final = 0.2
"""Seconds until a job that waits for compilers looks whether it is to stop."""

_log = logging.getLogger(__name__)


def new_job(plan: WarmupPlan) -> WarmupJob:
    """A job for a plan, under an id of its own."""
    return WarmupJob(secrets.token_hex(8), plan.digest, plan.to_document(), len(plan.targets), created_at=time.time())


def once_more(job: WarmupJob) -> WarmupJob:
    """The same job before its first kernel."""
    return dataclasses.replace(
        job, state="queued", built=0, cached=0, failed=0, failures=(), started_at=None, finished_at=None
    )


def all_there(job: WarmupJob) -> WarmupJob:
    """A job whose kernels are all known to be there."""
    now = time.time()
    return dataclasses.replace(job, state="done", cached=job.total, started_at=now, finished_at=now)


class Jobs:
    """Jobs of this process, one at a time, and a view of those of every process on the same directory.

    As many kernels are in the builder at once as there are compile processes: a kernel that somebody asks for
    waits for one compile at most.
    """

    def __init__(self, builder: Builder, store: JobStore, markers: Markers | None = None) -> None:
        self._builder = builder
        self._markers = markers or Markers(builder)
        self.store: Final = store
        self._lock = threading.Lock()
        self._waiting: deque[tuple[WarmupJob, WarmupPlan]] = deque()
        self._current: str | None = None
        self._stopping: set[str] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, plan: WarmupPlan) -> tuple[WarmupJob, bool]:
        """A job for a plan, and whether it is new: an equal plan that is not finished is joined.

        Raises:
            TooManyJobs: nothing was started.
        """
        with self._lock:
            for job in self.store.list():
                if job.digest == plan.digest and not job.finished:
                    return job, False
            job = new_job(plan)
            if self._markers.holds(plan):
                return self.store.put(all_there(job)), True
            return self._enqueue(job, plan), True

    def resume(self, job: WarmupJob) -> WarmupJob:
        """Run a job that was interrupted, cancelled or failed once more; what it has built is found built.

        Raises:
            SpecError: its plan names what this release does not know.
            TooManyJobs: nothing was started.
        """
        plan = parse_plan(job.plan)
        with self._lock:
            self.store.may_go_on(job.id)
            self._stopping.discard(job.id)
            return self._enqueue(once_more(job), plan)

    def cancel(self, job: WarmupJob) -> WarmupJob:
        """Have a job stop; kernels that are being compiled are finished."""
        with self._lock:
            for waiting in self._waiting:
                if waiting[0].id == job.id:
                    self._waiting.remove(waiting)
                    return self.store.put(dataclasses.replace(job, state="cancelled", finished_at=time.time()))
            self._stopping.add(job.id)
        self.store.ask_to_stop(job.id)
        return job

    def close(self) -> None:
        """Stop what runs; it is kept as interrupted, and so is what waits."""
        with self._lock:
            self._closed = True
            waiting, thread = list(self._waiting), self._thread
            self._waiting.clear()
        for job, _ in waiting:
            self.store.put(dataclasses.replace(job, state="interrupted"))
        if thread is not None:
            thread.join()

    def _enqueue(self, job: WarmupJob, plan: WarmupPlan) -> WarmupJob:
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyJobs(MAX_WAITING)
        job = self.store.put(job)
        self._waiting.append((job, plan))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlaprep-warmup", daemon=True)
            self._thread.start()
        return job

    def _is_to_stop(self, job_id: str) -> bool:
        return job_id in self._stopping or self.store.is_to_stop(job_id)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job, plan = self._waiting.popleft()
            try:
                run = JobRun(
                    self._builder,
                    self.store,
                    self._markers,
                    job,
                    is_to_stop=functools.partial(self._is_to_stop, job.id),
                    is_closing=lambda: self._closed,
                )
                run.through(plan)
            except Exception:  # the next job has its turn whatever became of this one
                _log.exception("warm-up %s ended by a fault of the service", job.id)
                self.store.put(dataclasses.replace(job, state="interrupted"))


class JobRun:
    """One job on its way.

    Args:
        is_to_stop: whether somebody cancelled it.
        is_closing: whether its process is to end; the job is then left as ``left`` says.
    """

    def __init__(
        self,
        builder: Builder,
        store: JobRecords,
        markers: Markers,
        job: WarmupJob,
        *,
        is_to_stop: Callable[[], bool],
        is_closing: Callable[[], bool],
        left: JobState = "interrupted",
    ) -> None:
        self._builder, self._store, self._markers, self._left = builder, store, markers, left
        self._asked_to_stop, self._is_closing = is_to_stop, is_closing
        self._job = store.put(dataclasses.replace(once_more(job), state="running", started_at=time.time()))
        self._saved = time.monotonic()
        self._flying: dict[Future[Built], tuple[Target, Flight]] = {}
        self._manifests: list[Manifest] = []

    def through(self, plan: WarmupPlan) -> WarmupJob:
        """Have every kernel built, and say how it went."""
        # One more than there are compile processes: none of them waits for the next kernel to be looked up.
        window = self._builder.compiler.processes + 1
        stopped = False
        for target in plan.targets:
            if stopped := self._is_to_stop() or not self._start(target):
                break
            while len(self._flying) >= window:
                self._land()
        while self._flying:
            self._land()
        state: JobState = "failed" if self._job.failed else "done"
        if stopped:
            state = "cancelled" if self._asked_to_stop() and not self._is_closing() else self._left
        if state == "done":
            self._markers.note(plan, self._manifests)
        finished_at = None if state == "queued" else time.time()
        return self._store.put(dataclasses.replace(self._job, state=state, finished_at=finished_at))

    def failed(self) -> WarmupJob:
        """The job as one whose plan cannot be gone through."""
        return dataclasses.replace(self._job, state="failed", finished_at=time.time())

    def _is_to_stop(self) -> bool:
        return self._is_closing() or self._asked_to_stop()

    def _start(self, target: Target) -> bool:
        """Have one kernel built, or find it built. False where the job cannot go on."""
        try:
            if (artifact := self._builder.get(*target)) is not None:
                self._note(cached=1, manifest=artifact.manifest)
                return True
            while True:
                try:
                    flight = self._builder.begin(*target)
                except QueueFull:
                    if self._is_to_stop():
                        return False
                    time.sleep(_POLL_S)
                else:
                    break
        except BuilderClosed:
            return False
        except MlaprepError as error:
            self._fail(target, error)
            return True
        self._flying[flight.future] = (target, flight)
        return True

    def _land(self) -> None:
        landed, _ = wait(self._flying, _POLL_S, FIRST_COMPLETED)
        for future in landed:
            target, flight = self._flying.pop(future)
            try:
                built = flight.settle(future.result())
            except MlaprepError as error:
                self._fail(target, error)
            else:
                cached = int(built.cached)
                self._note(built=1 - cached, cached=cached, manifest=built.artifact.manifest)

    def _fail(self, target: Target, error: MlaprepError) -> None:
        spec, arch = target
        self._note(failure=JobFailure(spec.variant_id, str(arch), str(error)))

    def _note(
        self,
        built: int = 0,
        cached: int = 0,
        failure: JobFailure | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        job = self._job
        if manifest is not None:
            self._manifests.append(manifest)
        failures = job.failures if failure is None else (*job.failures, failure)[:MAX_FAILURES]
        self._job = dataclasses.replace(
            job,
            built=job.built + built,
            cached=job.cached + cached,
            failed=job.failed + (failure is not None),
            failures=failures,
        )
        if time.monotonic() - self._saved >= _SAVE_S:
            self._job = self._store.put(self._job)
            self._saved = time.monotonic()
