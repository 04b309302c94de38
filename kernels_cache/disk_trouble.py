"""DiskTrouble: why a directory keeps nothing new, and what is to be written once it does again."""

import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mlaprep.kernels_cache import housekeeping
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.files import Folder
from mlaprep.kernels_cache.hints import LINKS, write_hint

_MAX_OWED: Final = 256
_ASK_AGAIN_S: Final = 1.0
_REASONS: Final = {
    errno.EDQUOT: "has no quota left for this user",
    errno.EROFS: "is read-only",
    errno.EACCES: "may not be written by this user",
    errno.EPERM: "may not be written by this user",
}

_log = logging.getLogger(__name__)


class DiskTrouble:
    """What fails at a directory, said once until it is over, and what is owed to it since: the latest 256 artifacts
    and as many links."""

    def __init__(self, place: Path) -> None:
        self.reason = ""
        """Why nothing new is kept, as the end of a sentence about the disk: ``is full``; "" where it is."""
        self._place = place
        self._said = False
        self._asked = 0.0
        self._artifacts: OrderedDict[str, KernelArtifact] = OrderedDict()
        self._links: OrderedDict[str, str] = OrderedDict()

    def meet(self, what: str, error: OSError) -> None:
        """To ``read`` or to ``write`` failed."""
        level = logging.DEBUG if self._said else logging.WARNING
        _log.log(level, "kernel cache: cannot %s %s, going on without: %s", what, self._place, error)
        self._said = True
        if what == "write":
            self.reason = _reason(error, self._place)
            self._asked = time.monotonic()

    def is_due(self) -> bool:
        """Whether to try again what failed; true once a second at most."""
        if not self.reason or time.monotonic() - self._asked < _ASK_AGAIN_S:
            return False
        self._asked = time.monotonic()
        return True

    def owe(self, artifact: KernelArtifact) -> None:
        self._artifacts[artifact.key] = artifact
        if len(self._artifacts) > _MAX_OWED:
            self._artifacts.popitem(last=False)

    def owe_link(self, request: str, key: str) -> None:
        self._links[request] = key
        if len(self._links) > _MAX_OWED:
            self._links.popitem(last=False)

    def forgive(self, key: str) -> None:
        """An artifact, and the links to it, are not to be written any more."""
        self._artifacts.pop(key, None)
        for request in [request for request, owed in list(self._links.items()) if owed == key]:
            self._links.pop(request, None)

    def worked(self, written: bool) -> bool:
        """A publication came through, perhaps without writing; whether what is owed may come through too."""
        self._said = bool(self.reason)
        return written and self._said

    def write_owed(self, root: Folder, keep: Callable[[Folder, KernelArtifact], object]) -> None:
        """Give a directory all that is owed to it; the trouble is over where it takes that. Raises OSError."""
        housekeeping.prove_writable(root)
        for artifact in list(self._artifacts.values()):
            keep(root, artifact)
            self._artifacts.pop(artifact.key, None)
        for request, key in list(self._links.items()):
            write_hint(root, LINKS, request, key)
            self._links.pop(request, None)
        self.reason = ""
        self._said = False
        _log.warning("kernel cache: %s can be written again", self._place)


def _reason(error: OSError, place: Path) -> str:
    if error.errno == errno.ENOSPC:
        return "has no inode left" if _lacks_inodes(place) else "is full"
    if error.errno in _REASONS:
        return _REASONS[error.errno]
    return f"fails ({os.strerror(error.errno) if error.errno else type(error).__name__})"


def _lacks_inodes(place: Path) -> bool:
    try:
        found = os.statvfs(place)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0
