"""Location: where this user's cache is and how large it may grow, read from the environment."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from mlaprep.kernels_cache.errors import StoreError


def cache_dir(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path:
    """The directory that was given, else ``$MLAPREP_CACHE_DIR``, ``$XDG_CACHE_HOME/mlaprep``, ``~/.cache/mlaprep``.

    Wherever a directory is named, by an option, a setting or the environment, it is read here: ``~/`` at its
    start is the home directory, and an empty one counts as not given. So does a relative ``XDG_CACHE_HOME``,
    as its specification asks.

    Raises:
        StoreError: another user's home, or none is named and there is no home directory.
    """
    own = os.fspath(given or "") or environ.get("MLAPREP_CACHE_DIR", "")
    shared = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME", "") or _home_of_account()
    if own == "~" or own.startswith("~/"):
        return Path(home + own[1:]).absolute()
    if own.startswith("~"):
        raise StoreError("a kernel cache cannot be in another user's home directory; name yours by ~/, or a full path")
    if own:
        return Path(own).absolute()
    if os.path.isabs(shared):
        return Path(shared) / "mlaprep"
    if not os.path.isabs(home):
        raise StoreError("no place for a kernel cache: set MLAPREP_CACHE_DIR, XDG_CACHE_HOME or HOME")
    return Path(home) / ".cache" / "mlaprep"


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """:func:`cache_dir` where none was given."""
    return cache_dir(None, environ)


def default_max_bytes(environ: Mapping[str, str]) -> int | None:
    """``$MLAPREP_CACHE_MAX_BYTES``; None where it is not set.

    Raises:
        StoreError: not a number of bytes.
    """
    text = environ.get("MLAPREP_CACHE_MAX_BYTES", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise StoreError("MLAPREP_CACHE_MAX_BYTES must be a number of bytes, digits only")
    return int(text)


def _home_of_account() -> str:
    """The home directory in the user database; ``os.path.expanduser`` takes the root where ``HOME`` is empty."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
