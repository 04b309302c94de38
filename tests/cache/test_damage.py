"""Damage of any kind is a miss: counted, set aside, and healed by the next publication."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cache.samples import make_artifact, numbered, synthetic_cubin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.disk import DiskStore

ARTIFACT = make_artifact()
OTHER = make_artifact("// another kernel\n")
FILES = ("kernel.cubin", "manifest.json", "kernel.cu")


def entry_of(store: DiskStore, key: str = ARTIFACT.key, arch: str = "sm_90a") -> Path:
    return store.root / arch / key[:2] / key


def truncate(length: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path, length(path.stat().st_size))

    return damage


def flip(position: Callable[[int], int], bit: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position(len(data))] ^= 1 << bit
        path.write_bytes(data)

    return damage


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def to_link_to_the_same_bytes(path: Path) -> None:
    path.rename(path.with_name("original"))
    path.symlink_to("original")


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_sparse_giant(path: Path) -> None:
    os.truncate(path, 2**40)


def swap_with_other(path: Path) -> None:
    shutil.copyfile(path.parents[3] / "sm_90a" / OTHER.key[:2] / OTHER.key / path.name, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": truncate(lambda size: 0),
    "one byte": truncate(lambda size: 1),
    "half": truncate(lambda size: size // 2),
    "one byte short": truncate(lambda size: size - 1),
    "first bit": flip(lambda size: 0, 0),
    "middle bit": flip(lambda size: size // 2, 3),
    "last bit": flip(lambda size: size - 1, 0),
    "one byte more": append,
    "another entry's": swap_with_other,
    "directory": to_directory,
    "dangling link": to_dangling_link,
    "link": to_link_to_the_same_bytes,
    "fifo": to_fifo,
    "giant": to_sparse_giant,
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_B031_every_damage_to_every_file(store: DiskStore, name: str, damage: str) -> None:
    store.publish(ARTIFACT)
    store.publish(OTHER)
    DAMAGES[damage](entry_of(store) / name)

    assert store.get(ARTIFACT.key) is None
    assert store.get(ARTIFACT.key) is None
    stats = store.stats()
    assert (stats.damaged, stats.quarantined, stats.misses, stats.hits) == (1, 1, 2, 0)
    assert len(list((store.root / "quarantine").iterdir())) == 1
    assert store.get_blob(ARTIFACT.digest) is None
    assert store.get(OTHER.key) == OTHER

    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert store.stats().damaged == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_B031_publishing_over_damage_heals_it(store: DiskStore, name: str, damage: str) -> None:
    store.publish(ARTIFACT)
    store.publish(OTHER)
    DAMAGES[damage](entry_of(store) / name)
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    stats = store.stats()
    assert (stats.damaged, stats.quarantined, stats.write_errors, stats.differing) == (1, 1, 0, 0)


@pytest.mark.parametrize("damage", DAMAGES)
def test_B031_the_record_of_last_use_is_no_content(store: DiskStore, damage: str) -> None:
    if damage == "another entry's":
        store.publish(OTHER)
    store.publish(ARTIFACT)
    last_use = entry_of(store) / "last_use"
    if "bit" in damage or "byte short" in damage:
        last_use.write_bytes(b"??")
    DAMAGES[damage](last_use)
    assert DiskStore(store.root).get(ARTIFACT.key) == ARTIFACT
    assert store.stats().entries >= 1
    store.gc(max_bytes=0)
    assert store.stats().entries == 0


def replace_tree(path: Path, by: str, outside: Path) -> None:
    path.rename(outside / "moved")
    if by == "link":
        path.symlink_to(outside / "moved")
    elif by == "dangling link":
        path.symlink_to("nowhere")
    elif by == "file":
        path.write_bytes(b"")
    elif by == "empty directory":
        path.mkdir(mode=0o700)
    elif by == "directory of others":
        (outside / "moved").rename(path)
        path.chmod(0o777)


@pytest.mark.parametrize("by", ["link", "dangling link", "file", "empty directory", "directory of others"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_B054_nothing_is_followed_out_of_the_root(store: DiskStore, tmp_path: Path, level: int, by: str) -> None:
    store.publish(ARTIFACT)
    place = store.root.joinpath(*entry_of(store).relative_to(store.root).parts[:level])
    replace_tree(place, by, tmp_path)
    outside = sorted(tmp_path.glob("moved/**/*"))

    assert store.get(ARTIFACT.key) is None
    assert store.get_blob(ARTIFACT.digest) is None
    assert list(store.list()) == []
    store.publish(ARTIFACT)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert not place.is_symlink()
    assert store.stats().damaged == (0 if by == "empty directory" and level < 3 else 1)
    assert store.stats().write_errors == 0
    store.delete(ARTIFACT.key)
    store.gc(max_bytes=0)
    assert sorted(tmp_path.glob("moved/**/*")) == outside


@pytest.mark.parametrize("name", ["tmp", "blobs", "links", "quarantine", "locks"])
@pytest.mark.parametrize("by", ["link", "dangling link", "file"])
def test_B054_the_folders_of_the_store_are_not_followed_either(
    store: DiskStore, tmp_path: Path, name: str, by: str
) -> None:
    for folder in ("tmp", "blobs", "links", "quarantine", "locks"):
        (store.root / folder).mkdir(mode=0o700, exist_ok=True)
    replace_tree(store.root / name, by, tmp_path)
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert store.resolve("1" * 64) == ARTIFACT.key
    with store.key_lock(ARTIFACT.key, 1) as held:
        assert held
    (entry_of(store) / "kernel.cubin").unlink()
    assert store.get(ARTIFACT.key) is None
    assert store.stats().quarantined == 1
    assert list((tmp_path / "moved").iterdir()) == []


def test_B031_swapped_cubins(store: DiskStore) -> None:
    for artifact in (ARTIFACT, OTHER):
        store.publish(artifact)
    one, other = (entry_of(store, artifact.key) / "kernel.cubin" for artifact in (ARTIFACT, OTHER))
    cubins = one.read_bytes(), other.read_bytes()
    one.write_bytes(cubins[1])
    other.write_bytes(cubins[0])
    assert store.get(ARTIFACT.key) is None
    assert store.get(OTHER.key) is None
    assert store.stats().quarantined == 2


def test_B031_swapped_entries(store: DiskStore) -> None:
    for artifact in (ARTIFACT, OTHER):
        store.publish(artifact)
    one, other = (entry_of(store, artifact.key) for artifact in (ARTIFACT, OTHER))
    one.rename(store.root / "aside")
    other.rename(one)
    (store.root / "aside").rename(other)
    assert store.get(ARTIFACT.key) is None
    assert store.get_blob(OTHER.digest) is None
    assert store.stats().damaged == 2


def forge(store: DiskStore, cubin: bytes, arch: str = "sm_90a") -> str:
    """An entry whose manifest was made anew for another cubin, every digest in it right."""
    forged = make_artifact(arch=arch, cubin=cubin)
    entry = store.root / arch / forged.key[:2] / forged.key
    entry.mkdir(parents=True, mode=0o700)
    (entry / "kernel.cubin").write_bytes(cubin)
    (entry / "kernel.cu").write_text(forged.source)
    (entry / "manifest.json").write_text(forged.manifest.to_json())
    return forged.key


def test_B046_another_architecture_under_the_key(store: DiskStore) -> None:
    key = forge(store, synthetic_cubin("sm_100a"))
    assert store.get(key) is None
    assert store.stats().quarantined == 1


def test_B046_an_elf_file_that_is_not_cuda(store: DiskStore) -> None:
    key = forge(store, synthetic_cubin(machine=62))
    assert store.get(key) is None
    assert store.stats().quarantined == 1


def test_B046_an_entry_moved_to_another_architecture(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    (store.root / "sm_90a").rename(store.root / "sm_90")
    assert store.get(ARTIFACT.key) is None
    assert list(store.list()) == []
    assert store.stats().quarantined == 1


def test_a_good_entry_is_found_behind_a_damaged_one(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    shutil.copytree(entry_of(store), entry_of(store, arch="sm_100a"))
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert store.stats().damaged == 1


HOSTILE = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 10_000,
    b'{"registers": NaN}',
    b"\xff" * 100,
    json.dumps(ARTIFACT.manifest.to_dict()).encode(),
    json.dumps(ARTIFACT.manifest.to_dict() | {"entry": "../../../etc/passwd"}).encode(),
    b" " * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_B031_hostile_manifests(store: DiskStore, text: bytes) -> None:
    store.publish(ARTIFACT)
    (entry_of(store) / "manifest.json").write_bytes(text)
    assert list(store.list()) == []
    assert store.get(ARTIFACT.key) is None
    assert store.stats().quarantined == 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_B031_no_flipped_bit_goes_unnoticed(store: DiskStore, data: st.DataObject) -> None:
    store.publish(ARTIFACT)
    path = entry_of(store) / data.draw(st.sampled_from(FILES))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(lambda _: position, data.draw(st.integers(0, 7)))(path)
    assert store.get(ARTIFACT.key) is None


def test_quarantine_keeps_the_last_few(store: DiskStore) -> None:
    for number in range(20):
        artifact = numbered(number)
        store.publish(artifact)
        (entry_of(store, artifact.key) / "kernel.cu").unlink()
        assert store.get(artifact.key) is None
    kept = sorted(path.name for path in (store.root / "quarantine").iterdir())
    assert len(kept) == 16
    assert numbered(19).key in kept[-1]
    assert store.stats().quarantined == 20


@pytest.mark.parametrize("text", [b"", b"\n", b"x", b"../../etc", b"\xff", b"0" * 64 + b"0", b"A" * 64, b"0" * 5000])
def test_damaged_links_are_no_links(store: DiskStore, text: bytes) -> None:
    store.link("1" * 64, ARTIFACT.key)
    link = store.root / "links" / "11" / ("1" * 64)
    link.write_bytes(text)
    assert store.resolve("1" * 64) is None
    store.link("1" * 64, ARTIFACT.key)
    assert store.resolve("1" * 64) == ARTIFACT.key


@pytest.mark.parametrize("kind", ["links", "blobs"])
@pytest.mark.parametrize("damage", ["directory", "dangling link", "fifo", "missing"])
def test_a_hint_replaced_by_something_else(store: DiskStore, kind: str, damage: str) -> None:
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    digest = "1" * 64 if kind == "links" else ARTIFACT.digest
    DAMAGES[damage](store.root / kind / digest[:2] / digest)
    assert (store.resolve(digest) if kind == "links" else store.get_blob(digest)) is None
    assert store.get(ARTIFACT.key) == ARTIFACT
    store.publish(ARTIFACT)
    store.link("1" * 64, ARTIFACT.key)
    assert store.resolve("1" * 64) == ARTIFACT.key
    assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert store.stats().write_errors == 0


@pytest.mark.parametrize("text", ["sm_90a/" + "0" * 64, "../../../etc/passwd", f"sm_90a/{OTHER.key}", "sm_90a", "/"])
def test_a_blob_hint_that_leads_elsewhere(store: DiskStore, text: str) -> None:
    store.publish(ARTIFACT)
    store.publish(OTHER)
    hint = store.root / "blobs" / ARTIFACT.digest[:2] / ARTIFACT.digest
    hint.write_text(text)
    assert store.get_blob(ARTIFACT.digest) == ARTIFACT.cubin
    assert hint.read_text().strip() == f"sm_90a/{ARTIFACT.key}"


def test_files_that_do_not_belong_there_are_left_alone(store: DiskStore) -> None:
    store.publish(ARTIFACT)
    for place in (store.root, store.root / "sm_90a", entry_of(store).parent, entry_of(store)):
        (place / "README").write_text("mine")
        (place / ("f" * 64)).symlink_to("nowhere")
    assert store.get(ARTIFACT.key) == ARTIFACT
    assert [manifest.key for manifest in store.list()] == [ARTIFACT.key]
    assert store.stats().entries == 1
    assert store.find(ARTIFACT.key[:6]) == ARTIFACT.key
    assert isinstance(next(store.list()), Manifest)
    assert (store.root / "README").read_text() == "mine"
