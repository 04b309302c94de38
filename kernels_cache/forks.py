"""Forks: what a forked child must forget, such as locks that a thread of its parent held, sockets and processes."""

import logging
import os
import weakref
from typing import Final, Protocol


class Forgetful(Protocol):
    def forget(self) -> None:
        """Back to a state that is safe to use, without touching what the parent still uses."""


_OBJECTS: Final["weakref.WeakSet[Forgetful]"] = weakref.WeakSet()
_registered = False

_log = logging.getLogger(__name__)


def forget_when_forked(forgetful: Forgetful) -> None:
    """Have ``forgetful.forget()`` called in every child that is forked while it lives, before anything else there."""
    global _registered
    _OBJECTS.add(forgetful)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for forgetful in list(_OBJECTS):
        try:
            forgetful.forget()
        except Exception:  # the others must forget all the same
            _log.exception("a %s could not be made fit for a forked process", type(forgetful).__name__)
