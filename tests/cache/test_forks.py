"""Forked children: no lock of the parent's holds them, and no object keeps another from starting afresh."""

import copy
import logging
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from cache.samples import make_artifact, numbered

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore

ARTIFACT = make_artifact()


def in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` returned true in a forked child, in a few seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            os._exit(0 if work() else 3)
        finally:
            os._exit(4)
    return os.waitpid(child, 0)[1] == 0


def works(store: KernelStore) -> bool:
    store.publish(numbered(1))
    with store.key_lock(ARTIFACT.key, 1.0) as held:
        return held and store.get(numbered(1).key) == numbered(1) and store.stats().entries >= 1


@pytest.mark.parametrize("kind", ["memory", "disk", "tiers"])
def test_a_lock_held_at_the_fork_does_not_hold_the_child(tmp_path: Path, kind: str) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path / "cache")
    store: KernelStore = {"memory": memory, "disk": disk, "tiers": TieredStore([memory, disk])}[kind]
    store.publish(ARTIFACT)
    locks = [memory._lock, memory._counters._lock, disk._counters._lock]
    holder = Thread(target=lambda: [lock.acquire() for lock in locks])
    holder.start()
    holder.join()
    assert in_child(lambda: works(store))


def test_what_a_memory_held_is_there_in_the_child() -> None:
    store = MemoryStore()
    store.publish(ARTIFACT)
    with store.key_lock(ARTIFACT.key, 1.0):
        assert in_child(lambda: store.get(ARTIFACT.key) == ARTIFACT and works(store))


def test_one_that_fails_keeps_no_other_from_forgetting() -> None:
    class Counting:
        forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    class Failing:
        def forget(self) -> None:
            raise OSError("no")

    good, bad = [Counting() for _ in range(8)], [Failing() for _ in range(8)]
    for pair in zip(good, bad, strict=True):
        for one in pair:
            forget_when_forked(one)
    logging.disable(logging.CRITICAL)
    try:
        assert in_child(lambda: all(one.forgotten == 1 for one in good))
    finally:
        logging.disable(logging.NOTSET)
    assert not any(one.forgotten for one in good)


@pytest.mark.parametrize("duplicate", [copy.copy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_of_a_disk_store_does_not_touch_the_disk(
    tmp_path: Path, duplicate: Callable[[DiskStore], DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "cache", max_bytes=2**20)
    shutil.rmtree(store.root)
    with monkeypatch.context() as patch:
        for name in ("open", "mkdir", "makedirs", "stat"):
            patch.setattr(os, name, lambda *_, **__: pytest.fail("the disk was touched"))
        again = duplicate(store)
    assert (again.root, again.max_bytes) == (store.root, store.max_bytes)
    assert not store.root.exists()
    assert again.get(ARTIFACT.key) is None
    again.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
