"""Leases: one holder a key over all replicas, and nothing that outlasts a holder that died."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cache.samples import numbered
from redis_server import RedisServer, redis_server

from mlaprep.kernels_cache.leases import Leases
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl

__all__ = ["redis_server"]

KEY = "0" * 64
NAME = f"mlaprep:1:lease:{KEY}"


@contextmanager
def leases_at(server: RedisServer, lease_s: float = 3.0) -> Iterator[Leases]:
    link = RedisLink(RedisUrl(server.url), 5.0)
    try:
        yield Leases(link, lease_s)
    finally:
        link.close()


def test_B023_one_holder_among_many(redis_server: RedisServer) -> None:
    inside, most = [0], [0]
    held = []

    def work() -> None:
        with leases_at(redis_server) as leases, leases.hold(KEY, 20.0) as holds:
            held.append(holds)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert held == [True] * 12
    assert most == [1]
    assert redis_server.client().get(NAME) is None


def test_a_waiter_gives_up_at_its_deadline(redis_server: RedisServer) -> None:
    with leases_at(redis_server) as one, leases_at(redis_server) as other, one.hold(KEY, 0) as holds:
        assert holds
        began = time.monotonic()
        with other.hold(KEY, 0.2) as again:
            assert not again
        assert 0.2 <= time.monotonic() - began < 2.0
        assert (other.stats().waits, other.stats().given_up) == (1, 1)
        assert redis_server.client().get(NAME) is not None


def test_a_waiter_wakes_soon(redis_server: RedisServer) -> None:
    with leases_at(redis_server) as one, leases_at(redis_server) as other:
        freed = [0.0]

        def hold() -> None:
            with one.hold(KEY, 0):
                taken.set()
                time.sleep(0.3)
                freed[0] = time.monotonic()

        taken = threading.Event()
        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(10)
        with other.hold(KEY, 10.0) as holds:
            assert holds
            assert time.monotonic() - freed[0] < 0.5
        thread.join(10)


def test_a_waiter_stops_once_the_kernel_is_there(redis_server: RedisServer) -> None:
    artifact = numbered(3)
    link = RedisLink(RedisUrl(redis_server.url), 5.0)
    store = RedisStore(link)
    with store.key_lock(artifact.key, 0) as holds:
        assert holds
        threading.Timer(0.1, store.publish, [artifact]).start()
        with leases_at(redis_server) as other, other.hold(artifact.key, 10.0) as goes_on:
            assert goes_on
            assert store.get(artifact.key) == artifact
            assert other.stats().acquired == 0
    link.close()


def test_a_waiter_stops_where_there_is_nothing_left_to_do(redis_server: RedisServer) -> None:
    with leases_at(redis_server) as one, leases_at(redis_server) as other, one.hold(KEY, 0):
        began = time.monotonic()
        with other.hold(KEY, 30.0, unless=lambda: True) as holds:
            assert not holds
        assert time.monotonic() - began < 5.0


def test_a_holder_renews_its_lease(redis_server: RedisServer) -> None:
    with (
        leases_at(redis_server, 0.6) as one,
        leases_at(redis_server, 0.6) as other,
        one.hold(KEY, 0),
        other.hold(KEY, 1.5) as holds,
    ):
        assert not holds
    with leases_at(redis_server) as third, third.hold(KEY, 0) as holds:
        assert holds


def test_a_lease_that_ran_out_is_not_taken_from_the_next_holder(redis_server: RedisServer) -> None:
    with leases_at(redis_server) as one, leases_at(redis_server) as other:
        with one.hold(KEY, 0):
            redis_server.client().delete(NAME)  # as if it had run out
            with other.hold(KEY, 0) as holds:
                assert holds
                token = redis_server.client().get(NAME)
                one._give_back("no longer its own", KEY)
                assert redis_server.client().get(NAME) == token
        assert one.stats().lost == 2


HOLD_FOR_GOOD = f"""
import sys, time
from mlaprep.kernels_cache.leases import Leases
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
with Leases(RedisLink(RedisUrl(sys.argv[1]), 5.0), 1.0).hold({KEY!r}, 0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lease_of_a_killed_holder_runs_out(redis_server: RedisServer) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD_FOR_GOOD, redis_server.url], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with leases_at(redis_server) as leases:
            with leases.hold(KEY, 1.5) as holds:
                assert not holds  # it is alive, and renews
            process.kill()
            began = time.monotonic()
            with leases.hold(KEY, 20.0) as holds:
                assert holds
            assert time.monotonic() - began < 5.0
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize("trouble", ["kill", "pause"])
def test_B028_a_server_that_goes_while_a_lease_is_held(redis_server: RedisServer, trouble: str) -> None:
    link = RedisLink(RedisUrl(redis_server.url), 0.25)
    leases = Leases(link, 0.3)
    began = time.monotonic()
    with leases.hold(KEY, 0) as holds:
        assert holds
        getattr(redis_server, trouble)()
        time.sleep(0.3)
        with leases.hold("1" * 64, 30.0) as another:
            assert another  # there is nobody to wait for
    assert time.monotonic() - began < 3.0
    link.close()
