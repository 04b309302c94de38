"""Workers: a bounded queue of calls, run by a few threads that never keep a process from exiting."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from mlaprep.service.errors import BuilderClosed, QueueFull

T = TypeVar("T")

_JOIN_TIMEOUT_S: Final = 5.0


class PassedOn(Exception):
    """Raised by a call that has given its future to somebody else, who settles it."""


class Workers:
    """Up to ``threads`` daemon threads, started as calls come in.

    A ThreadPoolExecutor would join its threads when the interpreter ends, and a compile may take its whole
    deadline.
    """

    def __init__(self, threads: int, queue_limit: int, name: str = "mlaprep-build") -> None:
        self._name = name
        self._limit = threads
        self._queue_limit = queue_limit
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = 0
        self._idle = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Calls that no thread has taken up yet."""
        return self._waiting

    def submit(self, call: Callable[[], T], future: "Future[T] | None" = None) -> "Future[T]":
        """Run a call soon; the future, new if none is given, cannot be cancelled, since several may wait for it.

        Raises:
            QueueFull: ``queue_limit`` calls wait already, or there is no thread and none can be started.
            BuilderClosed: :meth:`close` came first.
        """
        future = future or running_future()
        with self._lock:
            if self._closed:
                raise BuilderClosed()
            if self._waiting >= self._queue_limit:
                raise QueueFull(self._queue_limit)
            if self._waiting >= self._idle and len(self._threads) < self._limit:
                self._start_thread()
            if not self._threads:
                raise QueueFull(self._queue_limit)
            self._waiting += 1
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Fail what waits, let each thread finish its call, for a short while. Safe to repeat."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._calls.get_nowait()) is not None:
                    item[0].set_exception(BuilderClosed())
        for _ in threads:
            self._calls.put(None)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        with contextlib.suppress(RuntimeError):  # out of threads or memory: those there are go on
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            item = self._calls.get()
            with self._lock:
                self._idle -= 1
                self._waiting -= item is not None
            if item is None:
                return
            future, call = item
            try:
                result = call()
            except PassedOn:
                pass
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call  # a thread at rest keeps no kernel alive


def running_future() -> "Future[Any]":
    """A future that no waiter can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
