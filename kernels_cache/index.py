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
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})

_Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """One entry: its manifest, None where that is damaged, and the bytes of its content."""

    stamp: _Stamp
    manifest: Manifest | None
    size: int


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The entries of one directory; ``stamp`` is None where it may change without a sign of it."""

    stamp: _Stamp | None
    entries: dict[str, Known]


class Index:
    """The entries below one root. Safe to use from several threads: one looks, the others wait for it."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, str], _Shelf] = {}
        self._lock = threading.Lock()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds. What is known stays: a thread that was amid a look had swapped in whole shelves."""
        self._lock = threading.Lock()

    def entries(self, root: Folder, arch: str | None = None) -> list[Known]:
        """Every entry there is now, of one architecture or of all, in the order of their places. Raises OSError."""
        with self._lock:
            archs = [name for name in root.names() if is_arch(name)]
            for lost in [place for place in self._shelves if place[0] not in archs]:
                del self._shelves[lost]
            found: list[Known] = []
            for name in archs:
                if arch in (None, name):
                    for place in self._look_at(root, name):
                        found += self._shelves[place].entries.values()
            return found

    def _look_at(self, root: Folder, arch: str) -> list[tuple[str, str]]:
        before = {place for place in self._shelves if place[0] == arch}
        after = []
        with contextlib.suppress(NotPrivateError, FileNotFoundError, NotADirectoryError), root.open(arch) as shelves:
            for name in shelves.names():
                place = (arch, name)
                with contextlib.suppress(OSError):
                    self._look_into(shelves, place)
                if place in self._shelves:
                    after.append(place)
        for lost in before.difference(after):
            del self._shelves[lost]
        return after

    def _look_into(self, shelves: Folder, place: tuple[str, str]) -> None:
        """Bring one shelf up to date. One that cannot be read now stays as it was; raises OSError."""
        known = self._shelves.get(place)
        try:
            now = time.time_ns()
            status = shelves.status(place[1])
            stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            if known is not None and known.stamp == stamp:
                return
            with shelves.open(place[1]) as shelf:
                entries, whole = _read_shelf(shelf, place[0], {} if known is None else known.entries)
        except OSError as error:
            if error.errno in _GONE or isinstance(error, NotPrivateError):
                self._shelves.pop(place, None)
            raise
        settled = whole and now - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
        self._shelves[place] = _Shelf(stamp if settled else None, entries)


def _read_shelf(shelf: Folder, arch: str, known: dict[str, Known]) -> tuple[dict[str, Known], bool]:
    """The entries of a shelf, and whether each could be looked at."""
    entries, whole = {}, True
    for key in filter(is_digest, shelf.names()):
        try:
            stamp = _stamp(shelf, key)
            if stamp is None:
                continue
            entry = known.get(key)
            entries[key] = entry if entry is not None and entry.stamp == stamp else _read(shelf, arch, key, stamp)
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


def _read(shelf: Folder, arch: str, key: str, stamp: _Stamp) -> Known:
    with shelf.open(key) as entry:
        try:
            manifest = read_manifest(entry, arch, key)
        except ArtifactError:
            manifest = None
        return Known(stamp, manifest, measure(entry)[1])
