"""What a forked child must forget: locks another thread may hold, sockets and processes of the parent."""

import os
import weakref
from typing import Final, Protocol


class Forgetful(Protocol):
    def forget(self) -> None:
        """Back to the state of a new object, without touching what the parent still uses."""


_OBJECTS: Final["weakref.WeakSet[Forgetful]"] = weakref.WeakSet()
_registered = False


def forget_when_forked(forgetful: Forgetful) -> None:
    """Have ``forgetful.forget()`` called in every child that is forked while it lives."""
    global _registered
    _OBJECTS.add(forgetful)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for forgetful in list(_OBJECTS):
        forgetful.forget()
