"""What every store promises, whatever it keeps artifacts in."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache.samples import make_artifact, numbered, synthetic_cubin
from redis_server import RedisServer, running_redis

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import AmbiguousKeyError, ArtifactError, StoreError
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, StoreStats, TieredStore

SIZE = numbered(0).size
STRANGE_NAMES = ["", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n",
                 "x" * 5000, "\u0660" * 64, "\ud800"]  # fmt: skip


def memory(path: Path) -> KernelStore:
    return MemoryStore()


def disk(path: Path) -> KernelStore:
    return DiskStore(path / "cache")


def tiers(path: Path) -> KernelStore:
    return TieredStore([MemoryStore(), DiskStore(path / "cache")])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=[memory, disk, tiers, "redis"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KernelStore]:
    if request.param != "redis":
        make: Callable[[Path], KernelStore] = request.param
        yield make(tmp_path)
        return
    server: RedisServer = request.getfixturevalue("server")
    server.client().flushall()
    store = RedisStore(RedisLink(RedisUrl(server.url), budget_s=5.0))
    yield store
    store.redis.close()


def test_what_is_published_is_found(any_store: KernelStore) -> None:
    artifact = make_artifact()
    assert any_store.get(artifact.key) is None
    assert any_store.get_blob(artifact.digest) is None
    any_store.publish(artifact)
    any_store.publish(artifact)
    assert any_store.get(artifact.key) == artifact
    assert any_store.get_blob(artifact.digest) == artifact.cubin
    stats = any_store.stats()
    assert (stats.hits, stats.misses, stats.entries) == (1, 1, 1)
    assert (stats.damaged, stats.write_errors, stats.differing, stats.evicted) == (0, 0, 0, 0)
    assert stats.bytes >= artifact.size


def test_non_ascii_source_and_large_cubin(any_store: KernelStore) -> None:
    artifact = make_artifact("// H × W\n" * 50_000, cubin=synthetic_cubin(text=os.urandom(300_000)))
    any_store.publish(artifact)
    assert any_store.get(artifact.key) == artifact


def test_B024_publishing_an_artifact_that_does_not_verify_is_refused(any_store: KernelStore) -> None:
    good = make_artifact()
    bad = dataclasses.replace(good, cubin=good.cubin[:-1])
    with pytest.raises(ArtifactError, match="bytes of cubin"):
        any_store.publish(bad)
    assert any_store.get(good.key) is None
    assert any_store.stats().entries == 0


def test_B046_a_cubin_for_another_architecture_is_not_taken(any_store: KernelStore) -> None:
    wrong = make_artifact(arch="sm_90a", cubin=synthetic_cubin("sm_100a"))
    with pytest.raises(ArtifactError) as caught:
        any_store.publish(wrong)
    assert caught.value.reason == "wrong-arch"
    assert any_store.get(wrong.key) is None


def test_B029_the_first_good_cubin_wins(any_store: KernelStore) -> None:
    first = make_artifact(cubin=synthetic_cubin(text=b"first"))
    second = make_artifact(cubin=synthetic_cubin(text=b"other"))
    assert first.key == second.key
    any_store.publish(first)
    any_store.publish(second)
    assert any_store.get(first.key) == first
    assert any_store.get_blob(second.digest) is None
    assert any_store.stats().differing >= 1
    assert any_store.stats().damaged == 0


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_B054_strange_names_are_misses(any_store: KernelStore, name: str, tmp_path: Path) -> None:
    any_store.publish(make_artifact())
    before = sorted(tmp_path.rglob("*"))
    assert any_store.get(name) is None
    assert any_store.get_blob(name) is None
    assert any_store.resolve(name) is None
    assert any_store.find(name) is None
    assert not any_store.delete(name)
    assert list(any_store.list(name)) == []
    for request, key in ((name, "0" * 64), ("0" * 64, name)):
        with pytest.raises(StoreError):
            any_store.link(request, key)
    assert sorted(tmp_path.rglob("*")) == before
    assert any_store.stats().damaged == 0


def test_links_are_hints(any_store: KernelStore) -> None:
    assert any_store.resolve("1" * 64) is None
    any_store.link("1" * 64, "2" * 64)
    any_store.link("1" * 64, "2" * 64)
    assert any_store.resolve("1" * 64) == "2" * 64
    any_store.link("1" * 64, "3" * 64)
    assert any_store.resolve("1" * 64) == "3" * 64
    assert any_store.get("3" * 64) is None


def test_list_and_delete(any_store: KernelStore) -> None:
    artifacts = [numbered(number, arch=arch) for number, arch in enumerate(["sm_90a", "sm_100a", "sm_90a"])]
    for artifact in artifacts:
        any_store.publish(artifact)
    assert {manifest.key for manifest in any_store.list()} == {artifact.key for artifact in artifacts}
    assert {manifest.key for manifest in any_store.list("sm_90a")} == {artifacts[0].key, artifacts[2].key}
    assert list(any_store.list("sm_120a")) == []
    assert any_store.delete(artifacts[0].key)
    assert not any_store.delete(artifacts[0].key)
    assert any_store.get(artifacts[0].key) is None
    assert any_store.get_blob(artifacts[0].digest) is None
    assert any_store.get(artifacts[2].key) == artifacts[2]
    assert any_store.stats().entries == 2


def test_two_keys_with_one_cubin(any_store: KernelStore) -> None:
    cubin = synthetic_cubin(text=b"the same code")
    one, other = (make_artifact(source, cubin=cubin) for source in ("// one\n", "// two\n"))
    for artifact in (one, other):
        any_store.publish(artifact)
    for artifact in (one, other):
        assert any_store.get_blob(one.digest) == cubin
        assert any_store.delete(artifact.key)
    assert any_store.get_blob(one.digest) is None


def test_B038_a_prefix_must_fit_one_key(any_store: KernelStore) -> None:
    artifacts = [numbered(number, arch="sm_90a" if number % 2 else "sm_100a") for number in range(20)]
    for artifact in artifacts:
        any_store.publish(artifact)
    for artifact in artifacts:
        assert any_store.find(artifact.key) == artifact.key
        fitting = [other.key for other in artifacts if other.key[0] == artifact.key[0]]
        if len(fitting) == 1:
            assert any_store.find(artifact.key[0]) == artifact.key
        else:
            with pytest.raises(AmbiguousKeyError) as caught:
                any_store.find(artifact.key[0])
            assert caught.value.prefix == artifact.key[0]
    assert len({artifact.key[0] for artifact in artifacts}) < 20
    assert any_store.find("0" * 64) is None


def test_a_prefix_of_a_digest_must_fit_one_cubin(any_store: KernelStore) -> None:
    artifacts = [numbered(number) for number in range(40)]
    for artifact in artifacts:
        any_store.publish(artifact)
    digests = [artifact.digest for artifact in artifacts]
    for prefix in {digest[:length] for digest in digests for length in (1, 2, 4, 8, 64)}:
        fitting = [digest for digest in digests if digest.startswith(prefix)]
        if len(fitting) > 1:
            with pytest.raises(AmbiguousKeyError):
                any_store.find_blob(prefix)
        else:
            assert any_store.find_blob(prefix) == fitting[0]
    any_store.delete(artifacts[0].key)
    for prefix in (digests[0], digests[0][:8], "", "../", "g", "0" * 65):
        assert any_store.find_blob(prefix) is None


def test_key_lock_keeps_others_out_until_the_deadline(any_store: KernelStore) -> None:
    with any_store.key_lock("0" * 64, 1) as held:
        assert held
        with any_store.key_lock("0" * 64, 0.05) as again:
            assert not again
        with any_store.key_lock("1" * 64, 0.05) as another:
            assert another
    with any_store.key_lock("0" * 64, 0) as held:
        assert held


def test_a_wait_for_a_key_ends_once_there_is_nothing_left_to_do(any_store: KernelStore) -> None:
    asked: list[bool] = []

    def third_time() -> bool:
        asked.append(True)
        return len(asked) >= 3

    with any_store.key_lock("0" * 64, 1):
        began = time.monotonic()
        with any_store.key_lock("0" * 64, 30, unless=third_time) as again:
            assert not again
        assert time.monotonic() - began < 5
        assert len(asked) >= 3
    with any_store.key_lock("0" * 64, 1, unless=lambda: True) as held:  # a free key is had without a question
        assert held


def test_key_lock_is_released_by_an_exception(any_store: KernelStore) -> None:
    with pytest.raises(ZeroDivisionError), any_store.key_lock("0" * 64, 1):
        raise ZeroDivisionError
    with any_store.key_lock("0" * 64, 0) as held:
        assert held


def test_B034_seven_architectures_side_by_side(any_store: KernelStore) -> None:
    archs = ["sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_121a"]
    artifacts = [make_artifact(arch=arch) for arch in archs]
    for artifact in artifacts:
        any_store.publish(artifact)
    assert len({artifact.key for artifact in artifacts}) == 7
    for arch, artifact in zip(archs, artifacts, strict=True):
        found = any_store.get(artifact.key)
        assert found is not None
        found.verify(arch=arch)
    assert any_store.stats().entries == 7


def test_memory_drops_the_least_recently_used() -> None:
    store = MemoryStore(max_bytes=3 * SIZE)
    artifacts = [numbered(number) for number in range(5)]
    for artifact in artifacts[:3]:
        store.publish(artifact)
    assert store.get(artifacts[0].key) is not None
    store.publish(artifacts[3])
    store.publish(artifacts[4])
    assert [store.get(artifact.key) is not None for artifact in artifacts] == [True, False, False, True, True]
    assert store.get_blob(artifacts[1].digest) is None
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.evicted) == (3, 3 * SIZE, 2)


def test_memory_never_keeps_what_is_larger_than_all_of_it() -> None:
    store = MemoryStore(max_bytes=SIZE - 1)
    store.publish(numbered(0))
    assert store.stats() == StoreStats(evicted=1)


@pytest.mark.parametrize("limit", [-1, True, 1.5, "1"])
def test_a_limit_is_a_number_of_bytes(limit: int, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        MemoryStore(max_bytes=limit)
    with pytest.raises(StoreError):
        DiskStore(tmp_path, max_bytes=limit)


def test_a_hit_further_down_is_copied_upwards() -> None:
    fast, middle, slow = MemoryStore(), MemoryStore(), MemoryStore()
    store = TieredStore([fast, middle, slow])
    artifact = make_artifact()
    slow.publish(artifact)
    slow.link("1" * 64, artifact.key)
    assert store.resolve("1" * 64) == artifact.key
    assert store.get(artifact.key) == artifact
    for tier in (fast, middle):
        assert tier.get(artifact.key) == artifact
        assert tier.resolve("1" * 64) == artifact.key
    assert store.get(artifact.key) == artifact
    assert slow.stats().hits == 1
    assert (store.stats().hits, store.stats().misses, store.stats().entries) == (2, 0, 1)


def test_B031_a_damaged_tier_is_mended_from_the_next(tmp_path: Path) -> None:
    disk, shared = DiskStore(tmp_path / "cache"), MemoryStore()
    store = TieredStore([disk, shared])
    artifact = make_artifact()
    store.publish(artifact)
    cubin = next(tmp_path.rglob("kernel.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    assert store.get(artifact.key) == artifact
    assert disk.get(artifact.key) == artifact
    assert store.stats().damaged == store.stats().quarantined == 1


def test_tiers_report_a_key_that_differs_between_them_as_ambiguous_only_by_prefix() -> None:
    one, other = MemoryStore(), MemoryStore()
    artifacts = [numbered(number) for number in range(17)]
    by_digit: dict[str, str] = {}
    pair = next(
        (by_digit[artifact.key[0]], artifact.key)
        for artifact in artifacts
        if by_digit.setdefault(artifact.key[0], artifact.key) != artifact.key
    )
    for tier, key in ((one, pair[0]), (other, pair[1])):
        tier.publish(next(artifact for artifact in artifacts if artifact.key == key))
    store = TieredStore([one, other])
    with pytest.raises(AmbiguousKeyError):
        store.find(pair[0][0])
    assert store.find(pair[1]) == pair[1]


def test_tiers_need_a_store() -> None:
    with pytest.raises(StoreError):
        TieredStore([])


def test_stores_are_kernel_stores(tmp_path: Path) -> None:
    stores: list[KernelStore] = [memory(tmp_path), disk(tmp_path), tiers(tmp_path)]
    assert all(is_digest(make_artifact().key) and store.stats().entries == 0 for store in stores)
