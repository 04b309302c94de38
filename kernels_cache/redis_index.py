"""RedisIndex: what a process knows of the records in a shared Redis, so that a look at all of them reads what is new.

Records are scored by a revision that grows with each that comes or goes. While it stands still, a look is one round
trip; when it has grown, the records above the last one seen are read.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mlaprep.kernels_cache import redis_scripts as scripts
from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, Manifest
from mlaprep.kernels_cache.errors import ArtifactError, StoreError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.redis_keys import INDEX, PREFIX, REVISION, SIZES, name
from mlaprep.kernels_cache.redis_link import RedisLink

_BATCH: Final = 500


@dataclass(frozen=True, slots=True)
class _Entry:
    manifest: Manifest | None
    """None where it is damaged."""
    size: int


class RedisIndex:
    """The records behind one link. Safe to use from several threads: one looks, the others wait for it."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._entries: dict[str, _Entry] = {}
        self._revision = 0
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds; what is known stays, and is brought up to date by the next look."""
        self._lock = threading.Lock()

    def manifests(self) -> list[Manifest]:
        """Those of all records; as far as they are known, where the server does not answer. Never raises."""
        return [entry.manifest for entry in self._look() if entry.manifest is not None]

    def totals(self) -> tuple[int, int]:
        """How many records there are, and the bytes of their cubins and sources. Never raises."""
        self._look()
        return self.known()

    def known(self) -> tuple[int, int]:
        """:meth:`totals` as of the last look, without another."""
        entries = list(self._entries.values())
        return len(entries), sum(entry.size for entry in entries)

    def _look(self) -> list[_Entry]:
        with self._lock:
            with contextlib.suppress(StoreError):
                self._refresh()
            return list(self._entries.values())

    def _refresh(self) -> None:
        """Raises StoreError half way: what was read until then counts."""
        revision, number = self._link.run(_read_revision)
        if revision < self._revision:  # another server, or one that went back to a copy
            self._entries, self._revision = {}, 0
        if revision != self._revision:
            self._read_above(self._revision)
            revision, number = self._link.run(_read_revision)
        if number != len(self._entries):  # some have gone
            listed = set(self._link.run(_list_keys))
            self._entries = {key: entry for key, entry in self._entries.items() if key in listed}
            if missed := listed.difference(self._entries):
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
            pairs = self._link.run(_read_records, batch)
            expired = []
            for key, (text, size) in zip(batch, pairs, strict=True):
                if text:
                    self._entries[key] = _Entry(_parse(text, key), size)
                else:
                    self._entries.pop(key, None)
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


def _read_records(client: Any, keys: list[str]) -> list[tuple[bytes, int]]:
    """Text and size of each; no text where there is no record, or something that is none."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.getrange(name("record", key), 0, MAX_MANIFEST_BYTES)
    pipeline.hmget(SIZES, keys)
    *texts, sizes = pipeline.execute(raise_on_error=False)
    if isinstance(sizes, Exception):
        raise sizes
    read = [b"?" if isinstance(text, Exception) else text for text in texts]
    return [(text, int(size) if size and size.isdigit() else 0) for text, size in zip(read, sizes, strict=True)]


def _forget(client: Any, keys: list[str]) -> int:
    gone: int = client.eval(scripts.FORGET, 3, INDEX, SIZES, REVISION, f"{PREFIX}record:", *keys)
    return gone


def _parse(text: bytes, key: str) -> Manifest | None:
    with contextlib.suppress(ArtifactError):
        manifest = Manifest.from_json(text, sealed=True)
        return manifest if manifest.key == key else None
    return None
