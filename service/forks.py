"""Forks: what holds threads, locks or processes starts afresh in a forked copy of its process."""

import os
import weakref
from typing import Protocol


class Resettable(Protocol):
    """Anything that can go back to having nothing running."""

    def reset(self) -> None:
        """Forget threads, locks and processes without touching them: they are the parent's."""


_watched: "weakref.WeakSet[Resettable]" = weakref.WeakSet()
_registered = False


def reset_when_forked(resettable: Resettable) -> None:
    """Have ``reset`` called in every forked copy of this process, before anything else runs there."""
    global _registered
    _watched.add(resettable)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_reset_all)


def _reset_all() -> None:
    for resettable in list(_watched):
        resettable.reset()
