"""Revocation: kernels that must not be used any more, noted in files that outlast what they speak of.

::

    <root>/revoked/<key>-<digest>    reason and time, as JSON; the name alone revokes

A damaged file therefore still revokes its kernel, a kill leaves a whole file or none, and processes that share a
directory see each other's at once. Nothing is removed for room.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from mlaprep.kernels_cache.artifact import Manifest, utc_now
from mlaprep.kernels_cache.errors import PlaceUnusable, StoreError
from mlaprep.kernels_cache.files import TEMPORARY, Folder, new_name
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import is_arch, is_digest, write_json
from mlaprep.kernels_cache.strict_json import parse_strict

FOLDER: Final = "revoked"
MAX_REVOCATIONS: Final = 4096
MAX_REASON: Final = 200

_MAX_BYTES: Final = 4096
_SETTLED_NS: Final = 2 * 10**9  # within a tick of the file system's clock a change need not show
_NAME: Final = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})", re.ASCII)
_VARIANT: Final = re.compile(r"[A-Za-z0-9_.-]{0,512}", re.ASCII)
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Revocation:
    """One kernel that must not be used: its key, which is not built again, and its bytes, under whatever key.

    Raises:
        ValueError: a value that no revocation has.
    """

    key: str
    digest: str
    """sha256 of the cubin."""
    variant_id: str
    arch: str
    reason: str
    """In the words of whoever revoked it; printable, 1 to ``MAX_REASON`` characters."""
    revoked_at: str
    """UTC, RFC 3339."""
    origin: str = ""
    """URL of the service that told of it; "" for what was revoked here."""

    def __post_init__(self) -> None:
        texts = (self.variant_id, self.arch, self.reason, self.revoked_at, self.origin)
        good = (
            is_digest(self.key)
            and is_digest(self.digest)
            and all(type(text) is str for text in texts)
            and _VARIANT.fullmatch(self.variant_id)
            and (self.arch == "" or is_arch(self.arch))
            and is_reason(self.reason)
            and is_time(self.revoked_at)
            and len(self.origin) <= 2048
        )
        if not good:
            raise ValueError("a revocation with a value that is not allowed")

    @classmethod
    def of(cls, manifest: Manifest, reason: str) -> Self:
        """That of a kernel, from now on."""
        return cls(manifest.key, manifest.cubin_sha256, manifest.variant_id, manifest.arch, reason, utc_now())

    @classmethod
    def from_dict(cls, document: object, origin: str = "") -> Self:
        """From what :meth:`to_dict` gave. Raises ValueError for anything else."""
        if not isinstance(document, Mapping) or set(document) != set(_TOLD):
            raise ValueError("a revocation with other members")
        return cls(**document, origin=origin)

    def to_dict(self) -> dict[str, str]:
        """JSON types only; without the origin, which is the teller's own business."""
        return {name: getattr(self, name) for name in _TOLD}

    def __str__(self) -> str:
        return f"revoked at {self.revoked_at} ({self.reason})"


_TOLD: Final = tuple(item.name for item in fields(Revocation) if item.name != "origin")


def is_reason(text: object) -> bool:
    """Whether a text can be the reason of a revocation."""
    return type(text) is str and 0 < len(text) <= MAX_REASON and text.isprintable() and not text.isspace()


def is_time(text: object) -> bool:
    """Whether a text is a time as revocations have it: UTC, whole seconds, later ones sorting behind."""
    return type(text) is str and _TIME.fullmatch(text) is not None


def revocations_digest(revocations: Collection[Revocation]) -> str:
    """sha256 over what a list tells, in whatever order and from wherever: equal lists have equal digests."""
    told = sorted(write_json(revocation.to_dict()) for revocation in revocations)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


