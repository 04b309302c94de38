"""Folder: a directory held open, whose contents are reached without ever following a symbolic link."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

TEMPORARY: Final = "tmp"
"""Where a store's root keeps what is being written or removed, on the same file system as everything else."""
PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO in place of a file must not hang the reader.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int]
"""Device and inode."""


class NotPrivateError(PermissionError):
    """A file or directory that somebody else owns or may write; ``found`` says which, without its name."""

    def __init__(self, where: str, found: str) -> None:
        self.found = found
        super().__init__(f"{where} {found}")


class NotRegularError(OSError):
    """Something that is no regular file, or one above the size limit, in place of a file."""


class Folder:
    """A directory of our own, held by a file descriptor; a context manager that closes it.

    Every method raises OSError. Opening refuses what is not owned by this user or is writable by others.
    """

    def __init__(self, descriptor: int, where: str) -> None:
        self.descriptor = descriptor
        try:
            status = os.fstat(descriptor)
            _require_private(status, where)
        except OSError:
            os.close(descriptor)
            raise
        self.where = where
        self.identity: Identity = (status.st_dev, status.st_ino)

    @classmethod
    def at(cls, path: Path, *, create: bool = False) -> Self:
        """Open a directory by its path, made with its parents where it is missing."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.makedirs(path, PRIVATE_FOLDER)
        return cls(os.open(path, _OPEN_FOLDER), str(path))

    def open(self, name: str) -> Self:
        """Open a sub-directory."""
        return type(self)(os.open(name, _OPEN_FOLDER, dir_fd=self.descriptor), f"{self.where}/{name}")

    def make(self, name: str, *, sync: bool = False) -> Self:
        """Open a sub-directory, made where it is missing, and private from now on.

        A link or file of that name gives way, and so does a directory of another user. One of our own that
        others may write is closed to them: nothing that is found in it is believed anyway.

        ``sync``: a new one is on the medium when this returns.
        """
        try:
            return self.open(name)
        except FileNotFoundError:
            pass
        except NotPrivateError:
            if self.status(name).st_uid == os.geteuid():
                return self._open_closed_to_others(name)
            # Only within its parent can a directory be renamed by whoever may not write it.
            self.move(name, self, f"{name}.{new_name()[:8]}")
        except OSError:
            if self.is_folder(name):
                raise
            os.unlink(name, dir_fd=self.descriptor)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, PRIVATE_FOLDER, dir_fd=self.descriptor)
            if sync:
                self.sync()
        return self.open(name)

    def _open_closed_to_others(self, name: str) -> Self:
        descriptor = os.open(name, _OPEN_FOLDER, dir_fd=self.descriptor)
        try:
            os.fchmod(descriptor, PRIVATE_FOLDER)
        except OSError:
            os.close(descriptor)
            raise
        return type(self)(descriptor, f"{self.where}/{name}")

    def names(self) -> list[str]:
        """Names of everything in it, sorted."""
        return sorted(os.listdir(self.descriptor))

    def status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def is_folder(self, name: str) -> bool:
        return stat.S_ISDIR(self.status(name).st_mode)

    def holds(self, name: str, identity: Identity) -> bool:
        """Whether this name still stands for that file or directory."""
        try:
            status = self.status(name)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == identity

    def read(self, name: str, limit: int) -> bytes:
        """The whole of a regular file of at most ``limit`` bytes."""
        descriptor = os.open(name, _OPEN_FILE, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            where = f"{self.where}/{name}"
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                raise NotRegularError(f"{where} is no regular file of at most {limit} bytes")
            _require_private(status, where)
            data = os.read(descriptor, status.st_size + 1)
            while len(data) < status.st_size and (more := os.read(descriptor, status.st_size - len(data))):
                data += more
        finally:
            os.close(descriptor)
        return data

    def write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """A new file with this content, on the medium before this returns unless ``sync`` is off."""
        descriptor = os.open(name, _CREATE_FILE, PRIVATE_FILE, dir_fd=self.descriptor)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def move(self, name: str, target: "Folder", new_name: str) -> None:
        """Rename into another folder of the same file system: whole or not at all."""
        os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def remove(self, name: str) -> None:
        """Remove whatever has this name; a link is removed, never followed."""
        if not self.is_folder(name):
            os.unlink(name, dir_fd=self.descriptor)
            return
        for last in (False, False, True):
            try:
                shutil.rmtree(name, dir_fd=self.descriptor)
            except OSError as error:
                # Whoever still has the folder open may put a file in while it is emptied.
                if last or error.errno != errno.ENOTEMPTY:
                    raise
            else:
                return

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def descend(folder: Folder, *names: str) -> Iterator[Folder]:
    """Open a chain of sub-directories and close them all afterwards."""
    with contextlib.ExitStack() as stack:
        for name in names:
            folder = stack.enter_context(folder.open(name))
        yield folder


def new_name(prefix: str = "") -> str:
    """A file name that nobody else has."""
    return prefix + secrets.token_hex(16)


def reason_of(error: Exception) -> object:
    """What is wrong with a file or directory, without its name."""
    if isinstance(error, NotPrivateError):
        return f"it {error.found}"
    return (isinstance(error, OSError) and error.strerror) or error


def _require_private(status: os.stat_result, where: str) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivateError(where, f"belongs to user {status.st_uid}, not to this process's user {os.geteuid()}")
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivateError(where, f"has mode {mode:04o}: others may write it; remove that with chmod go-w")
