"""File lock: flock with a deadline. It saves work on one machine and nothing depends on it.

What the file holds is never read. It may be deleted at any time: the lock then stands for nothing, a
second holder appears, and both do the same work.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from mlaprep.kernels_cache.files import PRIVATE_FILE, Folder

LOCKS: Final = "locks"
"""Where a store's root keeps its lock files."""

_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.02
_PAUSE_OF_WAIT: Final = 1 / 32  # so a wait ends 3% late at most, or a millisecond, and asks seldom when it is long
_OPEN_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def file_lock(
    open_folder: Callable[[], Folder], name: str, timeout: float, unless: Callable[[], bool] | None = None
) -> Iterator[bool]:
    """Hold a lock file of a folder, and remove it afterwards; yields whether it is held.

    It is not held where ``timeout`` seconds passed or ``unless`` says that it is not wanted any more, which is asked
    each time that another is found to hold it, or where the file system cannot lock or write.
    """
    descriptor = _acquire(open_folder, name, timeout, unless)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _release(open_folder, name, descriptor)


def try_lock_folder(folder: Folder) -> bool | None:
    """Lock an open folder for as long as it stays open: True held, False another's, None not possible."""
    try:
        fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_free_lock(folder: Folder, name: str) -> bool:
    """Remove a lock file that a killed holder left; False where somebody holds it, or it cannot be told."""
    try:
        descriptor = os.open(name, _OPEN_LOCK & ~os.O_CREAT, dir_fd=folder.descriptor)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):  # where nothing can be locked, nobody holds it
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        status = os.fstat(descriptor)
        if not folder.holds(name, (status.st_dev, status.st_ino)):
            return False
        os.unlink(name, dir_fd=folder.descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _acquire(
    open_folder: Callable[[], Folder], name: str, timeout: float, unless: Callable[[], bool] | None
) -> int | None:
    began = time.monotonic()
    while True:
        try:
            descriptor = _try_once(open_folder, name)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.ESTALE):
                return None
            descriptor = None
        if descriptor is not None:
            return descriptor
        waited = time.monotonic() - began
        if waited >= timeout or (unless is not None and unless()):
            return None
        pause = min(max(waited * _PAUSE_OF_WAIT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        time.sleep(min(pause, timeout - waited))


def _try_once(open_folder: Callable[[], Folder], name: str) -> int | None:
    with open_folder() as folder:
        descriptor = os.open(name, _OPEN_LOCK, PRIVATE_FILE, dir_fd=folder.descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder removes its file before it lets go: only the file that still has the name counts.
            status = os.fstat(descriptor)
            if folder.holds(name, (status.st_dev, status.st_ino)):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _release(open_folder: Callable[[], Folder], name: str, descriptor: int) -> None:
    try:
        with contextlib.suppress(OSError), open_folder() as folder:
            status = os.fstat(descriptor)
            if folder.holds(name, (status.st_dev, status.st_ino)):
                os.unlink(name, dir_fd=folder.descriptor)
        # A forked child may hold a copy of the descriptor: unlocking reaches that too, closing does not.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
