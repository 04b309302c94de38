"""Opening: the store of this user, or what stands in for it where no directory can be used."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from mlaprep.kernels_cache.disk import DISK_BYTES, DiskStore
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.location import default_cache_dir, default_max_bytes
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore

_log = logging.getLogger(__name__)


def open_default_store(environ: Mapping[str, str] | None = None) -> KernelStore:
    """The disk store of :func:`default_cache_dir`, limited to ``$MLAPREP_CACHE_MAX_BYTES`` where that is set.

    With no usable directory it is a memory store, with a directory that can only be read a memory store
    before it; one warning is logged either way. Never raises.
    """
    store, warning = open_store_or_memory(os.environ if environ is None else environ)
    if warning:
        _log.warning("%s", warning)
    return store


def open_store_or_memory(environ: Mapping[str, str]) -> tuple[KernelStore, str]:
    """As :func:`open_default_store`, with what is to be warned of in place of a log line; "" where nothing is."""
    try:
        max_bytes = default_max_bytes(environ)
        store = DiskStore(default_cache_dir(environ), DISK_BYTES if max_bytes is None else max_bytes)
    except StoreError as error:
        return MemoryStore(), f"kernels are kept in memory only, and lost when this process ends: {error}"
    if os.access(store.root, os.W_OK | os.X_OK):
        return store, ""
    return TieredStore([MemoryStore(), store]), f"new kernels are kept in memory only: {store.root} cannot be written"


def folder_of(store: KernelStore) -> Path | None:
    """The directory of a store on disk; None for one without."""
    if isinstance(store, TieredStore):
        return next((folder for tier in store.tiers if (folder := folder_of(tier)) is not None), None)
    return store.root if isinstance(store, DiskStore) else None
