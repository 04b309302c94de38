"""Leases: who compiles a key now, told to all replicas by a shared Redis. They save work and nothing depends on them.

A lease is a name with a random token and a time to live of a few seconds. Its holder renews it while it compiles and
gives it back by token; of a holder that was killed it expires, and one of those who wait takes it.
"""

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from mlaprep.kernels_cache import redis_scripts as scripts
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.redis_keys import name
from mlaprep.kernels_cache.redis_link import RedisLink

LEASE_S: Final = 3.0
"""How long the lease of a holder that died keeps others waiting."""

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStats:
    """Counts of one process since its leases were made, and what it holds now."""

    acquired: int = 0
    waits: int = 0
    """Keys that another process held when they were asked for."""
    wait_s: float = 0.0
    """Time spent waiting for those, in all."""
    given_up: int = 0
    """Waits that ended at their deadline, with the key still another's."""
    lost: int = 0
    """Leases that ran out while they were held: another process may have compiled the same key."""
    held: int = 0


class Leases:
    """Leases by key over one link. Safe to use from several threads.

    Where the server does not answer, everybody goes on at once: there is nobody to wait for.
    """

    def __init__(self, link: RedisLink, lease_s: float = LEASE_S) -> None:
        self._link = link
        self._lease_ms = round(lease_s * 1000)
        self._stats = LeaseStats()
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """No leases, for a forked copy: its parent holds them."""
        self._lock = threading.Lock()
        self._held: dict[str, str] = {}
        """Token to key."""
        self._keeping = False

    @contextlib.contextmanager
    def hold(self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None) -> Iterator[bool]:
        """Hold a key against all replicas; waits ``timeout`` seconds at most, and no longer once ``unless`` says so.

        Yields False where another still holds it. True where nobody else does: it is held, or its kernel is there
        by now, or the server cannot tell.
        """
        token = secrets.token_hex(16)
        answer = self._acquire(key, token, timeout, unless)
        held = answer == "held"
        if held:
            self._keep(token, key)
        try:
            yield answer != "taken"
        finally:
            if held:
                self._give_back(token, key)

    def stats(self) -> LeaseStats:
        with self._lock:
            return replace(self._stats, held=len(self._held))

    def _acquire(self, key: str, token: str, timeout: float, unless: Callable[[], bool] | None) -> str:
        began = time.monotonic()
        pause = _FIRST_PAUSE_S
        answer = self._ask(key, token)
        if answer != "taken":
            return answer
        while answer == "taken" and (left := began + timeout - time.monotonic()) > 0:
            if unless is not None and unless():
                break
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # a herd must not ask in step
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            answer = self._ask(key, token)
        waited = time.monotonic() - began
        self._add(waits=1, wait_s=waited, given_up=int(answer == "taken"))
        return answer

    def _ask(self, key: str, token: str) -> str:
        try:
            return self._link.run(_acquire, key, token, self._lease_ms)
        except StoreError:
            return "unknown"

    def _keep(self, token: str, key: str) -> None:
        with self._lock:
            self._held[token] = key
            if not self._keeping:
                with contextlib.suppress(RuntimeError):  # no thread to be had: the lease lasts as long as it lasts
                    threading.Thread(target=self._renew, name="mlaprep-leases", daemon=True).start()
                    self._keeping = True
        self._add(acquired=1)

    def _give_back(self, token: str, key: str) -> None:
        with self._lock:
            self._held.pop(token, None)
        # Where it cannot be given back it expires.
        with contextlib.suppress(StoreError):
            if not self._link.run(_release, key, token):
                self._add(lost=1)

    def _renew(self) -> None:
        """Renew what is held, as long as anything is."""
        while True:
            time.sleep(self._lease_ms / 3000)
            with self._lock:
                held = dict(self._held)
                if not held:
                    self._keeping = False
                    return
            with contextlib.suppress(StoreError):
                self._link.run(_renew, held, self._lease_ms)

    def _add(self, **counts: float) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{item: getattr(self._stats, item) + n for item, n in counts.items()})


def _acquire(client: Any, key: str, token: str, milliseconds: int) -> str:
    answer = client.eval(scripts.ACQUIRE, 2, name("lease", key), name("record", key), token, milliseconds)
    return "held" if answer == b"held" else "built" if answer == b"built" else "taken"


def _renew(client: Any, held: dict[str, str], milliseconds: int) -> int:
    names = [name("lease", key) for key in held.values()]
    kept: int = client.eval(scripts.RENEW, len(names), *names, *held, milliseconds)
    return kept


def _release(client: Any, key: str, token: str) -> int:
    released: int = client.eval(scripts.RELEASE, 1, name("lease", key), token)
    return released
