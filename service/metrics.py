"""Metrics: what a Prometheus server is told, of this process or of all workers of one service.

Requests and compiles are counted as they happen. Everything else is read out of the parts' own counts at the moment it
is asked for, so that no part knows of metrics.

Several workers (`mlaprep serve --workers`) write their counts to files in ``PROMETHEUS_MULTIPROC_DIR``, as
prometheus_client does, and any of them tells the sum: counts of a worker that died stay in it, gauges of one do not.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, StoreStats, TieredStore
from mlaprep.service.hot_artifacts import HOT_ROUTE, HotCounts
from mlaprep.service.job_store import JobState
from mlaprep.service.release import release_version
from mlaprep.service.state import Service

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that prometheus_client reads when it is imported."""
PUBLISH_S: Final = 1.0
"""Seconds between two times that a worker writes what it reads out of its parts."""

_REQUEST_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COMPILE_SECONDS: Final = (0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
_STATES: Final[tuple[JobState, ...]] = get_args(JobState)


class Metrics:
    """The metrics of one application, in a registry of its own.

    Args:
        service: whose parts are read.
        draining: whether it is stopping.
    """

    def __init__(self, service: Service, draining: Callable[[], bool]) -> None:
        self._service = service
        self._draining = draining
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the time of birth of every series, which doubles a scrape
        self.registry: Final = CollectorRegistry()
        self.shared: Final = bool(os.environ.get(DIRECTORY))
        if not self.shared:  # in files of several processes it has no place
            ProcessCollector(registry=self.registry)
        self._totals: dict[tuple[str, ...], float] = {}
        self._publishing = threading.Lock()  # two scrapes at once would both add what a count has grown by
        self._requests = self._counter("requests", "Requests answered.", "method", "route", "status")
        self._seconds = self._histogram(
            "request_seconds", "Time from a request to the end of its reply.", _REQUEST_SECONDS, "route"
        )
        self._bytes = self._counter("response_bytes", "Bytes of bodies sent.", "route")
        self._compiles = self._counter("compiles", "Compiles, by what came of them.", "result")
        self._compile_seconds = self._histogram(
            "compile_seconds", "Time that NVRTC took for a kernel.", _COMPILE_SECONDS
        )
        self._routes: dict[tuple[str, str, int], _Route] = {}
        self.hot: Final = HotCounts()
        """Replies that no layer but the outermost sees; they are too quick to be timed one by one."""
        self._ready = self._gauge("ready", "Whether this process can do its work.", "livemin")
        self._info = self._gauge(
            "build_info", "Versions of the release and of its compiler.", "livemax", "version", "nvrtc"
        )
        self._running = self._gauge("requests_running", "Requests that are being answered.", "livesum")
        self._streams = self._gauge("event_streams", "Streams of events that are open.", "livesum")
        self._compiles_running = self._gauge(
            "compiles_running", "Kernels that are being compiled, or wait for it.", "livesum"
        )
        self._queue = self._gauge("compile_queue", "Kernels that wait for a compiler.", "livesum")
        self._processes = self._gauge("compile_processes", "Compile processes that live.", "livesum")
        self._crashes = self._counter("compiler_crashes", "Compile processes that died.")
        self._timeouts = self._counter("compiler_timeouts", "Compiles that were killed at their deadline.")
        self._joined = self._counter(
            "compiles_joined", "Requests that waited for a compile somebody else had asked for."
        )
        self._remembered = self._counter("failures_remembered", "Requests told of a failure that was known already.")
        self._lookups = self._counter("lookups", "Kernels that were asked for, by whether they were built.", "result")
        self._hits = self._counter("store_hits", "Kernels that a tier of the store had.", "tier")
        self._misses = self._counter("store_misses", "Kernels that no tier of the store had.")
        self._by_tier = {
            name: self._counter(f"store_{name}", text, "tier")
            for name, text in (
                ("damaged", "Entries that were found damaged; each was a miss."),
                ("quarantined", "Damaged entries that were set aside."),
                ("evictions", "Entries removed for room."),
                ("write_errors", "Publications that a tier could not keep."),
                ("differing", "Publications whose bytes differed from the good ones that were there."),
            )
        }
        self._entries = self._gauge("store_entries", "Kernels that a tier holds.", "livemax", "tier")
        self._stored = self._gauge("store_bytes", "Bytes of kernels that a tier holds.", "livemax", "tier")
        self._revoked = self._gauge("revocations", "Kernels that must not be used.", "livemostrecent")
        self._missing = self._gauge(
            "missing_variants", "Variants and architectures that workers lacked.", "livemostrecent"
        )
        self._access = self._counter(
            "access", "Requests for which a scope was asked, by what they were told.", "outcome"
        )
        self._jobs = self._gauge("warmups", "Warm-up jobs that are kept.", "livemostrecent", "state")
        self._kernels = self._gauge(
            "warmup_kernels", "Kernels of unfinished warm-up jobs.", "livemostrecent", "outcome"
        )
        self._redis_up = self._gauge(
            "redis_up", "Whether the shared tier answers; absent where there is none.", "livemin", "place"
        )
        self._redis = self._counter("redis_events", "What became of requests to the shared tier.", "event")
        self._owed = self._gauge(
            "redis_owed", "Kernels that will be published once the shared tier takes them.", "livesum"
        )

    def request_done(self, route: str, method: str, status: int, seconds: float, sent: int) -> None:
        """Count one request; ``route`` is a template and never a path."""
        key = (route, method, status)
        known = self._routes.get(key)
        if known is None:
            word = method if method in _METHODS else "other"
            known = _Route(
                self._requests.labels(word, route, str(status)), self._seconds.labels(route), self._bytes.labels(route)
            )
            if word == method:  # what somebody made up is not kept
                self._routes[key] = known
        known.requests.inc()
        known.seconds.observe(seconds)
        known.sent.inc(sent)

    def compiled(self, outcome: KernelArtifact | Exception) -> None:
        """Count a kernel that was compiled, or a compile that gave none."""
        if isinstance(outcome, KernelArtifact):
            self._compiles.labels("ok").inc()
            self._compile_seconds.observe(outcome.manifest.compile_ms / 1e3)
        else:
            self._compiles.labels(_snake(type(outcome).__name__)).inc()

    def publish(self) -> None:
        """Read the counts of this process's parts. Touches the disk, so it belongs on no event loop."""
        with self._publishing:
            self._publish_all(self._service)

    def _publish_all(self, service: Service) -> None:
        builder, compiler = service.builder.stats(), service.compiler.state()
        is_ready = not self._draining() and (service.settings.read_only or compiler.status == "ready")
        self._ready.set(is_ready)
        self._info.labels(release_version(), compiler.version or "").set(1)
        self._streams.set(service.streams.open)
        self._compiles_running.set(builder.building)
        self._queue.set(max(builder.waiting, compiler.queued))
        self._processes.set(len(compiler.pids))
        if self.hot.replies:
            self._raise_to(self._requests, self.hot.replies, "GET", HOT_ROUTE, "200")
            self._raise_to(self._bytes, self.hot.sent, HOT_ROUTE)
        self._raise_to(self._crashes, compiler.crashes)
        self._raise_to(self._timeouts, compiler.timeouts)
        self._raise_to(self._joined, builder.joined)
        self._raise_to(self._remembered, builder.remembered_failures)
        self._raise_to(self._lookups, builder.hits, "built")
        self._raise_to(self._lookups, builder.misses, "not built")
        for outcome, count in vars_of(service.access.stats()):
            self._raise_to(self._access, count, outcome)
        self._publish_store(service.store)
        if service.shared is not None:
            self._publish_shared(service.shared)

    def text(self) -> bytes:
        """Everything as of now, in Prometheus' text format. Touches the disk."""
        self.publish()
        self._publish_common(self._service)
        if not self.shared:
            return generate_latest(self.registry)
        bury_dead(Path(os.environ[DIRECTORY]))
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def running(self, count: int) -> None:
        """How many requests are being answered."""
        self._running.set(count)

    def families(self) -> frozenset[str]:
        """Names of this project's metrics, as Prometheus shows them, without endings such as ``_bucket``."""
        return frozenset(family.name for family in self.registry.collect() if family.name.startswith("mlaprep"))

    def close(self) -> None:
        """Take this worker's gauges out of the sum."""
        if self.shared:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]

    def _publish_store(self, store: KernelStore) -> None:
        tiers = store.tiers if isinstance(store, TieredStore) else (store,)
        misses = store.stats().misses
        self._raise_to(self._misses, misses)
        for tier in tiers:
            name, stats = _tier_name(tier), tier.snapshot().store if isinstance(tier, RedisStore) else tier.stats()
            self._raise_to(self._hits, stats.hits, name)
            for metric, count in _troubles(stats).items():
                self._raise_to(self._by_tier[metric], count, name)
            self._entries.labels(name).set(stats.entries)
            self._stored.labels(name).set(stats.bytes)

    def _publish_common(self, service: Service) -> None:
        """What all workers share. Reading it takes as long as it is, so only the one that is asked does."""
        self._revoked.set(len(service.builder.revocations.list()))
        self._missing.set(service.misses.page("count", 1).total)
        self._publish_jobs()

    def _publish_jobs(self) -> None:
        states, kernels = dict.fromkeys(_STATES, 0), dict.fromkeys(("built", "cached", "failed", "left"), 0)
        try:
            jobs = self._service.jobs.store.list()
        except StoreError:  # the jobs are in a Redis that is down; that it is must be told all the same
            return
        for job in jobs:
            states[job.state] += 1
            if not job.finished:
                kernels["built"] += job.built
                kernels["cached"] += job.cached
                kernels["failed"] += job.failed
                kernels["left"] += job.total - job.done
        for state, count in states.items():
            self._jobs.labels(state).set(count)
        for outcome, count in kernels.items():
            self._kernels.labels(outcome).set(count)

    def _publish_shared(self, shared: RedisStore) -> None:
        stats = shared.snapshot()
        self._redis_up.labels(stats.place).set(stats.link.state == "up")
        self._owed.set(stats.owed)
        for event, count in (
            ("timeout", stats.link.timeouts),
            ("error", stats.link.errors),
            ("breaker_opened", stats.link.opened),
            ("lease", stats.leases.acquired),
            ("lease_wait", stats.leases.waits),
        ):
            self._raise_to(self._redis, count, event)

    def _raise_to(self, counter: Counter, count: float, *labels: str) -> None:
        """A part's own count is taken over: what it has grown by since the last time."""
        place = (str(id(counter)), *labels)
        before = self._totals.get(place, 0.0)
        child = counter.labels(*labels) if labels else counter
        child.inc(count - before if count >= before else count)
        self._totals[place] = count

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlaprep_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, mode: Any, *labels: str) -> Gauge:
        return Gauge(f"mlaprep_{name}", text, labels, registry=self.registry, multiprocess_mode=mode)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"mlaprep_{name}", text, labels, registry=self.registry, buckets=tuple(buckets))


