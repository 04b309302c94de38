"""Revocations over replicas: what one revokes or lifts holds for all, and a Redis that forgets lifts nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache.samples import numbered
from redis_server import RedisServer, redis_server

from mlaprep.kernels_cache import shared_revocations
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.kernels_cache.revocation import Revocation, Revocations
from mlaprep.kernels_cache.shared_revocations import MARK, SHARED, SharedRevocations

__all__ = ["redis_server"]

ONE, OTHER = (Revocation.of(numbered(number).manifest, f"reason {number}") for number in (1, 2))


@pytest.fixture
def replicas(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SharedRevocations, SharedRevocations]]:
    """Two, each with a directory of its own, that look at every question."""
    monkeypatch.setattr(shared_revocations, "_LOOK_S", 0.0)
    links = [RedisLink(RedisUrl(redis_server.url), 5.0) for _ in range(2)]
    first, second = (SharedRevocations(tmp_path / str(number), link) for number, link in enumerate(links))
    yield first, second
    for link in links:
        link.close()


Replicas = tuple[SharedRevocations, SharedRevocations]


def test_what_one_replica_revokes_and_lifts_holds_for_all(replicas: Replicas, tmp_path: Path) -> None:
    first, second = replicas
    first.add(ONE)
    assert second.find(key=ONE.key) == ONE
    assert second.find(digest=ONE.digest) == ONE
    assert Revocations(tmp_path / "1").find(key=ONE.key) == ONE  # kept there too
    second.add(OTHER)
    assert first.list() == second.list() == tuple(sorted((ONE, OTHER)))
    assert second.lift(ONE.key) == ONE
    assert first.find(key=ONE.key) is None
    assert Revocations(tmp_path / "0").find(key=ONE.key) is None
    first.add(ONE)
    assert second.find(key=ONE.key) == ONE


def test_a_new_replica_learns_all_and_tells_what_it_knew(
    redis_server: RedisServer, replicas: Replicas, tmp_path: Path
) -> None:
    first, _ = replicas
    first.add(ONE)
    Revocations(tmp_path / "2").add(OTHER)
    link = RedisLink(RedisUrl(redis_server.url), 5.0)
    third = SharedRevocations(tmp_path / "2", link)
    assert third.list() == tuple(sorted((ONE, OTHER)))
    assert first.find(key=OTHER.key) == OTHER
    link.close()


def test_a_redis_that_forgot_everything_lifts_nothing(redis_server: RedisServer, replicas: Replicas) -> None:
    first, second = replicas
    first.add(ONE)
    assert second.find(key=ONE.key) == ONE
    redis_server.client().flushall()
    assert first.find(key=ONE.key) == ONE
    assert second.find(key=ONE.key) == ONE
    assert redis_server.client().hlen(SHARED) == 1  # told again


def test_what_was_decided_without_redis_is_told_later(
    redis_server: RedisServer, replicas: Replicas, tmp_path: Path
) -> None:
    first, second = replicas
    first.add(ONE)
    assert second.find(key=ONE.key) == ONE
    redis_server.kill()
    second.add(OTHER)
    assert second.find(key=OTHER.key) == OTHER
    assert first.find(key=OTHER.key) is None
    redis_server.start()
    for each in replicas:
        while not each._link.is_up:
            pass
    assert second.find(key=OTHER.key) == OTHER
    assert first.find(key=OTHER.key) == OTHER
    assert second.find(key=ONE.key) == ONE


def test_a_lift_lifts_only_what_is_older(redis_server: RedisServer, replicas: Replicas) -> None:
    first, second = replicas
    first.add(ONE)
    with redis_server.client() as client:
        client.hset(SHARED, ONE.key, '{"lifted_at": "2020-01-01T00:00:00Z"}')
        client.set(MARK, "another")
        assert first.find(key=ONE.key) == ONE
        assert second.find(key=ONE.key) == ONE  # told again
        client.hset(SHARED, ONE.key, '{"lifted_at": "2199-01-01T00:00:00Z"}')
        client.set(MARK, "yet another")
    assert first.find(key=ONE.key) is None
    assert second.find(key=ONE.key) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lifted_at": 5}', '{"lifted_at": "soon"}', '{"key": "x"}', "\xff"])
def test_B031_damage_there_lifts_nothing_and_is_mended(
    redis_server: RedisServer, replicas: Replicas, text: str
) -> None:
    first, second = replicas
    first.add(ONE)
    with redis_server.client() as client:
        good = client.hget(SHARED, ONE.key)
        client.hset(SHARED, mapping={ONE.key: text, "a key\nFLUSHALL": good, OTHER.key: good})
        client.set(MARK, "another")
        assert second.find(key=OTHER.key) is None
        assert first.find(key=ONE.key) == ONE
        assert client.hget(SHARED, ONE.key) == good
    assert second.find(key=ONE.key) == ONE


def test_an_unchanged_list_costs_one_round_trip(redis_server: RedisServer, replicas: Replicas) -> None:
    first, _ = replicas
    first.add(ONE)
    assert first.list() == (ONE,)
    before = redis_server.client().info("commandstats")["cmdstat_hgetall"]["calls"]
    for _ in range(5):
        assert first.find(key=OTHER.key) is None
    assert redis_server.client().info("commandstats")["cmdstat_hgetall"]["calls"] == before
