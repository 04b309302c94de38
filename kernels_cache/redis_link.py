"""RedisLink: every call to a shared Redis, within a time budget and behind a circuit breaker.

A call runs on a thread of the link and its caller waits for the budget, no longer: not for a server that was
stopped, a name that does not resolve or a handshake that hangs. A connection belongs to one call from its first byte
to its last, and is closed where the call was not answered in time, so that no reply is ever another caller's.

The first call that fails opens the breaker. From then on calls are refused at once, a thread of the link's own
knocks at the server, and closes the breaker when it answers. No caller pays for that.
"""

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeVar, TypeVarTuple, Unpack

from mlaprep.kernels_cache.errors import SharedStoreDown, SharedStoreRefusal, StoreError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.redis_url import RedisUrl, redis_package

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BUDGET_S: Final = 0.25
"""Seconds that a call may take, all its round trips together."""
THREADS: Final = 8
"""Calls of one process at once, and so its connections."""

_FIRST_KNOCK_S: Final = 0.1
_LONGEST_KNOCK_S: Final = 2.0
_STEADY_S: Final = 10.0
_EVIDENCE_S: Final = 2.0  # an answer that old says nothing of now

LinkState = Literal["up", "down", "closed"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Counts of one link since it was made, and its state now."""

    state: LinkState = "up"
    reason: str = ""
    """Why it is down; never with a secret."""
    since: float = 0.0
    """When it came to this state, in seconds since the epoch."""
    calls: int = 0
    """Calls that were answered, by whatever."""
    refused: int = 0
    """Of these, answered with an error of the server."""
    timeouts: int = 0
    """Calls without an answer within the budget."""
    errors: int = 0
    """Calls that failed otherwise: connection refused or lost, wrong password."""
    skipped: int = 0
    """Calls not made, because the breaker was open."""
    opened: int = 0
    """Times that the breaker opened."""
    seconds: float = 0.0
    """Time that callers waited for calls that were answered, in all."""
    slowest_s: float = 0.0


class RedisLink:
    """Calls to one Redis server. Safe to use from several threads; makes no connection before the first call.

    Args:
        budget_s: what a caller waits for one call at most.
    """

    def __init__(self, url: RedisUrl, budget_s: float = BUDGET_S, threads: int = THREADS) -> None:
        redis_package()
        self.url: Final = url
        self.budget_s: Final = budget_s
        self._limit: Final = threads
        self._late: Final = f"no answer within {budget_s * 1000:.0f} ms"
        self._stats = LinkStats(since=time.time())
        self._closed = False
        self._when_up: list[Callable[[], None]] = []
        self.forget()
        forget_when_forked(self)

    def __reduce__(self) -> tuple[type[Self], tuple[RedisUrl, float, int]]:
        return type(self), (self.url, self.budget_s, self._limit)

    def forget(self) -> None:
        """No threads and no connections, for a forked copy: its parent uses them on."""
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._ending = threading.Event()
        self._answered = self._healed = float("-inf")
        self._knocking = False
        self._pause = _FIRST_KNOCK_S
        self._client = self._connect()
        self._stats = replace(self._stats, state="closed" if self._closed else "up", reason="")

    @property
    def is_up(self) -> bool:
        return self._stats.state == "up"

    def run(self, call: Callable[[Any, Unpack[Ts]], T], *args: *Ts) -> T:
        """What ``call`` makes of a ``redis.Redis`` and ``args``, within the budget.

        Raises:
            SharedStoreDown: no answer in time, no connection, or the breaker is open.
            SharedStoreRefusal: the server answered with an error.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._stats.state != "up":
                self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
                self._start_knocking()
                raise SharedStoreDown(str(self.url), self._stats.reason)
            if self._calls.qsize() >= self._idle and self._threads < self._limit:
                self._start_thread()
            self._calls.put((future, lambda client: call(client, *args)))
        began = time.monotonic()
        try:
            answer = future.result(self.budget_s)
        except NotInTime:
            future.cancel()  # one that still waits in the queue need not run
            raise self._trip("timeouts", self._late) from None
        except Exception as error:
            raise self._told(error, time.monotonic() - began) from None
        self._count_answer(time.monotonic() - began)
        return answer

    def when_up(self, call: Callable[[], None]) -> None:
        """Have something called each time that the server answers again, on a thread of the link."""
        self._when_up.append(call)

    def check(self) -> LinkStats:
        """The state now: asks the server, where nobody has had an answer for a moment. Never raises."""
        if self.is_up and time.monotonic() - self._answered > _EVIDENCE_S:
            with contextlib.suppress(StoreError):
                self.run(_ping)
        return self.stats()

    def stats(self) -> LinkStats:
        with self._lock:
            return self._stats

    def close(self) -> None:
        """End the threads and close the connections. Calls are refused from then on. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._become("closed", "the link is closed")
            for _ in range(self._threads):
                self._calls.put(None)
        self._ending.set()
        with contextlib.suppress(Exception):
            self._client.close()

    def _told(self, error: Exception, waited: float) -> StoreError:
        """What a caller is told of a call that failed."""
        kind, reason = _read_failure(error, self._late)
        if kind == "refused":
            self._count_answer(waited, refused=1)
            return SharedStoreRefusal(str(self.url), reason)
        return self._trip(kind, reason)

    def _count_answer(self, waited: float, refused: int = 0) -> None:
        with self._lock:
            self._answered = time.monotonic()
            stats = self._stats
            self._stats = replace(
                stats,
                calls=stats.calls + 1,
                refused=stats.refused + refused,
                seconds=stats.seconds + waited,
                slowest_s=max(stats.slowest_s, waited),
            )

    def _trip(self, count: str, reason: str) -> SharedStoreDown:
        with self._lock:
            self._stats = replace(self._stats, **{count: getattr(self._stats, count) + 1})
            if self._stats.state == "up":
                self._become("down", reason)
                self._stats = replace(self._stats, opened=self._stats.opened + 1)
                # Connections at rest may all be dead without a sign of it, and would fail one after the other.
                self._client = self._connect()
                _log.warning("shared cache: %s is left alone until it answers again: %s", self.url, reason)
                # One that answers knocks and no more than that is knocked at less and less often.
                soon = time.monotonic() - self._healed < _STEADY_S
                self._pause = min(2 * self._pause, _LONGEST_KNOCK_S) if soon else _FIRST_KNOCK_S
                self._start_knocking()
        return SharedStoreDown(str(self.url), reason)

    def _become(self, state: LinkState, reason: str) -> None:
        self._stats = replace(self._stats, state=state, reason=reason, since=time.time())

    def _knock(self) -> None:
        """Ask until the server answers, at growing distances."""
        while not self._ending.wait(self._pause):
            try:
                self._client.ping()
            except Exception as error:
                # What is wrong may change: a server that was stopped comes back with another password.
                reason = _read_failure(error, self._late)[1]
                with self._lock:
                    if self._stats.state == "down":
                        self._stats = replace(self._stats, reason=reason)
                self._pause = min(2 * self._pause, _LONGEST_KNOCK_S)
                continue
            with self._lock:
                self._knocking = False
                if self._stats.state == "down":
                    self._become("up", "")
                    self._answered = self._healed = time.monotonic()
                    _log.warning("shared cache: %s answers again", self.url)
            for call in self._when_up:
                call()
            return

    def _connect(self) -> Any:
        # One timeout a wait of the socket: a thread whose caller is gone frees itself soon after.
        return self.url.connect(socket_timeout=self.budget_s, socket_connect_timeout=self.budget_s)

    def _start_knocking(self) -> None:
        if not (self._knocking or self._closed):
            self._knocking = self._start(self._knock, "mlaprep-redis-knock")

    def _start_thread(self) -> None:
        if self._start(self._work, "mlaprep-redis"):
            self._threads += 1

    def _start(self, target: Callable[[], None], name: str) -> bool:
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        except RuntimeError:  # out of threads or memory
            return False
        return True

    def _work(self) -> None:
        calls = self._calls
        while True:
            with self._lock:
                self._idle += 1
            item = calls.get()
            with self._lock:
                self._idle -= 1
            if item is None:
                return
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(self._client))
            except BaseException as error:
                future.set_exception(error)
            del item, future, call  # a thread at rest keeps no kernel alive


def _ping(client: Any) -> None:
    client.ping()


def _read_failure(error: Exception, late: str) -> tuple[Literal["timeouts", "errors", "refused"], str]:
    """Of a call: which count it belongs to, and what may be told of it."""
    errors = importlib.import_module("redis.exceptions")
    if isinstance(error, errors.TimeoutError | TimeoutError):
        return "timeouts", late
    if isinstance(error, errors.AuthenticationError) or str(error).startswith("NOAUTH"):
        return "errors", "it refuses the user or password"
    if isinstance(error, errors.BusyLoadingError):
        return "errors", "it is loading its data"
    if isinstance(error, errors.OutOfMemoryError):
        return "refused", "it is full"
    if isinstance(error, errors.ResponseError):
        # Its first word is the class, such as MISCONF; what follows might quote an argument.
        word = str(error).partition(" ")[0]
        return (
            "refused",
            f"it refused a command ({word if word.isalpha() and word.isupper() else type(error).__name__})",
        )
    if isinstance(error, errors.RedisError | OSError):
        return "errors", _network_reason(error)
    _log.debug("shared cache: an answer could not be read", exc_info=error)
    return "errors", f"it answers otherwise than Redis does ({type(error).__name__})"


def _network_reason(error: BaseException) -> str:
    """Of a failed connection, without the text of redis-py, which names the address as it was given."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower() if cause.errno and cause.errno > 0 else "its name cannot be resolved"
        cause = cause.__cause__ or cause.__context__
    return "the connection was lost"
