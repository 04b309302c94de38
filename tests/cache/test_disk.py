"""The disk store's layout, privacy, order of eviction and cost of a hit."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cache.samples import make_artifact, numbered

from mlaprep.kernels_cache import disk as disk_module
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.elf import complete_cubin
from mlaprep.kernels_cache.errors import StoreError

ARTIFACT = make_artifact()
KERNEL_FILES = {"kernel.cubin", "manifest.json", "kernel.cu"}

READER = """
import sys
from pathlib import Path
from mlaprep.kernels_cache.disk import DiskStore
store = DiskStore(Path(sys.argv[1]))
artifact = store.get(sys.argv[2])
print(artifact.digest, store.stats().hits)
"""


def entry_of(store: DiskStore, key: str = ARTIFACT.key, arch: str = "sm_90a") -> Path:
    return store.root / arch / key[:2] / key


def test_layout(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    files = {str(path.relative_to(store.root)) for path in store.root.rglob("*") if not path.is_dir()}
    place = f"sm_90a/{ARTIFACT.key[:2]}/{ARTIFACT.key}"
    assert files == {
        *(f"{place}/{name}" for name in (*KERNEL_FILES, "last_use")),
        f"blobs/{ARTIFACT.digest[:2]}/{ARTIFACT.digest}",
        f"links/11/{'1' * 64}",
    }
    assert (entry_of(store) / "kernel.cubin").read_bytes() == ARTIFACT.cubin
    assert (entry_of(store) / "kernel.cu").read_text() == ARTIFACT.source


def test_everything_is_private(store: DiskStore) -> None:
    old = os.umask(0)
    try:
        store.publish(ARTIFACT)
        store.link("1" * 64, ARTIFACT.key)
    finally:
        os.umask(old)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in [store.root, *store.root.rglob("*")]}
    assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o702, 0o777, 0o1777])
def test_a_root_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StoreError, match="chmod go-w"):
        DiskStore(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_root_that_others_may_read_is_fine(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    store = DiskStore(root)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT


def test_a_root_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreError, match=f"belongs to user {user}"):
        DiskStore(root)


def test_a_root_that_becomes_unsafe_is_used_no_more(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    store.root.chmod(0o777)
    assert store.get(ARTIFACT.key) is None
    store.publish(numbered(1))
    assert list(store.list()) == []
    assert (store.stats().write_errors, store.stats().damaged) == (1, 0)
    store.root.chmod(0o700)
    assert store.get(ARTIFACT.key) == ARTIFACT


@pytest.mark.parametrize("kind", ["file", "dangling link", "below a file", "nul"])
def test_a_root_that_cannot_be(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "cache"
    if kind == "file":
        root.write_text("mine")
    elif kind == "dangling link":
        (tmp_path / "loop").symlink_to("loop")
        root = tmp_path / "loop"
    elif kind == "below a file":
        root.write_text("mine")
        root = root / "below"
    else:
        root = Path(f"{tmp_path}/a\0b")
    with pytest.raises(StoreError, match=r"no kernel cache .*; point MLAPREP_CACHE_DIR at"):
        DiskStore(root)


def test_a_root_reached_through_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = DiskStore(tmp_path / "link" / "cache")
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert (tmp_path / "real" / "cache" / "sm_90a").is_dir()


def test_a_root_that_is_removed_comes_back(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    store.root.rename(store.root.with_name("gone"))
    assert store.get(ARTIFACT.key) is None
    assert store.stats().entries == 0
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().write_errors == 0


def test_B036_another_process_hits_and_leaves_the_kernel_alone(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    os.utime(entry_of(store) / "last_use", (1, 1))

    def marks() -> dict[str, tuple[int, int, int]]:
        statuses = {name: (entry_of(store) / name).stat() for name in KERNEL_FILES}
        return {name: (status.st_ino, status.st_mtime_ns, status.st_size) for name, status in statuses.items()}

    before = marks()
    command = [sys.executable, "-c", READER, str(store.root), ARTIFACT.key]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [ARTIFACT.digest, "1"]
    assert marks() == before
    assert (entry_of(store) / "last_use").stat().st_mtime > time.time() - 60


def test_real_cubins_round_trip(store: DiskStore, compile_raw: Callable[[str], bytes]) -> None:
    artifacts = [
        make_artifact(arch=arch, cubin=complete_cubin(compile_raw(arch))) for arch in ("sm_89", "sm_90a", "sm_120f")
    ]
    for artifact in artifacts:
        store.publish(artifact)
        assert store.get(artifact.key) == artifact
        assert store.get_blob(artifact.digest) == artifact.cubin


def used(store: DiskStore, *artifacts: object) -> None:
    """Gives the entries last uses in this order, long ago."""
    for age, artifact in enumerate(artifacts):
        os.utime(entry_of(store, artifact.key) / "last_use", (1000 + age, 1000 + age))  # type: ignore[attr-defined]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    artifacts = [numbered(number) for number in range(6)]
    scout = DiskStore(tmp_path / "scout")
    scout.publish(artifacts[0])
    size = scout.stats().bytes
    store = DiskStore(tmp_path / "cache", max_bytes=3 * size)
    for artifact in artifacts[:3]:
        store.publish(artifact)
    assert store.get(artifacts[0].key) is not None
    store.publish(artifacts[3])
    assert {manifest.key for manifest in store.list()} == {artifacts[number].key for number in (0, 2, 3)}
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.evicted) == (3, 3 * size, 1)
    assert store.get_blob(artifacts[1].digest) is None
    assert list((store.root / "tmp").iterdir()) == []


def test_eviction_goes_by_the_recorded_use_not_by_access_times(store: DiskStore) -> None:
    artifacts = [numbered(number) for number in range(4)]
    for artifact in artifacts:
        store.publish(artifact)
    used(store, *(artifacts[number] for number in (2, 0, 3, 1)))
    for name in KERNEL_FILES:
        (entry_of(store, artifacts[2].key) / name).read_bytes()
        os.utime(entry_of(store, artifacts[2].key) / name)
    size = store.stats().bytes // 4
    assert store.gc(max_bytes=2 * size) == 2
    assert {manifest.key for manifest in store.list()} == {artifacts[1].key, artifacts[3].key}


def test_a_hit_is_recorded_every_time_another_key_was_hit_between(store: DiskStore) -> None:
    one, other = numbered(1), numbered(2)
    for artifact in (one, other):
        store.publish(artifact)
    for _ in range(2):
        used(store, one, other)
        store.get(one.key)
        assert (entry_of(store, one.key) / "last_use").stat().st_mtime > 2000
        store.get(other.key)
        used(store, other)


def test_a_lost_record_of_last_use_is_made_again(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    (entry_of(store) / "last_use").unlink()
    assert store.stats().entries == 1
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert (entry_of(store) / "last_use").exists()


def test_other_writers_are_counted_against_the_limit(tmp_path: Path) -> None:
    size = 0
    artifacts = [numbered(number) for number in range(24)]
    unlimited = DiskStore(tmp_path / "scout")
    unlimited.publish(artifacts[0])
    size = unlimited.stats().bytes
    writers = [DiskStore(tmp_path / "cache", max_bytes=6 * size) for _ in range(4)]
    for number, artifact in enumerate(artifacts):
        writers[number % 4].publish(artifact)
    assert writers[0].stats().bytes <= 6 * size


def test_many_entries_leave_room_for_the_next(tmp_path: Path) -> None:
    artifacts = [numbered(number) for number in range(101)]
    store = DiskStore(tmp_path / "cache")
    for artifact in artifacts[:100]:
        store.publish(artifact)
    size = store.stats().bytes // 100
    limited = DiskStore(tmp_path / "cache", max_bytes=100 * size)
    limited.publish(artifacts[100])
    assert limited.stats().entries == 93
    assert limited.get(artifacts[100].key) is not None


def test_an_artifact_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache", max_bytes=ARTIFACT.size)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) is None
    assert (store.stats().evicted, store.stats().write_errors) == (1, 0)


def test_gc_drops_hints_that_lead_nowhere(store: DiskStore) -> None:
    one, other = numbered(1), numbered(2)
    for request, artifact in (("1" * 64, one), ("2" * 64, other)):
        store.publish(artifact)
        store.link(request, artifact.key)
    used(store, one, other)
    assert store.gc(max_bytes=store.stats().bytes // 2) == 1
    assert store.resolve("1" * 64) is None
    assert store.resolve("2" * 64) == other.key
    assert {path.name for path in (store.root / "blobs").rglob("*") if path.is_file()} == {other.digest}
    assert store.gc(max_bytes=0) == 1
    assert store.gc() == 0
    assert store.stats().entries == 0


def test_sweep_takes_what_is_old_and_has_no_writer(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    temporary = store.root / "tmp"
    for name, age in (("old", 100), ("new", 0)):
        (temporary / f"entry-{name}").mkdir()
        (temporary / f"entry-{name}" / "kernel.cubin").write_bytes(b"half")
        (temporary / f"hint-{name}").write_bytes(b"")
        for path in (temporary / f"entry-{name}", temporary / f"hint-{name}"):
            os.utime(path, (time.time() - age, time.time() - age))
    (temporary / "link").symlink_to(entry_of(store))
    os.utime(temporary / "link", (1, 1), follow_symlinks=False)
    assert store.sweep() == 3
    assert {path.name for path in temporary.iterdir()} == {"entry-new", "hint-new"}
    assert store.get(ARTIFACT.key) == ARTIFACT


def test_sweep_takes_the_locks_of_killed_holders_only(store: DiskStore) -> None:
    killed = f"""
