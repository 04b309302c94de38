"""Revocations: kept in names, honoured by every process of a directory, and never lost to damage."""

import dataclasses
import os
from pathlib import Path

import pytest
from cache.samples import numbered

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.revocation import FOLDER, Revocation, Revocations, revocations_digest

ONE, TWO = (Revocation.of(numbered(number).manifest, f"reason {number}") for number in (1, 2))


@pytest.fixture
def root(store: DiskStore) -> Path:
    return store.root


def test_found_by_key_and_by_digest(root: Path) -> None:
    known = Revocations(root)
    assert known.find(key=ONE.key) is None
    known.add(ONE)
    assert known.find(key=ONE.key) == known.find(digest=ONE.digest) == known.of(numbered(1).manifest) == ONE
    assert known.find(key=TWO.key, digest=TWO.digest) is None


def test_the_first_reason_stays(root: Path) -> None:
    known = Revocations(root)
    known.add(ONE)
    assert known.add(dataclasses.replace(ONE, reason="another")) == ONE
    assert known.list() == (ONE,)


def test_another_process_sees_it_at_once_and_after_a_restart(root: Path) -> None:
    first, second = Revocations(root), Revocations(root)
    assert second.list() == ()
    for revocation in (ONE, TWO):
        first.add(revocation)
        assert second.find(key=revocation.key) == revocation
    first.lift(ONE.key)
    assert second.list() == (TWO,) == Revocations(root).list()


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[1]", b'{"key": 1}', b"\xff" * 5000])
def test_a_damaged_file_still_revokes(root: Path, damage: bytes) -> None:
    Revocations(root).add(ONE)
    (file,) = (root / FOLDER).iterdir()
    file.write_bytes(damage)
    found = Revocations(root).find(digest=ONE.digest)
    assert found is not None
    assert (found.key, found.digest, found.variant_id) == (ONE.key, ONE.digest, "")
    assert "damaged" in found.reason


def test_a_directory_or_a_link_in_place_of_the_file_still_revokes(root: Path) -> None:
    Revocations(root).add(ONE)
    (file,) = (root / FOLDER).iterdir()
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert Revocations(root).find(key=ONE.key) is not None
    file.unlink()
    file.mkdir()
    known = Revocations(root)
    assert known.find(key=ONE.key) is not None
    known.lift(ONE.key)
    assert known.list() == ()


def test_strange_names_are_passed_over(root: Path) -> None:
    Revocations(root).add(ONE)
    for name in ("x", ONE.key, f"{ONE.key}-{'g' * 64}", f"{ONE.key}-{ONE.digest}.tmp"):
        (root / FOLDER / name).write_text("{}")
    assert Revocations(root).list() == (ONE,)


def test_housekeeping_leaves_it(store: DiskStore) -> None:
    Revocations(store.root).add(ONE)
    store.gc(0)
    store.sweep(0)
    assert Revocations(store.root).list() == (ONE,)


def test_what_cannot_be_written_holds_for_the_process(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    known = Revocations(place)
    with pytest.raises(StoreError, match="this process only"):
        known.add(ONE)
    assert known.find(key=ONE.key) == ONE


def test_in_memory() -> None:
    known = Revocations()
    known.add(ONE)
    assert known.list() == (ONE,)
    assert known.lift(ONE.key) == ONE
    assert known.lift(ONE.key) is None


def test_a_services_list_is_taken_over_and_ours_stays(root: Path) -> None:
    known = Revocations(root)
    known.add(ONE)
    three = Revocation.of(numbered(3).manifest, "reason 3")
    assert known.adopt("http://a", [ONE, TWO]) == (dataclasses.replace(TWO, origin="http://a"),)
    known.adopt("http://b", [three])
    assert known.adopt("http://a", []) == ()
    assert {each.key: each.origin for each in Revocations(root).list()} == {ONE.key: "", three.key: "http://b"}


def test_digest_of_a_list() -> None:
    assert revocations_digest([ONE, TWO]) == revocations_digest([TWO, dataclasses.replace(ONE, origin="http://a")])
    assert revocations_digest([ONE]) != revocations_digest([ONE, TWO]) != revocations_digest([])


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../../etc/passwd"},
        {"digest": "A" * 64},
        {"variant_id": "a/b"},
        {"arch": ".."},
        {"reason": ""},
        {"reason": "a\nb"},
        {"reason": "x" * 201},
        {"revoked_at": "now"},
        {"reason": None},
    ],
)
def test_B054_no_strange_value_makes_a_revocation(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        dataclasses.replace(ONE, **change)
    with pytest.raises(ValueError, match="not allowed"):
        Revocation.from_dict(ONE.to_dict() | change)


def test_a_look_costs_one_stat(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Revocations(root)
    known.add(ONE)
    os.utime(root / FOLDER, (0, 0))
    known.list()
    monkeypatch.setattr("mlaprep.kernels_cache.revocation.Folder", None)
    assert known.find(key=ONE.key) == ONE
