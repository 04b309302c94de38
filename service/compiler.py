"""Compiler: KernelSource and Arch -> KernelArtifact, in a pool of child processes."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.service.child import ChildDied, CompileChild
from mlaprep.service.errors import (
    RETRY_AFTER_S,
    BuilderClosed,
    BuildError,
    CompileCrashed,
    CompileFailed,
    CompilerUnavailable,
    CompileTimeout,
    QueueFull,
)
from mlaprep.service.product import check_source, make_artifact, shown
from mlaprep.service.toolchain import Toolchain, buildable_archs, compile_options
from mlaprep.service.workers import running_future
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import KernelSource

DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_MEMORY_BYTES: Final = 2 * 2**30
DEFAULT_QUEUE_LIMIT: Final = 1024
DEFAULT_RECYCLE_AFTER: Final = 1000
"""Compiles after which a process is replaced: a start costs as much as five of them, 0.25 s."""

_JOIN_TIMEOUT_S: Final = 5.0
_CPU_MARGIN_S: Final = 2.0  # the wall clock is to end a compile; this limit holds where nobody watches it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompilerState:
    """What a readiness check needs to know; taking it starts nothing."""

    status: Literal["idle", "starting", "ready", "unavailable", "closed"]
    version: str | None
    library: str | None
    missing: str | None
    """The library that keeps the compiler from working, where one does."""
    reason: str | None
    pids: tuple[int, ...]
    queued: int
    compiles: int
    crashes: int
    timeouts: int
    recycled: int
    """Processes replaced because they had compiled for long enough."""


@dataclass(frozen=True, slots=True)
class _Job:
    future: "Future[Any]"
    run: Callable[[CompileChild], Any]


class Compiler:
    """A pool of compile processes, started as they are needed, one job each at a time.

    Callers choose a source and an architecture, never an option. Close it, or use it as a context manager:
    its processes are then killed by their pids and reaped. They also end by themselves when this process
    does, however it ends.

    Args:
        processes: how many at most; by default one for every core this process may use.
        timeout_s: wall clock that one compile may take before its process is killed.
        memory_bytes: address space of one process. NVRTC and CuPy map about 0.6 GiB before the first compile.
        queue_limit: jobs that may wait for a process.
        recycle_after: compiles after which a process is replaced by a fresh one.
        command: what to start in place of the real child.
    """

    def __init__(
        self,
        processes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        *,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        recycle_after: int = DEFAULT_RECYCLE_AFTER,
        retry_s: float = RETRY_AFTER_S,
        command: Sequence[str] | None = None,
    ) -> None:
        self.processes: Final = processes or len(os.sched_getaffinity(0))
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._queue_limit = queue_limit
        self._recycle_after = recycle_after
        self._retry_s = retry_s
        self._command = command
        self.forget()
        forget_when_forked(self)

    def compile(self, source: KernelSource, arch: Arch) -> KernelArtifact:
        """The kernel, compiled now, whatever any cache holds.

        Raises:
            CompilerUnavailable: NVRTC is missing; the library is named.
            CompileFailed: the compiler refused, or gave what is no cubin for ``arch``; final for this source.
            CompileTimeout, CompileCrashed, QueueFull, BuilderClosed: nothing is known of the source.
        """
        return self.submit(source, arch).result()

    def submit(self, source: KernelSource, arch: Arch) -> "Future[KernelArtifact]":
        """As :meth:`compile`, at once; the future holds the artifact or the error. It cannot be cancelled."""
        future: Future[KernelArtifact] = running_future()
        try:
            check_source(source.text)
        except CompileFailed as error:
            future.set_exception(error)
            return future
        self._enqueue(_Job(future, lambda child: self._compile_in(child, source, arch)))
        return future

    def version(self) -> str:
        """Exact version of the NVRTC in use, e.g. ``12.9.86``.

        Raises:
            CompilerUnavailable, CompileCrashed, BuilderClosed: it cannot be had.
        """
        return self.toolchain().version

    def archs(self) -> tuple[Arch, ...]:
        """The known architectures that this NVRTC builds; errors as for :meth:`version`."""
        return buildable_archs(self.toolchain())

    def toolchain(self) -> Toolchain:
        """The compiler in use, starting one process if none has run; errors as for :meth:`version`."""
        if (known := self.known_toolchain) is not None:
            return known
        future: Future[Toolchain] = running_future()
        self._enqueue(_Job(future, lambda child: child.toolchain))
        return future.result()

    @property
    def known_toolchain(self) -> Toolchain | None:
        """The compiler in use, if any process has run; starts nothing."""
        return self._toolchain

    def start(self) -> None:
        """Start every process in the background, so that the first kernel does not wait for it.

        Where there was no compiler it is looked for again, once the time to retry has come.
        """
        with self._lock:
            while not self._closed and len(self._threads) < self.processes and self._start_thread():
                pass
            again = self._down is not None and time.monotonic() >= self._down_until and not self._queued
        if again:
            self._enqueue(_Job(running_future(), lambda child: child.toolchain))

    def state(self) -> CompilerState:
        with self._lock:
            toolchain, down = self._toolchain, self._down
            status: Literal["idle", "starting", "ready", "unavailable", "closed"]
            if self._closed:
                status = "closed"
            elif down is not None:
                status = "unavailable"
            elif toolchain is not None:
                status = "ready"
            else:
                status = "starting" if self._threads else "idle"
            return CompilerState(
                status=status,
                version=toolchain.version if toolchain else None,
                library=toolchain.library if toolchain else None,
                missing=down.library if down else None,
                reason=down.reason if down else None,
                pids=tuple(child.pid for child in self._children),
                queued=self._queued,
                compiles=self._compiles,
                crashes=self._crashes,
                timeouts=self._timeouts,
                recycled=self._recycled,
            )

    def close(self) -> None:
        """Kill and reap every process; whatever waits or runs fails with BuilderClosed. Safe to repeat."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for child in self._children:
                child.kill()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.future.set_exception(BuilderClosed())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Back to nothing running, for a forked copy: threads and processes stayed with its parent."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._children: list[CompileChild] = []
        self._idle = 0
        self._queued = 0
        self._toolchain: Toolchain | None = None
        self._down: CompilerUnavailable | None = None
        self._down_until = 0.0
        self._closed = False
        self._compiles = self._crashes = self._timeouts = self._recycled = 0

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                job.future.set_exception(BuilderClosed())
            elif self._down is not None and time.monotonic() < self._down_until:
                job.future.set_exception(self._down.again())
            elif self._queued >= self._queue_limit:
                job.future.set_exception(QueueFull(self._queue_limit))
            else:
                if self._queued >= self._idle and len(self._threads) < self.processes:
                    self._start_thread()
                if self._threads:
                    self._queued += 1
                    self._jobs.put(job)
                else:
                    job.future.set_exception(CompileCrashed("no thread can be started for the compiler"))

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name="mlaprep-compile", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # out of threads or memory: those there are go on
            _log.warning("the compiler goes on with %d threads: %s", len(self._threads), error)
            return False
        self._threads.append(thread)
        return True

    def _work(self) -> None:
        """One thread owns one child: it starts it, talks to it, replaces and reaps it.

        Nothing that a child or a job does ends the thread: a pool must not wear away.
        """
        child: CompileChild | None = None
        while True:
            if child is None:
                # Ahead of the next job, so that it finds a warm process; that job meets a failure again.
                try:
                    child = self._open()
                except BuildError:
                    pass
                except BaseException:
                    _log.exception("a compile process could not be started")
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                self._queued -= job is not None
            if job is None:
                break
            try:
                child = self._renewed(self._settle(job, child))
            except BaseException as error:
                _log.exception("a compile failed in an unforeseen way")
                child = None
                if not job.future.done():
                    job.future.set_exception(CompileCrashed(f"the compiler failed in an unforeseen way: {error!r}"))
        if child is not None:
            self._discard(child)

    def _settle(self, job: _Job, child: CompileChild | None) -> CompileChild | None:
        """Run a job, in a second process if the first dies; returns the child to go on with.

        Raises:
            BaseException: what nobody foresaw. The child is gone then, and the job not settled.
        """
        died: ChildDied | None = None
        for _ in range(2):
            try:
                child = child or self._open()
                result = job.run(child)
            except ChildDied as error:
                died = error
                self._discard(child)
                child = None
                if self._closed:
                    job.future.set_exception(BuilderClosed())
                    return None
                with self._lock:
                    self._crashes += 1
            except CompileTimeout as error:
                job.future.set_exception(error)
                with self._lock:
                    self._timeouts += 1
                self._discard(child)
                return None
            except BuildError as error:
                job.future.set_exception(error)
                return child
            except BaseException:
                self._discard(child)
                raise
            else:
                job.future.set_result(result)
                return child
        job.future.set_exception(CompileCrashed(f"the compiler died, and again when tried anew: {died}"))
        return None

    def _renewed(self, child: CompileChild | None) -> CompileChild | None:
        """The child, or none once it has compiled for long enough: whatever it leaks goes with it."""
        if child is None or child.compiles < self._recycle_after:
            return child
        self._discard(child)
        with self._lock:
            self._recycled += 1
        return None

    def _open(self) -> CompileChild:
        """A child that has greeted.

        Raises:
            CompilerUnavailable: there is no compiler, or the child died twice before it could say so.
            BuilderClosed: the pool was closed meanwhile.
        """
        with self._lock:
            if self._down is not None and time.monotonic() < self._down_until:
                raise self._down.again()
        try:
            try:
                child = self._open_once()
            except ChildDied:
                child = self._open_once()
        except ChildDied as error:
            raise self._note_down(CompilerUnavailable("the compile process", str(error))) from None
        except CompilerUnavailable as error:
            raise self._note_down(error) from None
        with self._lock:
            self._toolchain, self._down = child.toolchain, None
        return child

    def _open_once(self) -> CompileChild:
        child = CompileChild(
            memory_bytes=self._memory_bytes, cpu_s=self._timeout_s + _CPU_MARGIN_S, command=self._command
        )
        with self._lock:
            self._children.append(child)
            closed = self._closed
        try:
            if not closed:
                child.greet()
        except BaseException:
            self._discard(child)
            if not self._closed:
                raise
        if self._closed:
            self._discard(child)
            raise BuilderClosed()
        return child

    def _note_down(self, error: CompilerUnavailable) -> CompilerUnavailable:
        with self._lock:
            is_news = self._down is None or self._down.reason != error.reason
            self._down, self._down_until = error, time.monotonic() + self._retry_s
        if is_news:
            _log.warning("%s", error)
        return error.again()

    def _discard(self, child: CompileChild | None) -> None:
        if child is None:
            return
        try:
            child.close()
        except BaseException:
            _log.exception("compile process %d may not have ended", child.pid)
        with self._lock, contextlib.suppress(ValueError):
            self._children.remove(child)

    def _compile_in(self, child: CompileChild, source: KernelSource, arch: Arch) -> KernelArtifact:
        options = compile_options(arch)
        reply, raw = child.compile(source.text, options, self._timeout_s)
        if type(reply.get("ok")) is not bool or (reply["ok"] and type(reply.get("compile_ms")) is not float):
            child.close()
            raise ChildDied("the compile process sent a reply that makes no sense")
        if not reply["ok"]:
            if reply.get("memory"):
                child.close()  # what it holds is not given back, and the next source would suffer for it
                raise ChildDied("the compiler ran out of memory")
            raise CompileFailed(f"NVRTC refused the source: {reply.get('error')}", shown(reply.get("log")))
        with self._lock:
            self._compiles += 1
        return make_artifact(child.toolchain, source, arch, options, reply, raw)
