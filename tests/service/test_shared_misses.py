"""Misses over replicas: each shows the sum, and none is lost or counted twice while Redis is away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, redis_server
from service_kit import wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.service import shared_misses as module
from mlaprep.service.misses import Miss, Misses, MissReason, MissReport
from mlaprep.service.shared_misses import COUNTS, FIRST, LAST, SharedMisses
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

__all__ = ["redis_server"]

SPEC, ARCH = KernelSpec(num_heads=12), Arch("sm_90a")
MEMBER = f"{ARCH} {SPEC.variant_id}"


@pytest.fixture
def link(redis_server: RedisServer) -> Iterator[RedisLink]:
    link = RedisLink(RedisUrl(redis_server.url), 5.0)
    yield link
    link.close()


def replica(folder: Path, link: RedisLink, now: float = 1000.0) -> Misses:
    return Misses(DiskStore(folder).root, shared=SharedMisses(link), clock=lambda: now)


def report(count: int = 1, reason: MissReason = "built", heads: int = 12) -> list[MissReport]:
    return [MissReport(KernelSpec(num_heads=heads), ARCH, count, reason)]


def listed(misses: Misses) -> dict[str, Miss]:
    return {spec.variant_id: miss for spec, _, miss in misses.page("count", 500).misses}


def test_each_replica_shows_the_sum(link: RedisLink, tmp_path: Path) -> None:
    first, second = replica(tmp_path / "0", link, 1000), replica(tmp_path / "1", link, 2000)
    first.record(report(3))
    assert listed(first)[SPEC.variant_id].count == 3
    first.save()
    second.record(report(4, "compiled"))
    expected = Miss(7, {"built": 3, "compiled": 4}, 1000, 2000)
    assert listed(second)[SPEC.variant_id] == expected
    second.save()
    second.save()
    for misses in (first, second, replica(tmp_path / "2", link)):
        wait_for(lambda misses=misses: listed(misses).get(SPEC.variant_id) == expected)
    first.record(report(1))
    assert listed(first)[SPEC.variant_id].count == 8
    for misses in (first, second):
        misses.close()


def test_what_was_reported_without_redis_is_told_later_and_once(redis_server: RedisServer, tmp_path: Path) -> None:
    link = RedisLink(RedisUrl(redis_server.url), 0.25)
    first, second = replica(tmp_path / "0", link), replica(tmp_path / "1", link)
    redis_server.kill()
    first.record(report(2))
    first.save()
    first.record(report(3))
    assert listed(first)[SPEC.variant_id].count == 5  # of the file
    redis_server.start()
    wait_for(lambda: link.is_up)
    first.save()
    first.save()
    assert listed(second)[SPEC.variant_id].count == 5
    assert listed(first)[SPEC.variant_id].count == 5
    first.close()
    second.close()
    link.close()


def test_those_that_were_lacking_longest_ago_go_first(
    link: RedisLink, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MISSES", 3)
    monkeypatch.setattr(module, "_BATCH", 2)
    for number in range(5):
        misses = replica(tmp_path / "0", link, 1000 + number)
        misses.record(report(heads=number + 1))
        misses.close()
    kept = [KernelSpec(num_heads=number).variant_id for number in (3, 4, 5)]
    assert sorted(listed(replica(tmp_path / "1", link))) == sorted(kept)
    client = redis_server.client()
    assert (client.hlen(COUNTS), client.zcard(FIRST), client.zcard(LAST)) == (3, 3, 3)


def test_no_call_reads_more_than_a_batch(link: RedisLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call has a budget, and going over it opens the breaker of all that the link carries."""
    monkeypatch.setattr(module, "_BATCH", 2)
    misses = replica(tmp_path / "0", link)
    for heads in range(1, 6):
        misses.record(report(heads, heads=heads))
    misses.save()
    shared, run = SharedMisses(link), link.run
    calls: list[Any] = []

    def counted(call: Any, *args: Any) -> Any:
        calls.append(answer := run(call, *args))
        return answer

    monkeypatch.setattr(link, "run", counted)
    known = shared.known()
    assert known is not None
    assert sorted(miss.count for miss in known.values()) == [1, 2, 3, 4, 5]
    assert calls[0] == 5
    assert [len(answer) for answer in calls[1:]] == [2, 2, 1]
    misses.close()


@pytest.mark.parametrize("count", [b"", b"-1", b"0", b"1e9", b"9" * 40, b"\xff", b"1\n"])
def test_B031_what_makes_no_sense_is_passed_over(
    link: RedisLink, redis_server: RedisServer, tmp_path: Path, count: bytes
) -> None:
    misses = replica(tmp_path / "0", link)
    misses.record(report(2, heads=6))
    misses.save()
    with redis_server.client() as client:
        client.hset(COUNTS, mapping={f"{MEMBER} built": count, f"{MEMBER} boredom": 1, "x": 1, b"\xff \xff built": 1})
        client.zadd(LAST, {MEMBER: float("inf"), b"\xff \xff": 5, "sm_90a ../../x": 7})
        client.hset(COUNTS, "sm_90a ../../x built", 1)
    assert list(listed(replica(tmp_path / "1", link))) == [KernelSpec(num_heads=6).variant_id]
    misses.close()


def test_B028_a_type_that_is_another_leaves_each_with_its_own(
    link: RedisLink, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.client().set(COUNTS, "a string")
    misses = replica(tmp_path / "0", link)
    misses.record(report(2))
    misses.save()
    assert listed(misses)[SPEC.variant_id].count == 2
    misses.close()
