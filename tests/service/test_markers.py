"""Markers: a repeated warm-up is instant, and never says that something is there which is not."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, redis_server
from service_kit import wait_for

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.kernels_cache.revocation import Revocation
from mlaprep.kernels_cache.store import TieredStore
from mlaprep.service import markers as markers_module
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.service.job_store import JobStore, WarmupJob
from mlaprep.service.jobs import Jobs
from mlaprep.service.markers import MAX_MARKERS, Markers
from mlaprep.templates.plans import parse_plan

__all__ = ["redis_server"]

PLAN = parse_plan({"arch": "sm_100a", "kernels": [{"preset": "kimi-k3", "tp": [8, 16]}]})


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "cache")


@pytest.fixture
def builder(store: DiskStore, compiler: Compiler) -> Iterator[Builder]:
    with Builder(store, compiler) as builder:
        compiler.version()
        yield builder


@pytest.fixture
def warm(builder: Builder, store: DiskStore) -> Iterator[Callable[[], WarmupJob]]:
    """Runs the plan to its end, each time as another process would."""
    made: list[Jobs] = []

    def run() -> WarmupJob:
        made.append(jobs := Jobs(builder, JobStore(store.root)))
        job, _ = jobs.submit(PLAN)
        return wait_for(lambda: found if (found := jobs.store.get(job.id)) and found.finished else None, 60)

    yield run
    for jobs in made:
        jobs.close()


def entries(store: DiskStore) -> list[Path]:
    return sorted(file.parent for file in store.root.glob("sm_100a/*/*/kernel.cubin"))


def test_a_repeated_warm_up_asks_the_store_for_no_kernel(
    warm: Callable[[], WarmupJob], builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm().built == 2
    looked = builder.stats()
    began = time.monotonic()
    again = warm()
    assert time.monotonic() - began < 0.5
    assert (again.state, again.cached, again.built, again.done) == ("done", 2, 0, 2)
    assert builder.stats() == looked
    for name, value in (("_release", lambda: "another"),):
        monkeypatch.setattr(markers_module, name, value)
        assert warm().cached == 2
        assert builder.stats().hits == looked.hits + 2


@pytest.mark.parametrize("kind", ["evicted", "deleted", "removed", "damaged", "file"])
def test_what_is_gone_is_built_again(
    warm: Callable[[], WarmupJob], builder: Builder, store: DiskStore, kind: str
) -> None:
    assert warm().built == 2
    entry = entries(store)[0]
    if kind == "evicted":
        assert store.gc(max_bytes=1) == 2
    elif kind == "deleted":
        assert store.delete(entry.name)
    elif kind == "removed":
        shutil.rmtree(entry)
    elif kind == "file":
        (entry / "kernel.cu").unlink()
    else:
        cubin = entry / "kernel.cubin"
        cubin.write_bytes(cubin.read_bytes()[:-1] + b"\1")
        assert store.get(entry.name) is None  # set aside
    again = warm()
    assert (again.state, again.built) == ("done", 2 if kind == "evicted" else 1)
    assert Markers(builder).holds(PLAN)


def test_what_is_revoked_is_told_and_what_is_lifted_is_built(
    warm: Callable[[], WarmupJob], builder: Builder, store: DiskStore
) -> None:
    warm()
    manifest: Manifest = next(iter(store.list()))
    builder.revocations.add(Revocation.of(manifest, "wrong rows"))
    again = warm()
    assert (again.state, again.failed, again.cached) == ("failed", 1, 1)
    assert "wrong rows" in again.failures[0].detail
    builder.revocations.lift(manifest.key)
    assert warm().state == "done"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"kernels":[1],"stamp":""}', b'{"kernels":[["..","","",""]]}'])
def test_a_damaged_marker_is_none(
    warm: Callable[[], WarmupJob], builder: Builder, store: DiskStore, damage: bytes
) -> None:
    warm()
    (marker,) = (store.root / "warmed").iterdir()
    marker.write_bytes(damage)
    assert not Markers(builder).holds(PLAN)
    assert warm().cached == 2
    assert Markers(builder).holds(PLAN)


def test_markers_are_bounded(warm: Callable[[], WarmupJob], builder: Builder, store: DiskStore) -> None:
    warm()
    folder = store.root / "warmed"
    for number in range(MAX_MARKERS + 5):
        (folder / f"{number:064x}").write_bytes(b"")
    Markers(builder).note(PLAN, list(store.list()))
    assert len(list(folder.iterdir())) == MAX_MARKERS


@pytest.mark.parametrize("kind", ["record", "blob", "flush", "down"])
def test_in_redis_every_record_and_blob_must_be_there(
    store: DiskStore, compiler: Compiler, redis_server: RedisServer, kind: str
) -> None:
    link = RedisLink(RedisUrl(redis_server.url), 5.0)
    shared = RedisStore(link)
    with Builder(TieredStore([store, shared]), compiler) as builder:
        manifests = [builder.get_or_compile(*target).artifact.manifest for target in PLAN.targets]
        markers = Markers(builder, shared)
        markers.note(PLAN, manifests)
        assert markers.holds(PLAN)
        with redis_server.client() as client:
            if kind == "flush":
                client.flushall()
            elif kind == "down":
                redis_server.kill()
            else:
                client.delete(next(iter(client.scan_iter(f"mlaprep:1:{kind}:*"))))
        assert not markers.holds(PLAN)
    link.close()


def test_a_plan_of_nothing_and_one_half_there_leave_none(builder: Builder, warm: Any, store: DiskStore) -> None:
    warm()
    markers = Markers(builder)
    other = dataclasses.replace(
        PLAN, targets=(*PLAN.targets, *parse_plan({"kernels": [{"spec": {"num_heads": 7}}]}).targets)
    )
    markers.note(other, list(store.list()))
    assert not markers.holds(other)
    assert not markers.holds(dataclasses.replace(PLAN, targets=()))
