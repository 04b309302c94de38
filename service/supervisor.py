"""Supervisor: several processes that answer requests of one address, each a service of its own.

They share what is on disk, or in Redis, and nothing else. The supervisor takes the address, starts the workers, puts
a new one in the place of one that dies, and hands SIGTERM and interrupts on. Should it be killed itself, its workers
drain and end.
"""

import fcntl
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from mlaprep.service.settings import Settings

STARTUP_FAILED: Final = 3
"""Exit status of a service whose worker cannot start; uvicorn has the same."""

_TICK_S: Final = 0.2
_RESTART_PAUSE_S: Final = 1.0
_KILL_AFTER_S: Final = 10.0  # beyond the grace, for a worker that hangs
_PREFIX: Final = "mlaprep-metrics-"
_YOUNG_S: Final = 60.0
_MULTIPROC_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"

_log = logging.getLogger(__name__)
# Nothing of the supervisor's memory is to be in a worker, and fork copies locks that threads hold.
_spawn = multiprocessing.get_context("spawn")


def supervise(
    settings: Settings, listeners: Sequence[socket.socket], on_listening: Callable[[int], None] | None
) -> None:
    """Have ``settings.workers`` processes answer until SIGTERM or an interrupt.

    Raises:
        SystemExit: a worker could not start; it has logged why.
    """
    own = settings.model_copy(update={"compile_processes": share_of_compilers(settings)})
    stop = _Stop()
    with ExitStack() as stack:
        stack.enter_context(_metrics_directory())
        stack.enter_context(stop.on_signals())
        workers = [_Worker(own, listeners) for _ in range(settings.workers)]
        stack.callback(_end, workers, settings.shutdown_grace_s)
        # Before the workers end: while this copy is open, connections are taken that nobody will answer.
        for listener in listeners:
            stack.callback(listener.close)
        while not all(worker.is_ready for worker in workers):
            if stop.wanted:
                return
            if not all(worker.is_alive for worker in workers):
                raise SystemExit(STARTUP_FAILED)
            stop.wait(workers)
        if on_listening is not None:
            on_listening(listeners[0].getsockname()[1])
        while not stop.wanted:
            for place, worker in enumerate(workers):
                if not worker.is_alive:
                    _log.error("worker %d ended with %s; another takes its place", worker.pid, worker.exit_status)
                    time.sleep(_RESTART_PAUSE_S)
                    workers[place] = _Worker(own, listeners)
            stop.wait(workers)


def share_of_compilers(settings: Settings) -> int:
    """Compile processes of each worker: what is configured, shared out, or else one for every core, shared out."""
    compilers = settings.compile_processes or len(os.sched_getaffinity(0))
    return max(1, compilers // settings.workers)


class _Stop:
    """Whether the supervisor was told to stop."""

    def __init__(self) -> None:
        self.wanted = False

    def wait(self, workers: "Sequence[_Worker]") -> None:
        """Until a worker says something or ends, for a moment at most."""
        multiprocessing.connection.wait([worker.sentinel for worker in workers if worker.is_alive], _TICK_S)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        def stop(_signal: int, _frame: FrameType | None) -> None:
            self.wanted = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Worker:
    """One process that answers."""

    def __init__(self, settings: Settings, listeners: Sequence[socket.socket]) -> None:
        self._ready = _spawn.Event()
        self._process = _spawn.Process(target=work, args=(settings, list(listeners), self._ready))
        self._process.start()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_status(self) -> int | None:
        return self._process.exitcode

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def ask_to_end(self) -> None:
        if self.is_alive:
            self._process.terminate()

    def end_by(self, deadline: float) -> None:
        """Wait, and kill it where it hangs."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive:
            self._process.kill()
            self._process.join()


def work(settings: Settings, listeners: Sequence[socket.socket], ready: Any) -> None:
    """What a worker process runs."""
    from mlaprep.service.logs import set_up_logs
    from mlaprep.service.server import answer

    set_up_logs(settings.log_format, settings.log_level, access_log=settings.access_log)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with _held(Path(os.environ[_MULTIPROC_DIR])):
        answer(settings, listeners, lambda _: ready.set(), until=parent.sentinel)


def _end(workers: Sequence[_Worker], grace_s: float) -> None:
    for worker in workers:
        worker.ask_to_end()
    deadline = time.monotonic() + grace_s + _KILL_AFTER_S
    for worker in workers:
        worker.end_by(deadline)


@contextmanager
def _metrics_directory() -> Iterator[None]:
    """Where workers write their counts for each other; a directory of this run unless one is configured."""
    if os.environ.get(_MULTIPROC_DIR):
        yield
        return
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory, _held(Path(directory)):
        os.environ[_MULTIPROC_DIR] = directory
        try:
            yield
        finally:
            del os.environ[_MULTIPROC_DIR]


@contextmanager
def _held(directory: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """A directory that nobody sweeps meanwhile: a lock that ends with the process, however that ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what supervisors left that were killed, once their last worker has ended."""
    for directory in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = directory.stat(follow_symlinks=False)
            # A young one may be about to be held.
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _YOUNG_S:
                with _held(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(directory, ignore_errors=True)
