"""Errors of the kernel cache, a tree of its own because this package stands alone.

::

    CacheError
    ├── ArtifactError (also ValueError)  a kernel, cubin or manifest that is damaged or not what was asked
    ├── BundleError                      an archive of kernels that must not be used; .member
    ├── SigningError (also ValueError)   keys that cannot be used to sign or to check signatures
    └── StoreError                       a store that cannot be opened or a question it cannot answer
        ├── AmbiguousKeyError            a key prefix that more than one entry shares
        ├── PlaceUnusable                a directory that cannot be used as asked; .told does not name it
        ├── SharedStoreDown              a shared Redis that does not answer in time; .reason
        └── SharedStoreRefusal           a shared Redis that answered with an error, such as full; .reason

A store raises none of them for damage, for a failing disk or for a Redis in trouble: those are misses and counters.
"""


class CacheError(Exception):
    """Base of every error that the kernel cache raises on purpose."""


class ArtifactError(CacheError, ValueError):
    """An artifact that must not be used: damaged, incomplete, or for something else than was asked.

    ``reason`` is a short slug for metrics and tests, e.g. ``wrong-arch`` or ``cubin-digest``.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class BundleError(CacheError):
    """An archive of kernels that is damaged, or is none. ``member`` names the part at fault, "" for the whole."""

    def __init__(self, message: str, *, member: str = "") -> None:
        self.member = member
        super().__init__(message)


class SigningError(CacheError, ValueError):
    """Keys that cannot be used: none where some are asked for, malformed, unreadable, or readable by others.

    The message never repeats a key, nor what was given in place of one.
    """


class StoreError(CacheError):
    """A store that cannot be used as asked; the message names the place and what to change."""


class PlaceUnusable(StoreError):
    """A directory that cannot be used as asked. ``told`` says the same without naming it, for callers over a network.

    Args:
        before: the sentence up to the directory's name.
        place: the directory.
        after: the rest of the sentence, which must not name it either.
    """

    def __init__(self, before: str, place: object, after: str) -> None:
        self._parts = (before, str(place), after)
        self.told = f"{before} the cache directory{after}"
        super().__init__(f"{before} {place}{after}")

    def __reduce__(self) -> tuple[type["PlaceUnusable"], tuple[str, str, str]]:
        return type(self), self._parts


class AmbiguousKeyError(StoreError):
    """A key prefix that several entries share; the first match is never guessed."""

    def __init__(self, prefix: str, keys: int) -> None:
        self.prefix = prefix
        self.keys = keys
        super().__init__(f"key prefix {prefix} fits {keys} entries; give more digits")


class SharedStoreDown(StoreError):
    """The shared Redis did not answer in time, or is left alone because it did not a moment ago."""

    def __init__(self, place: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the shared Redis {place} is down: {reason}")


class SharedStoreRefusal(StoreError):
    """The shared Redis answered with an error; ``reason`` says which, without what was sent."""

    def __init__(self, place: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the shared Redis {place} refuses: {reason}")
