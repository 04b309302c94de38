"""Many writers, lost races, odd file systems and killed processes: no half entry, no error, no wasted work."""

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cache.samples import make_artifact, numbered, synthetic_cubin

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.files import Folder
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore

ARTIFACT = make_artifact()
processes = multiprocessing.get_context("fork")
MEMBERS = 16


def leftovers(root: Path) -> list[str]:
    """What writers and holders of locks should have cleaned up."""
    return [path.name for folder in ("tmp", "locks", "quarantine") for path in (root / folder).glob("*")]


def get_or_make(store: KernelStore, counter: Path) -> str:
    """What a builder does: look, lock, look again, make once, publish."""
    artifact = store.get(ARTIFACT.key)
    if artifact is None:
        with store.key_lock(ARTIFACT.key, 30) as held:
            assert held
            artifact = store.get(ARTIFACT.key)
            if artifact is None:
                with counter.open("a") as file:
                    file.write("x")
                time.sleep(0.05)
                artifact = ARTIFACT
                store.publish(artifact)
    return artifact.digest


def in_processes(work: Callable[[int], Any]) -> list[Any]:
    """Results of ``work`` in forked processes that start together."""
    barrier, results = processes.Barrier(MEMBERS), processes.SimpleQueue()

    def member(number: int) -> None:
        barrier.wait(30)
        results.put(work(number))

    members = [processes.Process(target=member, args=(number,)) for number in range(MEMBERS)]
    for process in members:
        process.start()
    found = [results.get() for _ in members]
    for process in members:
        process.join(30)
    assert [process.exitcode for process in members] == [0] * MEMBERS
    return found


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(MEMBERS)

    def member(number: int) -> Any:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(MEMBERS) as pool:
        return list(pool.map(member, range(MEMBERS)))


@pytest.mark.parametrize("run", [in_processes, in_threads])
def test_B023_one_empty_cache_one_key_one_compile(run: Callable[..., list[str]], tmp_path: Path) -> None:
    root, counter = tmp_path / "cache", tmp_path / "compiles"
    digests = run(lambda _: get_or_make(DiskStore(root), counter))
    assert digests == [ARTIFACT.digest] * MEMBERS
    assert counter.read_text() == "x"
    assert leftovers(root) == []


