"""Audit: every entry and what is wrong with it, without a change to what is there."""

from pathlib import Path

from cache.samples import make_artifact, numbered

from mlaprep.kernels_cache.audit import audit
from mlaprep.kernels_cache.disk import DiskStore


def state(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory with its inode and times."""
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_it_tells_the_damaged_from_the_whole_and_touches_neither(store: DiskStore) -> None:
    whole, cubin, manifest = make_artifact(), numbered(1), numbered(2)
    for artifact in (whole, cubin, manifest):
        store.publish(artifact)
    place = store.root / "sm_90a"
    path = place / cubin.key[:2] / cubin.key / "kernel.cubin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (place / manifest.key[:2] / manifest.key / "manifest.json").write_text("{}")
    before = state(store.root)
    found = {finding.key: finding for finding in audit(store.root)}
    assert (found[whole.key].manifest, found[whole.key].damage) == (whole.manifest, "")
    assert found[cubin.key].manifest == cubin.manifest
    assert "cubin" in found[cubin.key].damage
    assert found[manifest.key].manifest is None
    assert found[manifest.key].damage
    quick = {finding.key: finding.damage for finding in audit(store.root, whole=False)}
    assert (quick[cubin.key], bool(quick[manifest.key])) == ("", True)
    assert state(store.root) == before


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    assert list(audit(tmp_path / "cache")) == []
    assert not (tmp_path / "cache").exists()


def test_gc_empties_the_quarantine(store: DiskStore) -> None:
    artifact = make_artifact()
    store.publish(artifact)
    (store.root / "sm_90a" / artifact.key[:2] / artifact.key / "kernel.cubin").write_bytes(b"")
    assert store.get(artifact.key) is None
    assert list((store.root / "quarantine").iterdir())
    assert store.gc() == 0
    assert not list((store.root / "quarantine").iterdir())
