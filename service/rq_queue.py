"""RqQueue: the queue of warm-up jobs on RQ, under names of its own and without anything that could run.

Whoever can write to the Redis can write an RQ job. So its function, callbacks and webhooks are never looked at, and
neither is a pickle: an entry is an id in JSON, and a worker does one thing with it.
"""

import importlib
import os
import secrets
from types import ModuleType
from typing import Any, Final

from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis_keys import PREFIX
from mlaprep.kernels_cache.redis_url import INSTALL

QUEUE: Final = "warmups"
RQ_PREFIX: Final = f"{PREFIX}rq"
ENTRY_POINT: Final = "mlaprep.service.worker.run_entry"
"""What an entry names, for people who look at the queue."""

_VARIABLE: Final = "RQ_KEY_PREFIX"
_KEPT_S: Final = 3600
_MAX_ENTRIES: Final = 4096


def rq_package() -> ModuleType:
    """RQ, loaded when first needed, with all its names behind our prefix.

    Raises:
        StoreError: it is not installed, or this process loaded it before with names of its own.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = RQ_PREFIX  # it reads that once, as it is loaded
    try:
        rq = importlib.import_module("rq")
        prefix = importlib.import_module("rq.defaults").RQ_KEY_PREFIX
    except (ImportError, AttributeError):
        raise StoreError(f"warm-ups on a shared Redis need the package rq, version 3: {INSTALL}") from None
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    if prefix != RQ_PREFIX:
        raise StoreError("this process uses rq for something else; serve mlaprep from a process of its own")
    return rq


def enqueue(client: Any, job_id: str) -> None:
    """Put a warm-up job in line."""
    rq = rq_package()
    queue = rq.Queue(QUEUE, connection=client, serializer="json")
    queue.enqueue_call(
        ENTRY_POINT,
        args=[job_id],
        job_id=f"{job_id}-{secrets.token_hex(4)}",
        description=f"warm-up {job_id}",
        timeout=-1,
        result_ttl=0,
        failure_ttl=_KEPT_S,
    )


def queued_ids(client: Any) -> set[str]:
    """Warm-up jobs that are in line."""
    entries = client.lrange(f"{RQ_PREFIX}:queue:{QUEUE}", 0, _MAX_ENTRIES)
    return {entry.decode("ascii", "replace").partition("-")[0] for entry in entries}
