"""Worker: runs warm-up jobs from the shared queue, one at a time, until it is told to stop."""

import contextlib
import importlib
import logging
import secrets
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.service.builder import Builder
from mlaprep.service.job_store import WarmupJob, is_job_id
from mlaprep.service.jobs import JobRun
from mlaprep.service.markers import Markers
from mlaprep.service.redis_jobs import ALIVE_S, RedisJobs, StopSigns
from mlaprep.service.rq_queue import ENTRY_POINT, QUEUE, enqueue, rq_package
from mlaprep.service.settings import Settings
from mlaprep.service.state import Service
from mlaprep.templates.errors import FieldProblem, MlaprepError, SpecError
from mlaprep.templates.plans import parse_plan

_BEAT_S: Final = ALIVE_S / 4
_PAUSE_S: Final = 1.0
_ANSWER_S: Final = 3  # that Redis may take
_WAIT_S: Final = 1  # for an entry of the queue, before it is asked whether to go on

_log = logging.getLogger(__name__)


def work(settings: Settings, *, burst: bool = False) -> None:
    """Run jobs until SIGTERM or an interrupt; a job that runs then goes back into the queue. Call it from the main
    thread.

    Args:
        burst: return as soon as nothing waits.

    Raises:
        SpecError: settings that name no Redis, or one that cannot be used.
        StoreError: RQ is not installed; with ``burst`` also where Redis does not answer, so that nothing was done.
    """
    if settings.redis_url is None:
        raise SpecError(FieldProblem("MLAPREP_REDIS_URL", "no Redis", "the one that the service's replicas share"))
    rq_package()
    service = Service.assemble(settings)
    assert service.shared is not None
    try:
        service.compiler.start()
        worker = Worker(service.shared.redis, service.builder, Markers(service.builder, service.shared))
        with worker.stopped_by_signals(), worker.beating():
            worker.run(burst=burst)
    finally:
        service.close()


class Worker:
    """Takes jobs from RQ's queue and goes through their plans with a builder.

    While it lives it says so; what a worker that was killed had in hand is put back by the others.
    """

    def __init__(self, link: RedisLink, builder: Builder, markers: Markers) -> None:
        self._link, self._builder, self._markers = link, builder, markers
        self.url: Final = link.url
        self._store = RedisJobs(link)
        self._token = secrets.token_hex(16)
        self._current: str | None = None
        self._superseded = False
        self._ending = threading.Event()

    def run(self, *, burst: bool = False) -> None:
        """Work until it is told to stop, over every loss of the connection; with ``burst`` that is a StoreError."""
        errors = importlib.import_module("redis.exceptions")
        while not self._ending.is_set():
            try:
                _rq_worker(self).work(burst=burst, logging_level="ERROR")
            except errors.RedisError as error:
                told = f"{self._link.url} does not answer ({type(error).__name__})"
                if burst:
                    raise StoreError(told) from None
                _log.warning("warm-ups: %s", told)
            if burst:
                return
            self.rest()

    def run_job(self, job_id: str) -> None:
        """Go through one job's plan, unless another does or it is over. Raises StoreError."""
        job = self._store.claim(job_id, self._token)
        if job is None:
            return
        self._superseded, self._current = False, job_id
        try:
            run = JobRun(
                self._builder,
                _Progress(self._store, self),
                self._markers,
                job,
                is_to_stop=StopSigns(self._link, job_id),
                is_closing=lambda: self._ending.is_set() or self._superseded,
                left="queued",
            )
            try:
                left = run.through(parse_plan(job.plan))
            except SpecError:  # of another release
                self._store.put(run.failed())
                raise
            if left.state == "queued" and not self._superseded:
                self._link.run(enqueue, job_id)
        finally:
            self._current = None
            self._store.release(job_id, self._token)

    @property
    def is_superseded(self) -> bool:
        """Whether the job in hand has become another worker's, because this one was silent for too long."""
        return self._superseded

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def stop(self) -> None:
        self._ending.set()

    def rest(self) -> None:
        """After a call that Redis did not answer: a pause that ends with the worker."""
        self._ending.wait(_PAUSE_S)

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """SIGTERM and an interrupt stop the worker, in the middle of a job too.

        The handler raises nothing: an exception that comes up within RQ's or redis-py's own work can be swallowed
        there, and then nothing would ever stop the worker.
        """

        def stop(_signal: int, _frame: FrameType | None) -> None:
            self._ending.set()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Say that the worker is there, and look for jobs that lost theirs."""
        over = threading.Event()

        def beat() -> None:
            while True:
                try:
                    self._superseded |= not self._store.beat(self._token, self._current)
                    self._store.put_back(lambda job_id: self._link.run(enqueue, job_id))
                except StoreError:
                    pass
                except Exception:  # a worker that is silent loses its job
                    _log.exception("warm-ups: a fault of the worker, which goes on")
                if over.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=beat, name="mlaprep-worker-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Progress:
    """A job's records while it runs: a server in trouble costs progress that is seen, and not the job."""

    def __init__(self, store: RedisJobs, worker: Worker) -> None:
        self._store, self._worker = store, worker

    def put(self, job: WarmupJob) -> WarmupJob:
        if not self._worker.is_superseded:
            with contextlib.suppress(StoreError):
                return self._store.put(job)
        return job