import os
from pathlib import Path
from mlaprep.kernels_cache.disk import DiskStore
locks = [DiskStore(Path({str(store.root)!r})).key_lock(digit * 64, 1) for digit in "123"]
assert all(lock.__enter__() for lock in locks)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", killed], check=False)
    locks = store.root / "locks"
    with store.key_lock("4" * 64, 1) as held:
        assert held
        for path in locks.iterdir():
            if not path.name.startswith("3"):
                os.utime(path, (1, 1))
        assert store.sweep() == 2
        assert {path.name[0] for path in locks.iterdir()} == {"3", "4"}
        with store.key_lock("4" * 64, 0) as twice:
            assert not twice
    with store.key_lock("1" * 64, 1) as held:
        assert held
    store.gc()
    assert {path.name[0] for path in locks.iterdir()} == {"3"}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
@pytest.mark.parametrize("name", ["tmp", "blobs", "blobs/*", "links", "links/*", "quarantine", "locks"])
def test_a_helper_folder_that_others_may_write_is_closed_to_them(store: DiskStore, name: str, mode: int) -> None:
    def damage() -> None:
        (entry_of(store) / "kernel.cubin").write_bytes(b"damaged")
        assert store.get(ARTIFACT.key) is None

    store.publish(ARTIFACT)
    damage()
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    with store.key_lock(ARTIFACT.key, 0):
        pass
    (folder,) = store.root.glob(name)
    folder.chmod(mode)

    damage()
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert store.resolve("1" * 64) == ARTIFACT.key
    with store.key_lock(ARTIFACT.key, 0) as held:
        assert held
    assert (store.stats().damaged, store.stats().quarantined, store.stats().write_errors) == (2, 2, 0)
    assert folder.stat().st_mode & 0o1777 == 0o700


