"""Bundles: the archives of kernels that a client reads from, below its local store."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.errors import BundleError

if TYPE_CHECKING:
    from mlaprep.kernels_cache.bundle import Bundle

VARIABLE: Final = "MLAPREP_BUNDLE"

_log: Final = logging.getLogger(__name__)


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def bundles_by_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The paths in ``MLAPREP_BUNDLE``, between colons; none where it is not set or empty."""
    return tuple(path for path in environ.get(VARIABLE, "").split(":") if path)


def bundle_paths(given: Paths | None) -> tuple[str | os.PathLike[str], ...]:
    """One path or several; those of the environment where none is given."""
    if given is None:
        return bundles_by_environment(os.environ)
    return (given,) if isinstance(given, str | os.PathLike) else tuple(given)


class Bundles:
    """Archives, each looked into once, when a kernel is first looked for.

    One that is missing, damaged or writable by others is no error: a warning says so once, ``troubles`` says so each
    time, and it is looked for again with the next kernel.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)
        self._opened: dict[str, Bundle] = {}
        self._told: set[str] = set()

    def find(self, variant_id: str, arch: str, troubles: list[str]) -> Iterator[KernelArtifact]:
        """The kernels of a variant, whole and verified, of the first archive first; what went wrong goes to
        ``troubles``."""
        for path in self.paths:
            try:
                bundle = self._open(path)
                for key in bundle.keys(variant_id, arch):
                    yield bundle.read(key)
            except BundleError as error:
                troubles.append(f"bundle {error}")
                self._leave_out(path, error)

    def names(self) -> set[tuple[str, str]]:
        """Variant id and architecture of every kernel in the indices; no kernel is read."""
        found: set[tuple[str, str]] = set()
        for path in self.paths:
            try:
                found.update((record.variant_id, record.arch) for record in self._open(path).records)
            except BundleError as error:
                self._leave_out(path, error)
        return found

    def _open(self, path: str) -> "Bundle":
        from mlaprep.kernels_cache.bundle import Bundle  # some milliseconds that a worker without bundles keeps

        bundle = self._opened.get(path)
        if bundle is None:
            bundle = self._opened[path] = Bundle.open(path, private=True)
        return bundle

    def _leave_out(self, path: str, error: BundleError) -> None:
        self._opened.pop(path, None)  # it may have been replaced by a good one
        if path not in self._told:
            self._told.add(path)
            _log.warning("a bundle is left out: %s", error)
