"""Markers: what a finished warm-up leaves, so that an equal plan is done at once, and never untruly.

A marker names the kernels of a plan as they stood when all of them were there. Its own name covers the plan, the
templates, the release and the compiler's version. It counts for as long as

- each file of each kernel is the one it was (inode, size, time of change): an entry that was evicted, deleted, set
  aside or replaced is another; or, where replicas share a Redis, each record and blob is still there, asked for in
  one call; and
- none of them is revoked.

Nothing is read or hashed for that: the bytes are proved as ever when somebody loads them.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.entries import CONTENT
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.files import TEMPORARY, Folder, new_name
from mlaprep.kernels_cache.key import is_arch, is_digest
from mlaprep.kernels_cache.opening import folder_of
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_keys import PREFIX, name
from mlaprep.kernels_cache.strict_json import parse_strict
from mlaprep.service.builder import Builder
from mlaprep.templates.plans import WarmupPlan

FOLDER: Final = "warmed"
MAX_MARKERS: Final = 64
"""Markers that one directory keeps; the oldest go."""
TTL_S: Final = 30 * 86400
"""Seconds that a marker stays in Redis after it was written."""

_MAX_BYTES: Final = 8 * 2**20

Entry = tuple[str, str, str, str]
"""Architecture, key, sha256 of the cubin, sha256 of the source."""


class Markers:
    """Those of one builder's store: in its directory, or in the Redis that replicas share.

    A store without either, a compiler whose version is unknown, and pinned keys, whose set may change, leave none.
    """

    def __init__(self, builder: Builder, shared: RedisStore | None = None) -> None:
        self._builder = builder
        self._shared = shared
        self._root = folder_of(builder.store)

    def holds(self, plan: WarmupPlan) -> bool:
        """Whether every kernel of a plan was there once and is there still."""
        marker = self._name(plan)
        if marker is None:
            return False
        try:
            entries, stamp = _parse(self._read(marker))
            if len(entries) != len(plan.targets) or self._revoked(entries):
                return False
            if self._shared is not None:
                return self._shared.redis.run(_all_exist, _names(entries))
            return self._root is not None and _stamp(self._root, entries) == stamp
        except (OSError, StoreError, ValueError, TypeError, KeyError):
            return False

    def note(self, plan: WarmupPlan, manifests: Sequence[Manifest]) -> None:
        """Keep that all of these are there; what cannot be kept costs the next run its look-ups and nothing else."""
        marker = self._name(plan)
        if marker is None or len(manifests) != len(plan.targets):
            return
        entries = [(each.arch, each.key, each.cubin_sha256, each.source_sha256) for each in manifests]
        with contextlib.suppress(OSError, StoreError):
            if self._shared is not None:
                self._shared.redis.run(_set, marker, _text(entries, ""))
            elif self._root is not None:
                self._write(self._root, marker, _text(entries, _stamp(self._root, entries)))

    def _name(self, plan: WarmupPlan) -> str | None:
        version = self._builder.serving_version()
        kept = self._root is not None if self._shared is None else not self._shared.pins
        if version is None or not plan.targets or not kept:
            return None
        return hashlib.sha256(json.dumps([plan.digest, version, _release()]).encode()).hexdigest()

    def _revoked(self, entries: Iterable[Entry]) -> bool:
        revoked = self._builder.revocations.list()
        keys, digests = {each.key for each in revoked}, {each.digest for each in revoked}
        return any(key in keys or cubin in digests for _, key, cubin, _ in entries)

    def _read(self, marker: str) -> bytes:
        if self._shared is not None:
            text: bytes = self._shared.redis.run(lambda client: client.getrange(_place(marker), 0, _MAX_BYTES))
            return text
        assert self._root is not None
        with Folder.at(self._root) as root, root.open(FOLDER) as folder:
            return folder.read(marker, _MAX_BYTES)

    @staticmethod
    def _write(root: Path, marker: str, text: bytes) -> None:
        aside = new_name("marker-")
        with Folder.at(root) as base, base.make(TEMPORARY) as temporary, base.make(FOLDER) as folder:
            try:
                temporary.write(aside, text, sync=False)
                temporary.move(aside, folder, marker)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.remove(aside)
                raise
            aged = sorted(folder.names(), key=lambda each: folder.status(each).st_mtime_ns)
            for old in aged[:-MAX_MARKERS]:
                folder.remove(old)


def _stamp(root: Path, entries: Iterable[Entry]) -> str:
    """What tells the files of these kernels from any others in their place. Raises OSError where one is missing."""
    told = hashlib.sha256()
    for arch, key, _, _ in entries:
        place = f"{root}/{arch}/{key[:2]}/{key}/"
        for file in CONTENT:
            status = os.stat(place + file, follow_symlinks=False)
            told.update(b"%d %d %d\n" % (status.st_ino, status.st_size, status.st_mtime_ns))
    return told.hexdigest()


def _names(entries: Iterable[Entry]) -> list[str]:
    """Of every record and blob, each once."""

    def each() -> Iterator[str]:
        for _, key, cubin, source in entries:
            yield name("record", key)
            yield name("blob", cubin)
            yield name("blob", source)

    return list(dict.fromkeys(each()))


def _all_exist(client: Any, names: list[str]) -> bool:
    return bool(client.exists(*names) == len(names))


def _set(client: Any, marker: str, text: bytes) -> None:
    client.set(_place(marker), text, ex=TTL_S)


def _place(marker: str) -> str:
    return f"{PREFIX}warmed:{marker}"


def _text(entries: Sequence[Entry], stamp: str) -> bytes:
    return json.dumps({"kernels": entries, "stamp": stamp}, separators=(",", ":")).encode()


def _parse(data: bytes) -> tuple[list[Entry], str]:
    """Raises ValueError, TypeError or KeyError for what is no marker."""
    document = parse_strict(data, max_bytes=_MAX_BYTES)
    if not isinstance(document, dict) or not isinstance(document["kernels"], list):
        raise ValueError("no marker")
    entries = []
    for arch, key, cubin, source in document["kernels"]:
        if not (is_arch(arch) and is_digest(key) and is_digest(cubin) and is_digest(source)):
            raise ValueError("no kernel")
        entries.append((arch, key, cubin, source))
    return entries, str(document["stamp"])


def _release() -> str:
    try:
        return importlib.metadata.version("mlaprep")
    except importlib.metadata.PackageNotFoundError:
        return "0"
