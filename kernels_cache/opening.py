"""Opening: the store of this user, or what stands in for it where no directory can be used."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlaprep.kernels_cache.disk import DISK_BYTES, DiskStore
from mlaprep.kernels_cache.errors import PlaceUnusable, StoreError
from mlaprep.kernels_cache.location import default_cache_dir, default_max_bytes
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore

_ALL_IN_MEMORY: Final = "kernels are kept in memory only, and lost when this process ends"
_NEW_IN_MEMORY: Final = "new kernels are kept in memory only"

_log = logging.getLogger(__name__)


def open_default_store(environ: Mapping[str, str] | None = None) -> KernelStore:
    """The disk store of :func:`default_cache_dir`, limited to ``$MLAPREP_CACHE_MAX_BYTES`` where that is set.

    With no usable directory it is a memory store, with a directory that can only be read a memory store
    before it; one warning is logged either way. Never raises.
    """
    opened = open_store_or_memory(os.environ if environ is None else environ)
    if opened.warning:
        _log.warning("%s", opened.warning)
    return opened.store


@dataclass(frozen=True, slots=True)
class Opened:
    """A store, and what is to be warned of; "" where nothing is."""

    store: KernelStore
    warning: str = ""
    told: str = ""
    """The same without the directory's name, for callers over a network."""


def open_store_or_memory(environ: Mapping[str, str]) -> Opened:
    """As :func:`open_default_store`, with a value in place of the log line."""
    try:
        max_bytes = default_max_bytes(environ)
        store = DiskStore(default_cache_dir(environ), DISK_BYTES if max_bytes is None else max_bytes)
    except StoreError as error:
        told = error.told if isinstance(error, PlaceUnusable) else str(error)
        return Opened(MemoryStore(), f"{_ALL_IN_MEMORY}: {error}", f"{_ALL_IN_MEMORY}: {told}")
    if os.access(store.root, os.W_OK | os.X_OK):
        return Opened(store)
    warning = PlaceUnusable(f"{_NEW_IN_MEMORY}:", store.root, " cannot be written")
    return Opened(TieredStore([MemoryStore(), store]), str(warning), warning.told)


def disk_of(store: KernelStore) -> DiskStore | None:
    """The store on disk that a store is or has as a tier; None for one without."""
    if isinstance(store, TieredStore):
        return next((disk for tier in store.tiers if (disk := disk_of(tier)) is not None), None)
    return store if isinstance(store, DiskStore) else None


def folder_of(store: KernelStore) -> Path | None:
    """The directory of a store on disk; None for one without."""
    disk = disk_of(store)
    return None if disk is None else disk.root
