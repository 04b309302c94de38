"""RedisIndex: what a process knows of the records in a shared Redis, so that a look at all of them reads what is new.

Records are scored by a revision that grows with each that comes or goes. While it stands still, a look is one round
trip; when it has grown, the records above the last one seen are read.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final

from mlaprep.kernels_cache import redis_scripts as scripts
from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, Manifest
from mlaprep.kernels_cache.errors import ArtifactError, StoreError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.redis_keys import BYTES, INDEX, PREFIX, REVISION, SIZES, name
from mlaprep.kernels_cache.redis_link import RedisLink

_BATCH: Final = 500


class RedisIndex:
    """The records behind one link. Safe to use from several threads: one looks, the others wait for it."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._manifests: dict[str, Manifest | None] = {}
        """By key; None for one that is damaged."""
        self._revision = 0
        self._totals = (0, 0)
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds; what is known stays, and is brought up to date by the next look."""
        self._lock = threading.Lock()

    def manifests(self) -> list[Manifest]:
        """Those of all records; as far as they are known, where the server does not answer. Never raises."""
        with self._lock:
            with contextlib.suppress(StoreError):
                self._refresh()
            return [manifest for manifest in self._manifests.values() if manifest is not None]

    def totals(self) -> tuple[int, int]:
        """How many records are listed, and the bytes of their cubins and sources. Never raises."""
        with contextlib.suppress(StoreError):
            self._totals = self._link.run(_read_totals)
        return self._totals

    def known_totals(self) -> tuple[int, int]:
        """:meth:`totals` as of the last look, without another."""
        return self._totals

    def _refresh(self) -> None:
        """Raises StoreError half way: what was read until then counts."""
        revision, number = self._link.run(_read_revision)
        if revision < self._revision:  # another server, or one that went back to a copy
            self._manifests, self._revision = {}, 0
        if revision != self._revision:
            self._read_above(self._revision)
            self._revision = max(self._revision, revision)  # the latest change may have been a removal
            number = self._link.run(_read_revision)[1]
        if number != len(self._manifests):  # some have gone
            listed = set(self._link.run(_list_keys))
            self._manifests = {key: known for key, known in self._manifests.items() if key in listed}
            if missed := listed.difference(self._manifests):
                self._read(sorted(missed))

    def _read_above(self, revision: int) -> None:
        while True:
            scored = self._link.run(_list_above, revision)
            self._read([key for key, _ in scored if is_digest(key)])
            if not scored:
                return
            self._revision = revision = scored[-1][1]

    def _read(self, keys: list[str]) -> None:
        for batch in _batches(keys):
            texts = self._link.run(_read_records, batch)
            expired = []
            for key, text in zip(batch, texts, strict=True):
                if text:
                    self._manifests[key] = _parse(text, key)
                else:
                    self._manifests.pop(key, None)
                    expired.append(key)
            if expired:
                self._link.run(_forget, expired)


def _batches(keys: list[str]) -> Iterator[list[str]]:
    keys_left = iter(keys)
    while batch := list(itertools.islice(keys_left, _BATCH)):
        yield batch


def _read_revision(client: Any) -> tuple[int, int]:
    revision, number = client.pipeline(transaction=True).get(REVISION).zcard(INDEX).execute()
    return int(revision) if revision and revision.isdigit() else 0, int(number)


def _list_above(client: Any, revision: int) -> list[tuple[str, int]]:
    scored = client.zrangebyscore(INDEX, f"({revision}", "+inf", start=0, num=_BATCH, withscores=True)
    return [(member.decode("ascii", "replace"), int(score)) for member, score in scored]


def _list_keys(client: Any) -> list[str]:
    keys = (member.decode("ascii", "replace") for member in client.zrange(INDEX, 0, -1))
    return [key for key in keys if is_digest(key)]


def _read_totals(client: Any) -> tuple[int, int]:
    number, size = client.pipeline(transaction=True).zcard(INDEX).get(BYTES).execute()
    return int(number), int(size) if size and size.isdigit() else 0


def _read_records(client: Any, keys: list[str]) -> list[bytes]:
    """The text of each; empty where there is no record, something else where it is none."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.getrange(name("record", key), 0, MAX_MANIFEST_BYTES)
    return [b"?" if isinstance(text, Exception) else text for text in pipeline.execute(raise_on_error=False)]


def _forget(client: Any, keys: list[str]) -> int:
    names = (INDEX, SIZES, BYTES, REVISION)
    gone: int = client.eval(scripts.FORGET, len(names), *names, f"{PREFIX}record:", *keys)
    return gone


def _parse(text: bytes, key: str) -> Manifest | None:
    with contextlib.suppress(ArtifactError):
        manifest = Manifest.from_json(text, sealed=True)
        return manifest if manifest.key == key else None
    return None