@pytest.mark.parametrize("shared", [MemoryStore, lambda: None])
def test_B023_threads_of_one_store(shared: Callable[[], MemoryStore | None], tmp_path: Path) -> None:
    store: KernelStore = shared() or TieredStore([MemoryStore(), DiskStore(tmp_path / "cache")])
    digests = in_threads(lambda _: get_or_make(store, tmp_path / "compiles"))
    assert digests == [ARTIFACT.digest] * MEMBERS
    assert (tmp_path / "compiles").read_text() == "x"
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("run", [in_processes, in_threads])
def test_B023_without_any_lock_nothing_breaks(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    root = tmp_path / "cache"

    def work(_: int) -> tuple[bool, int, int]:
        store = DiskStore(root)
        good = []
        for number in range(5):
            store.publish(numbered(number))
            good.append(store.get(numbered(number).key) == numbered(number))
        stats = store.stats()
        return all(good), stats.damaged + stats.write_errors + stats.differing, stats.entries

    assert run(work) == [(True, 0, 5)] * MEMBERS
    assert leftovers(root) == []


def test_B023_readers_and_an_evicting_writer(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    artifacts = [numbered(number) for number in range(6)]

    def work(number: int) -> tuple[int, int]:
        store = DiskStore(root)
        deadline = time.monotonic() + 0.3
        chosen = random.Random(number)
        while time.monotonic() < deadline:
            artifact = chosen.choice(artifacts)
            if number % 4 == 0:
                store.publish(artifact)
            elif number % 4 == 1:
                store.delete(artifact.key)
            else:
                assert store.get(artifact.key) in (None, artifact)
        return store.stats().damaged, store.stats().write_errors

    assert in_threads(work) == [(0, 0)] * MEMBERS
    assert leftovers(root) == []


def test_B029_two_writers_with_different_bytes(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    versions = [make_artifact(cubin=synthetic_cubin(text=b"v%d" % number)) for number in range(MEMBERS)]

    def work(number: int) -> tuple[int, int]:
        store = DiskStore(root)
        store.publish(versions[number])
        return store.stats().differing, store.stats().damaged

    assert sorted(in_processes(work)) == [(0, 0)] + [(1, 0)] * (MEMBERS - 1)
    assert DiskStore(root).get(ARTIFACT.key) in versions


class Renames:
    """Stands in for os.rename; fails for entries on their way to their place, as a file system would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, times: int = 10**9) -> None:
        self.code, self.times, self.calls = code, times, 0
        self.before: Callable[[], None] = lambda: None
        self._rename = os.rename
        monkeypatch.setattr(os, "rename", self)

    def __call__(self, source: str, target: str, **folders: int) -> None:
        if is_digest(target) and source.startswith("entry-"):
            self.calls += 1
            before, self.before = self.before, lambda: None
            before()
            if self.calls <= self.times:
                raise OSError(self.code, os.strerror(self.code))
        self._rename(source, target, **folders)


CODES = [errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE, errno.EBUSY]


@pytest.mark.parametrize("code", CODES)
def test_B024_rename_loser_leaves_the_winner_and_no_trace(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    renames = Renames(monkeypatch, code)

    def win() -> None:
        renames.times = 0
        DiskStore(store.root).publish(ARTIFACT)
        renames.times = 10**9

    renames.before = win
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().write_errors == 0
    assert leftovers(store.root) == []


@pytest.mark.parametrize("code", CODES)
def test_B024_rename_loser_serves_its_bytes(store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    # The winner stays invisible, as on a network file system with cached directories.
    tiers = TieredStore([MemoryStore(), store])
    Renames(monkeypatch, code)
    started = time.monotonic()
    tiers.publish(ARTIFACT)
    assert time.monotonic() - started < 1
    assert tiers.get(ARTIFACT.key) == ARTIFACT
    assert tiers.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert store.stats().write_errors == (0 if code in (errno.ENOTEMPTY, errno.EEXIST) else 1)
    assert leftovers(store.root) == []


@pytest.mark.parametrize("code", [*CODES, errno.ENOENT])
def test_B024_a_passing_failure_is_tried_again(store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Renames(monkeypatch, code, times=1)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().write_errors == 0


def test_B024_a_damaged_winner_gives_way(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    renames = Renames(monkeypatch, errno.ENOTEMPTY, times=0)

    def win_and_break() -> None:
        DiskStore(store.root).publish(ARTIFACT)
        (store.root / "sm_90a" / ARTIFACT.key[:2] / ARTIFACT.key / "kernel.cubin").write_bytes(b"")

    renames.before = win_and_break
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().quarantined == 1


def test_B024_a_publication_is_never_read_back(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_stat = os.open, os.stat

    def published(name: object) -> bool:
        return name == ARTIFACT.key and visible_after > time.monotonic()

    def open_later(name: Any, *rest: Any, **named: Any) -> int:
        if published(name):
            raise FileNotFoundError(errno.ENOENT, "not visible yet")
        return real_open(name, *rest, **named)

    def stat_later(name: Any, *rest: Any, **named: Any) -> os.stat_result:
        if published(name):
            raise FileNotFoundError(errno.ENOENT, "not visible yet")
        return real_stat(name, *rest, **named)

    visible_after = time.monotonic() + 0.5
    monkeypatch.setattr(os, "open", open_later)
    monkeypatch.setattr(os, "stat", stat_later)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) is None
    store.publish(ARTIFACT)
    assert (store.stats().write_errors, store.stats().damaged) == (0, 0)
    visible_after = 0
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert leftovers(store.root) == []


def test_B024_cleanup_errors_are_never_raised(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    DiskStore(store.root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        store.publish(ARTIFACT)
        assert leftovers(store.root) == []
        Renames(patch, errno.ENOTEMPTY)
        store.publish(numbered(1))
        assert len(leftovers(store.root)) == 1
    assert "left for a later sweep" in caplog.text
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().write_errors == 0
    assert store.sweep(min_age_s=0) == 1


def test_B024_a_stale_handle_is_opened_again(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(ARTIFACT)
    real_read, failures = os.read, iter([errno.ESTALE])

    def read(descriptor: int, size: int) -> bytes:
        for code in failures:
            raise OSError(code, os.strerror(code))
        return real_read(descriptor, size)

    monkeypatch.setattr(os, "read", read)
    assert store.get(ARTIFACT.key) == ARTIFACT
    failures = iter([errno.ESTALE] * 10)
    assert store.get(ARTIFACT.key) is None
    failures = iter([])
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().damaged == 0


def test_an_entry_that_is_replaced_while_it_is_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(ARTIFACT)
    real_open, replaced = os.open, []

    def open_slowly(name: Any, *rest: Any, **named: Any) -> int:
        if name == "kernel.cubin" and not replaced:
            replaced.append(name)
            other = DiskStore(store.root)
            assert other.delete(ARTIFACT.key)
            other.publish(ARTIFACT)
        return real_open(name, *rest, **named)

    monkeypatch.setattr(os, "open", open_slowly)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert replaced
    assert store.stats().damaged == 0


def test_locks_survive_the_deletion_of_their_file(store: DiskStore) -> None:
    lock = store.root / "locks" / f"{ARTIFACT.key}.lock"
    with store.key_lock(ARTIFACT.key, 1) as held:
        assert held
        lock.unlink()
        with store.key_lock(ARTIFACT.key, 1) as again:
            assert again
            shutil.rmtree(lock.parent)
    assert not lock.exists()
    with store.key_lock(ARTIFACT.key, 1) as held:
        assert held


@pytest.mark.parametrize("content", [b"", b"12345", b"\xff" * 10_000])
def test_the_content_of_a_lock_is_never_trusted(store: DiskStore, content: bytes) -> None:
    lock = store.root / "locks" / f"{ARTIFACT.key}.lock"
    lock.parent.mkdir(mode=0o700)
    lock.write_bytes(content)
    with store.key_lock(ARTIFACT.key, 0) as held:
        assert held


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_something_else_in_place_of_a_lock_means_no_lock(store: DiskStore, tmp_path: Path, kind: str) -> None:
    lock = store.root / "locks" / f"{ARTIFACT.key}.lock"
    lock.parent.mkdir(mode=0o700)
    if kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(tmp_path / "outside")
    with store.key_lock(ARTIFACT.key, 5) as held:
        assert not held
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_costs_work_only(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with store.key_lock(ARTIFACT.key, 5) as held:
        assert not held
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT


def test_a_lock_of_a_killed_process_is_free(store: DiskStore) -> None:
    taken = processes.Event()

    def hold() -> None:
        with store.key_lock(ARTIFACT.key, 1):
            taken.set()
            time.sleep(60)

    process = processes.Process(target=hold)
    process.start()
    assert taken.wait(30)
    with store.key_lock(ARTIFACT.key, 0.05) as held:
        assert not held
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(30)
    with store.key_lock(ARTIFACT.key, 5) as held:
        assert held


def whole(root: Path, artifacts: list[KernelArtifact]) -> set[str]:
    """Keys of the entries, after every one of them was found good."""
    store = DiskStore(root)
    names = {path.name for path in root.glob("sm_*/??/*")}
    expected = {artifact.key: artifact for artifact in artifacts}
    for key in names:
        assert store.get(key) == expected[key]
    assert store.stats().damaged == 0
    return names


def test_B032_a_writer_killed_at_random_leaves_whole_entries_only(tmp_path: Path) -> None:
    root, chance = tmp_path / "cache", random.Random(5)
    artifacts = [numbered(number) for number in range(400)]
    written: set[str] = set()
    for start in range(0, 300, 10):
        started = processes.Event()

        def write(start: int = start, started: Any = started) -> None:
            store = DiskStore(root)
            for artifact in artifacts[start:]:
                store.publish(artifact)
                started.set()

        process = processes.Process(target=write)
        process.start()
        assert started.wait(30)
        time.sleep(chance.uniform(0, 0.012))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(30)
        found = whole(root, artifacts)
        assert found >= written
        written = found
    assert len(written) >= 30
    DiskStore(root).sweep(min_age_s=0)
    assert leftovers(root) == []


def test_B032_a_writer_killed_at_every_step_leaves_whole_entries_only(tmp_path: Path) -> None:
    steps = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")
    finished = False
    for death in range(200):
        root = tmp_path / str(death)

        def write(death: int = death, root: Path = root) -> None:
            store, count = DiskStore(root), 0

            def dying(real: Callable[..., Any]) -> Callable[..., Any]:
                def step(*args: Any, **named: Any) -> Any:
                    nonlocal count
                    if count == death:
                        os._exit(9)
                    count += 1
                    return real(*args, **named)

                return step

            for name in steps:
                setattr(os, name, dying(getattr(os, name)))
            store.publish(ARTIFACT)

        process = processes.Process(target=write)
        process.start()
        process.join(30)
        whole(root, [ARTIFACT])
        store = DiskStore(root)
        store.publish(ARTIFACT)
        assert store.get(ARTIFACT.key) == ARTIFACT
        assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
        store.sweep(min_age_s=0)
        assert leftovers(root) == []
        if process.exitcode == 0:
            finished = True
            break
        assert process.exitcode == 9
    assert finished
    assert death > 20


def test_everything_is_on_the_medium_before_it_gets_its_name(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: str, target: str, **folders: int) -> None:
        calls.append(f"rename {target}")
        real_rename(source, target, **folders)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store.publish(ARTIFACT)
    at = calls.index(f"rename {ARTIFACT.key}")
    assert {"kernel.cubin", "kernel.cu", "manifest.json"} < set(calls[:at])
    assert any(name.startswith("entry-") for name in calls[:at])
    assert calls[at + 1] == ARTIFACT.key[:2]


def test_a_living_writer_is_not_swept(store: DiskStore) -> None:
    real = dataclasses.replace(ARTIFACT)
    other = DiskStore(store.root)
    with pytest.MonkeyPatch.context() as patch:
        Renames(patch, 0, times=0).before = lambda: other.sweep(min_age_s=0) and None
        store.publish(real)
    assert store.get(ARTIFACT.key) == ARTIFACT


def test_a_lock_file_replaced_while_it_is_taken_does_not_count(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = store.root / "locks" / f"{ARTIFACT.key}.lock"
    real_flock, replaced = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(lock.stat().st_ino)
            lock.unlink()
            lock.touch(mode=0o600)
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.key_lock(ARTIFACT.key, 5) as held, store.key_lock(ARTIFACT.key, 0.02) as again:
        assert replaced
        assert (held, again) == (True, False)


def test_a_good_entry_that_replaced_a_damaged_one_is_not_set_aside(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(ARTIFACT)
    (store.root / "sm_90a" / ARTIFACT.key[:2] / ARTIFACT.key / "kernel.cubin").write_bytes(b"")
    real_make = Folder.make

    def make(folder: Folder, name: str, **named: bool) -> Folder:
        if name == "quarantine":
            with monkeypatch.context() as patch:
                patch.setattr(Folder, "make", real_make)
                other = DiskStore(store.root)
                other.delete(ARTIFACT.key)
                other.publish(ARTIFACT)
        return real_make(folder, name, **named)

    monkeypatch.setattr(Folder, "make", make)
    store.get(ARTIFACT.key)
    monkeypatch.undo()
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().damaged == 1