def run_entry(job_id: str) -> None:
    """What an entry of the queue names; only a worker of this package runs it, and in its own way."""
    raise RuntimeError(f"the warm-up {job_id} is for `mlaprep worker`")


def _rq_worker(worker: Worker) -> Any:
    """An RQ worker that only ever calls :meth:`Worker.run_job`, in this process and under our signals."""
    rq, errors = rq_package(), importlib.import_module("redis.exceptions")

    class Entry(importlib.import_module("rq.job").Job):  # type: ignore[misc]
        func_name = ENTRY_POINT
        success_callback = failure_callback = stopped_callback = None

        def perform(self) -> None:
            try:
                (job_id,) = self.args
            except (rq.exceptions.DeserializationError, TypeError, ValueError):
                job_id = None
            if not (isinstance(job_id, str) and is_job_id(job_id)):
                _log.warning("warm-ups: an entry of the queue names no job and is dropped")
                return
            try:
                worker.run_job(job_id)
            except MlaprepError as error:
                _log.warning("warm-up %s was left: %s", job_id, error)

        def send_webhooks(self, *_: object, **__: object) -> None:
            pass

    class RqWorker(rq.SimpleWorker):  # type: ignore[misc, name-defined]
        def _install_signal_handlers(self) -> None:
            pass

        @property
        def dequeue_timeout(self) -> int:
            return _WAIT_S

        @property
        def connection_timeout(self) -> int:
            return _ANSWER_S

        def subscribe(self) -> None:  # commands over pub/sub: anybody's who reaches the Redis
            pass

        def perform_job(self, job: Any, queue: Any, execution: Any) -> bool:
            done: bool = super().perform_job(job, queue, execution)
            self._stop_requested = worker.is_ending
            return done

        def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
            """RQ's own waits for up to 15 s, and for ever on a Redis that does not answer; this one can be stopped."""
            told = False
            while not worker.is_ending:
                try:
                    self.set_state(rq.worker.WorkerStatus.IDLE)
                    self.heartbeat()
                    if self.should_run_maintenance_tasks:
                        self.run_maintenance_tasks()
                    found = self.queue_class.dequeue_any(
                        self._ordered_queues,
                        timeout,
                        connection=self.connection,
                        job_class=self.job_class,
                        serializer=self.serializer,
                        death_penalty_class=self.death_penalty_class,
                    )
                    if found is not None:
                        found[0].redis_server_version = self.get_redis_server_version()
                    return found
                except rq.exceptions.DequeueTimeout:
                    told = False
                except errors.RedisError as error:
                    if timeout is None:  # a burst
                        raise
                    if not told:
                        told = True
                        _log.warning("warm-ups: %s does not answer (%s)", worker.url, type(error).__name__)
                    worker.rest()
            raise rq.exceptions.StopRequested

    return RqWorker(
        [QUEUE],
        connection=worker._link.url.connect(socket_connect_timeout=5.0),
        serializer="json",
        job_class=Entry,
        log_job_description=False,
        worker_ttl=30,
    )
