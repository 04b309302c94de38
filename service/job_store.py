"""JobStore: warm-up jobs as small files under the cache directory, so that a restart forgets none."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from mlaprep.kernels_cache.files import TEMPORARY, Folder, new_name
from mlaprep.kernels_cache.strict_json import parse_strict

JobState = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
"""``failed``: some kernels could not be built. ``interrupted``: the process that ran it is gone."""

STATES: Final[tuple[JobState, ...]] = get_args(JobState)
FINISHED: Final[tuple[JobState, ...]] = ("done", "failed", "cancelled", "interrupted")
JOBS: Final = "jobs"
MAX_JOBS: Final = 256
"""Jobs that are kept; of the finished ones the oldest go first."""
MAX_FAILURES: Final = 200
"""Failures that a job lists; it counts all."""
SILENCE_S: Final = 60.0
"""Seconds without a word after which a job of another host counts as interrupted."""

LATEST: Final = 253_402_300_799
"""The last second of the year 9999: a calendar has no later one."""

_SCHEMA: Final = 1
_MAX_FILE_BYTES: Final = 4 * 2**20
_ID: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_CANCEL: Final = "cancel"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobFailure:
    """A kernel that a job could not build."""

    variant_id: str
    arch: str
    detail: str


@dataclass(frozen=True, slots=True)
class WarmupJob:
    """One run of a plan, and how far it is. Times are Unix seconds."""

    id: str
    digest: str
    """Of its plan: an equal plan joins a job that is not finished."""
    plan: dict[str, Any]
    total: int
    state: JobState = "queued"
    built: int = 0
    cached: int = 0
    failed: int = 0
    failures: tuple[JobFailure, ...] = ()
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float = 0.0
    revision: int = 0
    """Grows with every change."""
    note: str = field(default="", compare=False)
    """What it waits for, as its reader was told; not kept."""
    owner: str = field(default="", compare=False)

    @property
    def done(self) -> int:
        """Kernels that are behind it, failures among them."""
        return self.built + self.cached + self.failed

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    def to_document(self, *, with_plan: bool = False) -> dict[str, Any]:
        """The job as JSON values: counts, times in UTC, seconds left, failures."""
        eta = self.eta_s(time.time())
        told: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "total": self.total,
            "done": self.done,
            "built": self.built,
            "cached": self.cached,
            "failed": self.failed,
            "created_at": _utc(self.created_at),
            "started_at": None if self.started_at is None else _utc(self.started_at),
            "finished_at": None if self.finished_at is None else _utc(self.finished_at),
            "eta_s": None if eta is None else round(eta, 1),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "note": self.note,
        }
        return told | {"plan": self.plan} if with_plan else told

    def eta_s(self, now: float) -> float | None:
        """Seconds left at the pace so far; None where there is no pace yet."""
        if self.state != "running" or self.started_at is None or not self.done:
            return None
        return (self.total - self.done) * max(0.0, now - self.started_at) / self.done


def is_job_id(text: str) -> bool:
    """Whether a text can name a job, safe to build a path or a name from."""
    return _ID.fullmatch(text) is not None


class JobRecords(Protocol):
    """Where a job is kept while it runs."""

    def put(self, job: WarmupJob) -> WarmupJob: ...


class JobStore:
    """Jobs by id, one file each, written whole; in memory alone where there is no directory.

    Several processes may share the directory. Only its owner writes a job while it runs; that it is to stop
    is told by a file beside it.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._memory: dict[str, WarmupJob] = {}
        self._warned = False
        self.owner: Final = _process()

    def put(self, job: WarmupJob) -> WarmupJob:
        """Keep a job as its next revision."""
        job = dataclasses.replace(job, revision=job.revision + 1, updated_at=time.time(), owner=self.owner)
        with self._lock:
            self._memory[job.id] = job
            if self._root is not None:
                self._write(self._root, job)
            self._drop_oldest()
        return job

    def get(self, job_id: str) -> WarmupJob | None:
        """A job by its id; one whose process is gone is interrupted."""
        if not is_job_id(job_id):
            return None
        own = self._memory.get(job_id)
        if own is not None and (self._root is None or not own.finished):
            return own
        with contextlib.suppress(OSError), self._folder() as folder:
            return _settled(decode_job(folder.read(f"{job_id}.json", _MAX_FILE_BYTES)), self.owner)
        return own

    def list(self) -> list[WarmupJob]:
        """Every job, the latest first."""
        ids = set(self._memory)
        with contextlib.suppress(OSError), self._folder() as folder:
            ids |= {name.removesuffix(".json") for name in folder.names() if name.endswith(".json")}
        jobs = [job for job in map(self.get, ids) if job is not None]
        return sorted(jobs, key=lambda job: (-job.created_at, job.id))

    def ask_to_stop(self, job_id: str) -> None:
        """Tell the process that runs a job to stop."""
        with contextlib.suppress(OSError), self._folder() as folder:
            folder.write(f"{job_id}.{_CANCEL}", b"", sync=False)

    def is_to_stop(self, job_id: str) -> bool:
        with contextlib.suppress(OSError), self._folder() as folder:
            folder.status(f"{job_id}.{_CANCEL}")
            return True
        return False

    def may_go_on(self, job_id: str) -> None:
        """Take back what :meth:`ask_to_stop` told."""
        with contextlib.suppress(OSError), self._folder() as folder:
            folder.remove(f"{job_id}.{_CANCEL}")

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Folder]:
        if self._root is None:
            raise FileNotFoundError
        with Folder.at(self._root) as root, root.open(JOBS) as folder:
            yield folder

    def _write(self, root: Path, job: WarmupJob) -> None:
        name = new_name("job-")
        try:
            with Folder.at(root) as base, base.make(TEMPORARY) as temporary, base.make(JOBS) as folder:
                try:
                    temporary.write(name, encode_job(job), sync=job.finished)
                    temporary.move(name, folder, f"{job.id}.json")
                except OSError:
                    with contextlib.suppress(OSError):
                        temporary.remove(name)
                    raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("warm-up jobs are kept in memory only, they cannot be written: %s", error.strerror)

    def _drop_oldest(self) -> None:
        finished = sorted((job for job in self._memory.values() if job.finished), key=lambda job: job.created_at)
        for job in finished[: max(0, len(self._memory) - MAX_JOBS)]:
            del self._memory[job.id]
        with contextlib.suppress(OSError), self._folder() as folder:
            names = [name for name in folder.names() if name.endswith(".json")]
            if len(names) <= MAX_JOBS:
                return
            aged = sorted(names, key=lambda name: folder.status(name).st_mtime_ns)
            for name in aged[: len(names) - MAX_JOBS]:
                folder.remove(name)
                with contextlib.suppress(FileNotFoundError):
                    folder.remove(f"{name.removesuffix('.json')}.{_CANCEL}")


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _process() -> str:
    """This process, told from every other: host, pid and the time it started at."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(owner: str) -> bool | None:
    """Whether a process lives; None where that cannot be told from here."""
    host, _, rest = owner.partition(":")
    pid, _, started = rest.partition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    return bool(started) and _start_time(int(pid)) == started


def _settled(job: WarmupJob | None, reader: str) -> WarmupJob | None:
    if job is None or job.finished or job.owner == reader:
        return job
    alive = _is_alive(job.owner)
    if alive is None:
        alive = time.time() - job.updated_at < SILENCE_S
    return job if alive else dataclasses.replace(job, state="interrupted", revision=job.revision + 1)


def encode_job(job: WarmupJob) -> bytes:
    """A job as it is kept."""
    document = {"schema": _SCHEMA} | dataclasses.asdict(job)
    del document["note"]
    return json.dumps(document, separators=(",", ":")).encode()


def decode_job(data: bytes) -> WarmupJob | None:
    """A job from its file; None for one that makes no sense."""
    try:
        document = parse_strict(data, max_bytes=_MAX_FILE_BYTES)
        assert isinstance(document, dict)
        assert document.pop("schema") == _SCHEMA
        failures = tuple(JobFailure(**failure) for failure in document.pop("failures"))
        job = WarmupJob(**document, failures=failures)
        assert is_job_id(job.id)
        assert job.state in STATES
        assert isinstance(job.plan, dict)
        numbers = (job.total, job.built, job.cached, job.failed, job.revision)
        assert all(type(number) is int and number >= 0 for number in numbers)
        times = [job.created_at, job.updated_at, job.started_at, job.finished_at]
        assert all(moment is None or 0 <= moment <= LATEST for moment in times)
    except (AssertionError, KeyError, TypeError, ValueError):
        return None
    return job