def test_a_helper_folder_of_somebody_else_gives_way(store: DiskStore) -> None:
    if os.geteuid() != 0:  # nobody else can make another user's directory
        return
    store.publish(ARTIFACT)
    for name in ("tmp", "blobs"):
        os.chown(store.root / name, 12345, 12345)
    store.publish(numbered(1))
    assert store.get_blob(numbered(1).digest) == numbered(1).cubin
    assert store.stats().write_errors == 0


def test_a_lost_blob_hint_comes_back_with_the_next_hit(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    (hint,) = (store.root / "blobs").glob("*/*")
    for _ in range(3):
        hint.unlink()
        assert store.get_blob(ARTIFACT.digest) is None
        assert store.get(ARTIFACT.key) == ARTIFACT
        assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin


def hints_of(store: DiskStore) -> int:
    return sum(path.is_file() for kind in ("links", "blobs") for path in (store.root / kind).rglob("*"))


def test_evicted_entries_leave_no_hints(tmp_path: Path) -> None:
    size = numbered(0).size + len(numbered(0).manifest.to_json())
    store = DiskStore(tmp_path / "cache", max_bytes=4 * size)
    for number in range(40):
        store.publish(numbered(number))
        store.link(f"{number:064x}", numbered(number).key)
    assert store.stats().entries == 4
    assert hints_of(store) == 8
    kept = numbered(39)
    assert store.delete(kept.key)
    assert hints_of(store) == 6
    assert store.resolve(f"{39:064x}") is None


def test_links_to_what_was_never_kept_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_LINKS_BETWEEN_LOOKS", 16)
    store = DiskStore(tmp_path / "cache", max_bytes=8)
    for number in range(100):
        store.link(f"{number:064x}", numbered(number).key)
    assert hints_of(store) <= 17


def test_the_first_publication_of_a_process_sweeps(store: DiskStore) -> None:
    leftover = store.root / "tmp" / "entry-old"
    leftover.mkdir(parents=True, mode=0o700)
    (store.root / "tmp").chmod(0o700)
    os.utime(leftover, (1, 1))
    store.publish(ARTIFACT)
    assert not leftover.exists()


def test_a_cache_that_can_only_be_read_still_serves(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(ARTIFACT)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "rename", "unlink", "utime", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    assert store.get(ARTIFACT.key) == ARTIFACT
    store.publish(numbered(1))
    store.link("1" * 64, ARTIFACT.key)
    assert not store.delete(ARTIFACT.key)
    assert store.gc(max_bytes=0) == 0
    (entry_of(store) / "kernel.cu").write_text("damaged")
    assert store.get(ARTIFACT.key) is None
    stats = store.stats()
    assert (stats.damaged, stats.quarantined) == (1, 0)
    assert stats.write_errors == 4


def test_a_hit_takes_less_than_a_millisecond(tmp_path: Path, compile_raw: Callable[[str], bytes]) -> None:
    store = DiskStore(tmp_path / "cache")
    artifacts = [
        make_artifact(f"// {number}\n" + "// a line of a source as long as a real one\n" * 200, arch=arch)
        for number in range(8)
        for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
    ]
    for artifact in artifacts:
        store.publish(artifact)
    times = []
    for artifact in artifacts * 5:
        started = time.perf_counter()
        assert store.get(artifact.key) is not None
        times.append(time.perf_counter() - started)
    assert statistics.median(times) < 1e-3
