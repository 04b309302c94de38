"""TokenFile: a token file that is read again when it changes, without a restart."""

import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Final

from mlaprep.service.tokens import Token, TokenList
from mlaprep.templates.errors import FieldProblem, SpecError

_MAX_BYTES: Final = 256 * 1024
_SETTLED_NS: Final = 1_000_000_000
_ALLOWED: Final = "a file of lines that `mlaprep token create` prints, which only its owner and group can write"

_log = logging.getLogger(__name__)


class TokenFile:
    """The tokens of a file as it is now.

    It is looked at whenever tokens are asked for: replaced, edited or remounted, it holds from the next request on.
    What cannot be read or understood then lets nobody in: a file that is gone has no tokens, a line that is broken is
    no token, and both are logged once and told by :meth:`warnings`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._list = TokenList()

    @classmethod
    def open(cls, path: Path) -> "TokenFile":
        """A file that is whole: at the start a mistake is an error, since somebody is there to see it.

        Raises:
            SpecError: it cannot be read, or has lines that are no tokens.
        """
        opened = cls(path)
        opened._list = _read(path)  # without a mark: the first request reads it once more
        faults = opened._list.faults
        if faults:
            raise SpecError([FieldProblem(f"MLAPREP_TOKENS_FILE, {f.field}", f.found, f.allowed) for f in faults])
        return opened

    def tokens(self) -> tuple[Token, ...]:
        """Tokens of the file, those past their end included."""
        return self._current().tokens

    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the file by now, without a word of it."""
        return tuple(f"token file, {fault.field}: {fault.found}" for fault in self._current().faults)

    def _current(self) -> TokenList:
        if self._seen is None or _mark(self._path) != self._seen:
            with self._lock:
                if (mark := _mark(self._path)) is None or mark != self._seen:
                    self._renew(mark)
        return self._list

    def _renew(self, mark: tuple[int, ...] | None) -> None:
        try:
            found = _read(self._path)
        except SpecError as error:
            found = TokenList((), (FieldProblem("file", error.problems[0].found, _ALLOWED),))
        if found != self._list:
            for fault in found.faults:
                _log.error(
                    "token file, %s: %s; allowed: %s. It lets nobody in", fault.field, fault.found, fault.allowed
                )
            _log.warning("the token file has changed: %d tokens", len(found.tokens))
        self._list = found
        # Times of files tick in milliseconds: one that was just written can change once more without a trace.
        settled = mark is not None and time.time_ns() - max(mark[3], mark[4]) > _SETTLED_NS
        self._seen = mark if settled else None


def _mark(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


def _read(path: Path) -> TokenList:
    """Raises SpecError for a file that cannot be read or that anybody can write."""

    def refused(found: str) -> SpecError:
        return SpecError(FieldProblem("MLAPREP_TOKENS_FILE", found, _ALLOWED))

    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise refused("what is no file")
            if found.st_mode & stat.S_IWOTH:
                raise refused("a file that everybody can write")
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise refused(f"a file that cannot be read ({error.strerror or type(error).__name__})") from None
    if len(data) > _MAX_BYTES:
        raise refused("a file that is too long")
    return TokenList.parse(data.decode("utf-8", "replace"))