@dataclass(frozen=True, slots=True)
class _Route:
    """The metrics of one route, method and status, looked up once."""

    requests: Counter
    seconds: Histogram
    sent: Counter = field(repr=False)


def bury_dead(directory: Path) -> None:
    """Take the gauges of workers that died without a word out of the sum."""
    pids = {int(path.stem.rpartition("_")[2]) for path in directory.glob("gauge_live*.db")}
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            with contextlib.suppress(FileNotFoundError):  # another worker was faster, and takes the rest too
                mark_process_dead(pid, str(directory))  # type: ignore[no-untyped-call]
        except PermissionError:
            pass


def vars_of(stats: Any) -> Iterable[tuple[str, int]]:
    """Names and counts of a frozen value of counts."""
    return ((name, getattr(stats, name)) for name in stats.__slots__)


def _troubles(stats: StoreStats) -> dict[str, int]:
    return {
        "damaged": stats.damaged,
        "quarantined": stats.quarantined,
        "evictions": stats.evicted,
        "write_errors": stats.write_errors,
        "differing": stats.differing,
    }


def _tier_name(tier: KernelStore) -> str:
    match tier:
        case MemoryStore():
            return "memory"
        case DiskStore():
            return "disk"
        case RedisStore():
            return "redis"
    return "other"


def _snake(name: str) -> str:
    """``CompileFailed`` as ``compile_failed``."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
