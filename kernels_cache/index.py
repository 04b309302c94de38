"""Index: what a process knows of the entries on disk, so that a look at all of them reads only what is new.

An entry never changes once it has its name, and a name that comes or goes changes the modification time of the
directory it is in. Damage inside an entry does not show here; it shows, and is set aside, when the entry is read.
"""

import contextlib
import errno
import os
import stat
import threading
import time
from dataclasses import dataclass
from typing import Final

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.entries import MANIFEST, measure, read_manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.files import Folder, NotPrivateError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import is_arch, is_digest

# The clock of a file system ticks in milliseconds, on some in seconds: within a tick a change need not show.
_SETTLED_NS: Final = 2 * 10**9
_PATIENCE_S: Final = 0.1
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})

_Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """How many entries there are, and the bytes of their content."""

    entries: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: _Stamp
    size: int
    manifest: Manifest | None
    """None where it is damaged, or has not been read."""
    is_read: bool


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The entries of one directory; ``stamp`` is None where it may change without a sign of it."""

    stamp: _Stamp | None
    entries: dict[str, _Entry]
    is_read: bool


class Index:
    """The entries below one root. Safe to use from several threads: one looks, the others wait for it."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, str], _Shelf] = {}
        self._totals = Totals()
        self._lock = threading.Lock()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds. What is known stays: a thread that was amid a look had swapped in whole shelves."""
        self._lock = threading.Lock()

    def manifests(self, root: Folder, arch: str | None = None) -> list[Manifest]:
        """Those of all entries, of one architecture or of all, in the order of their places. Raises OSError."""
        with self._lock:
            places = self._look(root, arch, read=True)
            entries = (entry for place in places for entry in self._shelves[place].entries.values())
            return [entry.manifest for entry in entries if entry.manifest is not None]

    def totals(self, root: Folder) -> Totals:
        """Of all entries; as they were found last where another thread takes long to look. Raises OSError."""
        if self._lock.acquire(timeout=_PATIENCE_S):
            try:
                shelves = [self._shelves[place].entries for place in self._look(root, None, read=False)]
                sizes = [entry.size for shelf in shelves for entry in shelf.values()]
                self._totals = Totals(len(sizes), sum(sizes))
            finally:
                self._lock.release()
        return self._totals

    def _look(self, root: Folder, arch: str | None, *, read: bool) -> list[tuple[str, str]]:
        """Bring shelves up to date, and name those there are."""
        archs = [name for name in root.names() if is_arch(name)]
        for lost in [place for place in self._shelves if place[0] not in archs]:
            del self._shelves[lost]
        return [place for name in archs if arch in (None, name) for place in self._look_at(root, name, read)]

    def _look_at(self, root: Folder, arch: str, read: bool) -> list[tuple[str, str]]:
        before = {place for place in self._shelves if place[0] == arch}
        after = []
        with contextlib.suppress(NotPrivateError, FileNotFoundError, NotADirectoryError), root.open(arch) as shelves:
            for name in shelves.names():
                place = (arch, name)
                with contextlib.suppress(OSError):
                    self._look_into(shelves, place, read)
                if place in self._shelves:
                    after.append(place)
        for lost in before.difference(after):
            del self._shelves[lost]
        return after

    def _look_into(self, shelves: Folder, place: tuple[str, str], read: bool) -> None:
        """Bring one shelf up to date. One that cannot be read now stays as it was; raises OSError."""
        known = self._shelves.get(place)
        try:
            now = time.time_ns()
            status = shelves.status(place[1])
            stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            if known is not None and known.stamp == stamp and (known.is_read or not read):
                return
            with shelves.open(place[1]) as shelf:
                entries, whole = _read_shelf(shelf, place[0], {} if known is None else known.entries, read)
        except OSError as error:
            if error.errno in _GONE or isinstance(error, NotPrivateError):
                self._shelves.pop(place, None)
            raise
        settled = whole and now - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
        self._shelves[place] = _Shelf(stamp if settled else None, entries, read)


def _read_shelf(shelf: Folder, arch: str, known: dict[str, _Entry], read: bool) -> tuple[dict[str, _Entry], bool]:
    """The entries of a shelf, and whether each could be looked at."""
    entries: dict[str, _Entry] = {}
    whole = True
    for key in filter(is_digest, shelf.names()):
        try:
            stamp = _stamp(shelf, key)
            if stamp is None:
                continue
            entry = known.get(key)
            if entry is None or entry.stamp != stamp or (read and not entry.is_read):
                entry = _read_entry(shelf, arch, key, stamp, read)
            entries[key] = entry
        except OSError as error:
            whole &= error.errno in _GONE or isinstance(error, NotPrivateError)
    return entries, whole


def _stamp(shelf: Folder, key: str) -> _Stamp | None:
    """Changes whenever the entry is another; None for what is no directory."""
    status = shelf.status(key)
    if not stat.S_ISDIR(status.st_mode):
        return None
    stamp = (status.st_ino, status.st_ctime_ns)
    with contextlib.suppress(FileNotFoundError):
        file = os.stat(f"{key}/{MANIFEST}", dir_fd=shelf.descriptor, follow_symlinks=False)
        return (*stamp, file.st_ino, file.st_mtime_ns, file.st_ctime_ns, file.st_size)
    return stamp


def _read_entry(shelf: Folder, arch: str, key: str, stamp: _Stamp, read: bool) -> _Entry:
    manifest = None
    with shelf.open(key) as entry:
        with contextlib.suppress(ArtifactError):
            manifest = read_manifest(entry, arch, key) if read else None
        return _Entry(stamp, measure(entry)[1], manifest, read)
