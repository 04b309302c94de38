"""SharedRevocations: revocations that replicas tell each other through a shared Redis.

::

    mlaprep:1:revocations          key -> the revocation, or when it was lifted; JSON
    mlaprep:1:revocations-mark     another word with every change

Each replica keeps its own list as ever and looks at the shared one once a second at most. What Redis loses is told to
it again by whoever knows it: only a lift that is written there lifts anything.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlaprep.kernels_cache.artifact import utc_now
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.key import is_digest, write_json
from mlaprep.kernels_cache.redis_keys import PREFIX
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.revocation import Revocation, Revocations, is_time
from mlaprep.kernels_cache.strict_json import parse_strict

SHARED: Final = f"{PREFIX}revocations"
MARK: Final = f"{PREFIX}revocations-mark"

_LOOK_S: Final = 1.0
_MAX_BYTES: Final = 4096


class SharedRevocations(Revocations):
    """Revocations of a directory, brought together with those of all replicas on one Redis.

    A server in trouble leaves what this replica knows; what it decides meanwhile is told once the server answers.
    """

    def __init__(self, root: Path | None, link: RedisLink) -> None:
        self._link = link
        self._mark: bytes | None = None
        super().__init__(root)

    def forget(self) -> None:
        super().forget()
        self._looking = threading.Lock()
        self._looked = float("-inf")

    def find(self, *, key: str = "", digest: str = "") -> Revocation | None:
        self._look()
        return super().find(key=key, digest=digest)

    def list(self) -> tuple[Revocation, ...]:
        self._look()
        return super().list()

    def add(self, revocation: Revocation) -> Revocation:
        held = revocation
        try:
            held = super().add(revocation)
        finally:
            if super().find(key=held.key) is not None:  # it holds here, written to the directory or not
                self._tell({held.key: _told(held)})
        return held

    def lift(self, key: str) -> Revocation | None:
        held = super().lift(key)
        if held is not None:
            # Another replica's clock may be ahead: the lift must not seem older than what it lifts.
            self._tell({key: write_json({"lifted_at": max(utc_now(), held.revoked_at)})})
        return held

    def _look(self) -> None:
        """Bring both lists together, unless that was done a moment ago or another thread is at it."""
        if time.monotonic() - self._looked < _LOOK_S or not self._looking.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(StoreError):
                told = self._link.run(_read, self._mark)
                if told is not None:
                    mark, entries = told
                    self._mark = mark if self._merge(entries) else None
        finally:
            self._looked = time.monotonic()
            self._looking.release()

    def _merge(self, entries: Mapping[str, bytes]) -> bool:
        """Take over what is new there, tell what is new here; False where there was something to tell."""
        known = {each.key: each for each in super().list()}
        untold = dict(known)
        for key, text in entries.items():
            held = known.get(key)
            entry = _parse(key, text)
            if entry is None:  # damaged: told again by whoever knows it
                continue
            if isinstance(entry, Revocation):
                untold.pop(key, None)
                if held is None:
                    with contextlib.suppress(StoreError):
                        super().add(entry)
            elif held is None or held.revoked_at <= entry:
                untold.pop(key, None)
                with contextlib.suppress(StoreError):
                    super().lift(key)
        if untold:
            self._tell({key: _told(each) for key, each in untold.items()})
        return not untold

    def _tell(self, entries: Mapping[str, str]) -> None:
        with contextlib.suppress(StoreError):
            self._link.run(_write, dict(entries))


def _read(client: Any, mark: bytes | None) -> tuple[bytes | None, dict[str, bytes]] | None:
    """The mark and what is revoked or lifted; None where the mark is the one given."""
    now: bytes | None = client.get(MARK)
    if now is not None and now == mark:
        return None
    entries = {key.decode("ascii", "replace"): text for key, text in client.hgetall(SHARED).items()}
    return now, {key: text for key, text in entries.items() if is_digest(key)}


def _write(client: Any, entries: dict[str, str]) -> None:
    client.pipeline(transaction=True).hset(SHARED, mapping=entries).set(MARK, secrets.token_hex(8)).execute()


def _told(revocation: Revocation) -> str:
    return write_json(revocation.to_dict())


def _parse(key: str, text: bytes) -> Revocation | str | None:
    """A revocation, or when it was lifted; None for what is neither."""
    with contextlib.suppress(ValueError, TypeError):
        document = parse_strict(text, max_bytes=_MAX_BYTES)
        if isinstance(document, dict) and set(document) == {"lifted_at"}:
            return document["lifted_at"] if is_time(document["lifted_at"]) else None
        found = Revocation.from_dict(document)
        return found if found.key == key else None
    return None