class Revocations:
    """What is revoked, in a store's directory and of this process. Safe to use from several threads and processes.

    A look costs one ``stat`` while nothing changes. A directory that cannot be read or written leaves what this
    process knows.

    Args:
        root: the store's directory; None keeps revocations in memory.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._own: dict[str, Revocation] = {}
        """Of this process, where they could not be written."""
        self._kept: dict[str, Revocation] = {}
        """As of the directory, by name."""
        self._stamp: tuple[int, ...] | None = None
        self._by_key: dict[str, Revocation] = {}
        self._by_digest: dict[str, Revocation] = {}
        self._in_trouble = False
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds; what is known stays."""
        self._lock = threading.Lock()

    def find(self, *, key: str = "", digest: str = "") -> Revocation | None:
        """What revokes this key, or these bytes."""
        with self._lock:
            self._refresh()
            return self._by_key.get(key) or self._by_digest.get(digest)

    def of(self, manifest: Manifest) -> Revocation | None:
        """What revokes this kernel."""
        return self.find(key=manifest.key, digest=manifest.cubin_sha256)

    def list(self) -> tuple[Revocation, ...]:
        """All of them, by key."""
        with self._lock:
            self._refresh()
            return tuple(sorted(self._by_key.values()))

    def add(self, revocation: Revocation) -> Revocation:
        """Revoke a kernel; one that is revoked already keeps its reason and time.

        It holds in this process at once, whatever becomes of the file.

        Raises:
            StoreError: it could not be written, or there are ``MAX_REVOCATIONS``.
        """
        with self._lock:
            self._refresh()
            if (held := self._by_key.get(revocation.key)) is not None:
                if revocation.key not in self._own:
                    return held
                revocation = held  # which could not be written when it was told first
            elif len(self._by_key) >= MAX_REVOCATIONS and not revocation.origin:  # a service's list has its own bound
                raise StoreError(f"{MAX_REVOCATIONS} kernels are revoked, and no more can be; lift some that are over")
            self._own[revocation.key] = revocation
            self._settle()
            if self._root is not None:
                self._write(self._root, revocation)
                del self._own[revocation.key]
                self._stamp = None
            return revocation

    def lift(self, key: str) -> Revocation | None:
        """Let a kernel be used and built again; what had revoked it, if anything.

        Raises:
            StoreError: the file could not be removed.
        """
        with self._lock:
            self._refresh()
            held = self._by_key.get(key)
            self._own.pop(key, None)
            if held is not None and self._root is not None:
                try:
                    with Folder.at(self._root) as root, root.open(FOLDER) as folder:
                        for name in [name for name in folder.names() if name.startswith(f"{key}-")]:
                            folder.remove(name)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    raise PlaceUnusable(
                        "the revocation cannot be lifted in", self._root, f": {error.strerror}"
                    ) from None
            self._stamp = None
            self._settle()
            return held

    def adopt(self, origin: str, told: Collection[Revocation]) -> tuple[Revocation, ...]:
        """Take over the whole list of a service: what is new is added, what only it had told before is lifted.

        Returns what is new. What cannot be written holds for this process.
        """
        listed = {revocation.key for revocation in told}
        before = self.list()
        for gone in (each for each in before if each.origin == origin and each.key not in listed):
            with contextlib.suppress(StoreError):
                self.lift(gone.key)
        known = {each.key for each in before}
        new = [replace(each, origin=origin) for each in told if each.key not in known]
        for revocation in new:
            with contextlib.suppress(StoreError):
                self.add(revocation)
        return tuple(new)

    def _refresh(self) -> None:
        if self._root is None:
            return
        try:
            status = os.stat(self._root / FOLDER, follow_symlinks=False)
            stamp = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if stamp == self._stamp:
                return
            now = time.time_ns()
            with Folder.at(self._root) as root, root.open(FOLDER) as folder:
                names = [name for name in folder.names() if _NAME.fullmatch(name)]
                self._kept = {name: self._kept.get(name) or _read(folder, name) for name in names}
            self._stamp = stamp if now - status.st_mtime_ns > _SETTLED_NS else None
            self._in_trouble = False
        except FileNotFoundError:
            if not self._kept:
                return
            self._kept, self._stamp = {}, None
        except OSError as error:
            if not self._in_trouble:
                _log.warning("kernel cache: revocations in %s cannot be read, those known stay: %s", self._root, error)
            self._in_trouble = True
            return
        self._settle()

    def _settle(self) -> None:
        every = (*self._kept.values(), *self._own.values())
        self._by_key = {each.key: each for each in every}
        self._by_digest = {each.digest: each for each in every}

    def _write(self, place: Path, revocation: Revocation) -> None:
        name = f"{revocation.key}-{revocation.digest}"
        document = revocation.to_dict() | {"origin": revocation.origin}
        try:
            with Folder.at(place, create=True) as root, root.make(TEMPORARY) as temporary:
                aside = new_name("revoked-")
                try:
                    temporary.write(aside, write_json(document).encode())
                    with root.make(FOLDER, sync=True) as folder:
                        temporary.move(aside, folder, name)
                        folder.sync()
                except OSError:
                    with contextlib.suppress(OSError):
                        temporary.remove(aside)
                    raise
        except OSError as error:
            told = "the revocation holds in this process only, since it cannot be written to"
            raise PlaceUnusable(told, place, f": {error.strerror}") from None


def _read(folder: Folder, name: str) -> Revocation:
    """A file's revocation; of one that cannot be read, what its name tells."""
    key, _, digest = name.partition("-")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        document: Any = parse_strict(folder.read(name, _MAX_BYTES), max_bytes=_MAX_BYTES)
        origin = document.pop("origin")
        found = Revocation.from_dict(document, origin)
        if (found.key, found.digest) == (key, digest):
            return found
    changed = 0.0
    with contextlib.suppress(OSError):
        changed = folder.status(name).st_mtime
    when = datetime.fromtimestamp(max(0.0, changed), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Revocation(key, digest, "", "", "the record of the reason is damaged", when)
