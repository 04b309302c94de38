"""A disk that is full, read-only or broken: still served, nothing half written, counted, and well again later."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache.samples import make_artifact, numbered
from tmpfs import may_mount

from mlaprep.kernels_cache import disk_trouble
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import MemoryStore, TieredStore

ARTIFACT = make_artifact()
WRITING = ("open", "write", "fsync", "mkdir", "rename", "utime", "unlink", "rmdir")

# Run where the place may be filled and where limits may be set. Prints what it saw.
FULL_DISK = """
import os, resource, sys
from pathlib import Path
from cache.samples import make_artifact, synthetic_cubin
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import MemoryStore, TieredStore

place, kind = Path(sys.argv[1]), sys.argv[2]
disk = DiskStore(place / "cache")
store = TieredStore([MemoryStore(), disk])
artifact = make_artifact(cubin=synthetic_cubin(text=os.urandom(3000)))

if kind == "file size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
elif kind == "space":
    with open(place / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1024)):
                pass
        except OSError:
            pass
elif kind == "inodes":
    try:
        for number in range(10_000):
            (place / f"filler{number}").touch()
    except OSError:
        pass

store.publish(artifact)
store.link("1" * 64, artifact.key)
assert store.get(artifact.key) == artifact
assert store.get_blob(artifact.digest) == artifact.cubin
assert store.resolve("1" * 64) == artifact.key
assert disk.get(artifact.key) is None
assert disk.stats().write_errors >= 1, disk.stats()
assert disk.stats().damaged == 0
left = [path for path in (place / "cache").rglob("*") if not path.is_dir()]
assert [path for path in left if "links" not in path.parts] == [], left
assert list((place / "cache" / "tmp").glob("*")) == []

resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for filler in place.glob("filler*"):
    filler.unlink()
store.publish(artifact)
assert DiskStore(place / "cache").get(artifact.key) == artifact
print("served")
"""
MOUNTED = 'mount -t tmpfs -o "$5" tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'


SIZES = {"space": "size=64k,mode=0755", "inodes": "size=1m,nr_inodes=40,mode=0755"}
KINDS = ["file size", *(SIZES if may_mount() else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_B032_a_full_disk_costs_nothing_but_the_disk(tmp_path: Path, kind: str) -> None:
    plain = [sys.executable, "-c", FULL_DISK, str(tmp_path), kind]
    mounted = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        MOUNTED,
        "sh",
        str(tmp_path),
        sys.executable,
        FULL_DISK,
        kind,
        SIZES.get(kind, ""),
    ]
    done = subprocess.run(
        plain if kind == "file size" else mounted,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


class Faults:
    """Lets the n-th call of anything that writes fail, and all that follow while ``lasting``."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int, failing: int, lasting: bool) -> None:
        self.code, self.failing, self.lasting = code, failing, lasting
        self.calls, self.failed = 0, 0
        for name in WRITING:
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **named)
            cleaning = name in ("unlink", "rmdir")
            number, self.calls = self.calls, self.calls + 1
            if number == self.failing or (self.lasting and number > self.failing and not cleaning):
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **named)

        return call


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES])
def test_B032_every_call_that_writes_may_fail(tmp_path: Path, code: int, lasting: bool) -> None:
    for failing in range(100):
        root = tmp_path / str(failing)
        disk = DiskStore(root)
        store = TieredStore([MemoryStore(), disk])
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, code, failing, lasting)
            store.publish(ARTIFACT)
            store.link("1" * 64, ARTIFACT.key)
            assert store.get(ARTIFACT.key) == ARTIFACT
            assert store.resolve("1" * 64) == ARTIFACT.key
            assert disk.get(ARTIFACT.key) in (None, ARTIFACT)
            assert disk.stats().damaged == 0
        if not faults.failed:
            break
        assert [path.name for path in (root / "tmp").glob("*")] == [], f"call {failing} of {faults.calls}"
        store.publish(ARTIFACT)
        store.link("1" * 64, ARTIFACT.key)
        again = DiskStore(root)
        assert again.get(ARTIFACT.key) == ARTIFACT
        assert again.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
        assert again.resolve("1" * 64) == ARTIFACT.key
    assert failing > 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENFILE, errno.EINTR])
def test_a_fault_while_reading_is_a_miss(store: DiskStore, code: int) -> None:
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    for failing in range(100):
        copy = DiskStore(store.root)
        copy.publish(ARTIFACT)
        count = 0

        def faulty(real: Callable[..., Any], failing: int = failing) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal count
                number, count = count, count + 1
                if number == failing:
                    raise OSError(code, os.strerror(code))
                return real(*args, **named)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "read", "listdir", "stat", "fstat", "scandir"):
                patch.setattr(os, name, faulty(getattr(os, name)))
            assert copy.get(ARTIFACT.key) in (None, ARTIFACT)
            assert copy.get_blob(ARTIFACT.digest) in (None, ARTIFACT.cubin)
            assert copy.resolve("1" * 64) in (None, ARTIFACT.key)
            assert copy.find(ARTIFACT.key[:8]) in (None, ARTIFACT.key)
            assert {manifest.key for manifest in copy.list()} <= {ARTIFACT.key}
            copy.stats()
        if count <= failing:
            break
        assert code == errno.EIO or copy.stats().damaged == 0
    assert failing > 20


def test_descriptors_are_closed(store: DiskStore) -> None:
    def work(number: int) -> None:
        artifact = numbered(number % 7)
        store.publish(artifact)
        store.link("1" * 64, artifact.key)
        store.get(artifact.key)
        store.get("0" * 64)
        store.get_blob(artifact.digest)
        store.find("0")
        next(iter(store.list()))
        with store.key_lock(artifact.key, 0), store.key_lock(artifact.key, 0):
            pass
        (store.root / "sm_90a" / artifact.key[:2] / artifact.key / "kernel.cu").write_text("x")
        store.get(artifact.key)
        store.delete(artifact.key)
        store.gc()

    work(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        work(number)
    assert len(os.listdir("/proc/self/fd")) == before


def test_trouble_is_said_once_until_it_is_over(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for number in range(5):
            store.publish(numbered(number))
    assert len(caplog.records) == 1
    assert str(store.root) in caplog.text
    assert "No space left" in caplog.text
    store.publish(ARTIFACT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        store.publish(numbered(9))
    assert len(caplog.records) == 3
    assert caplog.records[1].getMessage() == f"kernel cache: {store.root} can be written again"
    assert store.stats().write_errors == 6


def test_B032_what_could_not_be_written_is_written_once_it_can_be(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_trouble, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(disk_trouble, "_MAX_OWED", 3)
    assert store.check() == store.trouble == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for number in range(5):
            store.publish(numbered(number))
            store.link(f"{number}" * 64, numbered(number).key)
        failed = store.stats().write_errors
        assert store.delete(numbered(3).key) is False
        assert store.check() == store.trouble == "is full"
        assert store.stats().write_errors == failed  # to look whether it works again is no publication
    assert store.check() == store.trouble == ""
    assert {manifest.key for manifest in store.list()} == {numbered(number).key for number in (2, 4)}
    assert [store.resolve(f"{number}" * 64) for number in (3, 4)] == [None, numbered(4).key]
    assert list((store.root / "tmp").iterdir()) == []


def test_B032_a_publication_that_comes_through_ends_the_trouble(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    store.publish(numbered(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        store.publish(numbered(2))
    assert store.trouble == "has no quota left for this user"
    store.publish(numbered(1))  # nothing was written for it
    assert store.trouble != ""
    store.publish(numbered(3))
    assert store.trouble == ""
    assert store.get(numbered(2).key) == numbered(2)
