"""The shared store against a real redis-server: damage, strangers' entries, and a server in trouble."""

import logging
import pickle
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cache.samples import make_artifact, numbered, synthetic_cubin
from redis_server import RedisServer, free_port, redis_server, running_redis

from mlaprep.kernels_cache import redis_index
from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import RedisUrl
from mlaprep.kernels_cache.trust import TrustedKeys

__all__ = ["redis_server"]

BOUND_S = 2.0
"""What a call may take on a busy machine whose budget is a quarter of a second."""


@contextmanager
def store_at(url: str, budget_s: float = 5.0, **options: Any) -> Iterator[RedisStore]:
    store = RedisStore(RedisLink(RedisUrl.parse(url), budget_s), **options)
    try:
        yield store
    finally:
        store.redis.close()


@pytest.fixture
def shared(redis_server: RedisServer) -> Iterator[RedisStore]:
    with store_at(redis_server.url) as store:
        yield store


def until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def names(server: RedisServer, kind: str) -> list[bytes]:
    return sorted(server.client().keys(f"mlaprep:1:{kind}:*"))


def test_two_processes_share_what_one_published(shared: RedisStore, redis_server: RedisServer) -> None:
    artifact = make_artifact()
    shared.publish(artifact)
    with store_at(redis_server.url) as other:
        assert other.get(artifact.key) == artifact
        assert [manifest.key for manifest in other.list()] == [artifact.key]
        more = numbered(1)
        shared.publish(more)
        assert {manifest.key for manifest in other.list()} == {artifact.key, more.key}
        shared.delete(artifact.key)
        assert {manifest.key for manifest in other.list()} == {more.key}
        assert other.stats().bytes == more.size


def test_a_copy_asks_the_same_server(shared: RedisStore) -> None:
    artifact = make_artifact()
    shared.publish(artifact)
    copy: RedisStore = pickle.loads(pickle.dumps(shared))
    assert copy.get(artifact.key) == artifact
    copy.redis.close()


@pytest.mark.parametrize("where", ["record", "cubin", "source"])
@pytest.mark.parametrize("damage", ["flip-first", "flip-last", "cut", "half", "longer", "list", "gone"])
def test_B031_damage_is_a_miss_and_heals(
    shared: RedisStore, redis_server: RedisServer, where: str, damage: str
) -> None:
    artifact = make_artifact()
    shared.publish(artifact)
    digests = {"cubin": artifact.digest, "source": artifact.manifest.source_sha256}
    place = f"mlaprep:1:record:{artifact.key}" if where == "record" else f"mlaprep:1:blob:{digests[where]}"
    with redis_server.client() as client:
        good = client.get(place)
        client.delete(place)
        match damage:
            case "flip-first":
                client.set(place, bytes([good[0] ^ 1]) + good[1:])
            case "flip-last":
                client.set(place, good[:-1] + bytes([good[-1] ^ 0x80]))
            case "cut":
                client.set(place, good[:-1])
            case "half":
                client.set(place, good[: len(good) // 2])
            case "longer":
                client.set(place, good + b"\n")
            case "list":
                client.rpush(place, good)
    assert shared.get(artifact.key) is None
    assert shared.get_blob(artifact.digest) is None
    stats = shared.stats()
    assert stats.damaged == stats.quarantined == (damage != "gone")
    assert names(redis_server, "record") == []
    shared.publish(artifact)
    assert shared.get(artifact.key) == artifact
    assert shared.get_blob(artifact.digest) == artifact.cubin


def test_B031_the_cubin_of_another_kernel_is_not_taken(shared: RedisStore, redis_server: RedisServer) -> None:
    one, other = numbered(1), numbered(2)
    shared.publish(one)
    shared.publish(other)
    with redis_server.client() as client:
        client.copy(f"mlaprep:1:blob:{other.digest}", f"mlaprep:1:blob:{one.digest}", replace=True)
        client.copy(f"mlaprep:1:record:{one.key}", f"mlaprep:1:record:{other.key}", replace=True)
    assert shared.get(one.key) is None
    assert shared.get(other.key) is None
    assert shared.stats().damaged == 2


def test_B031_what_was_made_good_meanwhile_is_not_removed(shared: RedisStore, redis_server: RedisServer) -> None:
    artifact = make_artifact()
    shared.publish(artifact)
    place = f"mlaprep:1:blob:{artifact.digest}"
    with redis_server.client() as client:
        good = client.get(place)
        client.set(place, b"damaged")
        drop, dropped = shared._set_aside, threading.Event()

        def late(*args: Any) -> None:
            client.set(place, good)
            client.delete(f"mlaprep:1:record:{artifact.key}")
            with store_at(redis_server.url) as other:
                other.publish(artifact)
            drop(*args)
            dropped.set()

        shared._set_aside = late  # type: ignore[method-assign]
        assert shared.get(artifact.key) is None
    assert dropped.is_set()
    assert redis_server.client().get(place) == good


def test_B029_differing_bytes_raise_a_counter_and_the_first_stay(shared: RedisStore, redis_server: RedisServer) -> None:
    first, second = (make_artifact(cubin=synthetic_cubin(text=text)) for text in (b"first", b"other"))
    shared.publish(first)
    with store_at(redis_server.url) as other:
        other.publish(second)
        assert other.stats().differing == 1
        assert other.get(first.key) == first


def test_B029_writers_at_once_leave_one_whole_record(redis_server: RedisServer) -> None:
    artifacts = [make_artifact(cubin=synthetic_cubin(text=bytes([65 + number]))) for number in range(8)]
    barrier = threading.Barrier(8)
    differing = []

    def write(number: int) -> None:
        with store_at(redis_server.url) as store:
            barrier.wait(10)
            store.publish(artifacts[number])
            differing.append(store.stats().differing)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(differing) == 7
    with store_at(redis_server.url) as store:
        assert store.get(artifacts[0].key) in artifacts


@pytest.mark.parametrize(
    "key", ["0" * 64 + "\n", "0" * 63 + "\n", "\n", "*", "0" * 64 + "\r\nFLUSHALL\r\n", "a\0b", ".."]
)
def test_B054_no_strange_name_reaches_the_server(shared: RedisStore, redis_server: RedisServer, key: str) -> None:
    before = redis_server.client().info("commandstats")
    assert shared.get(key) is None
    assert shared.get_blob(key) is None
    assert shared.resolve(key) is None
    assert not shared.delete(key)
    with pytest.raises(StoreError):
        shared.key_lock(key, 0)
    for pair in ((key, "0" * 64), ("0" * 64, key)):
        with pytest.raises(StoreError):
            shared.link(*pair)
    assert shared.redis.stats().calls == 0
    after = redis_server.client().info("commandstats")
    assert {name for name in after if name not in before} <= {"cmdstat_info", "cmdstat_client|setinfo", "cmdstat_hello"}


@pytest.mark.parametrize("value", [b"", b"\n", b"0" * 64 + b"\n", b"../x", b"\xff" * 64, b"0" * 65])
def test_B054_a_link_that_is_no_key_is_none(shared: RedisStore, redis_server: RedisServer, value: bytes) -> None:
    redis_server.client().set("mlaprep:1:link:" + "1" * 64, value)
    assert shared.resolve("1" * 64) is None


def test_an_index_outlives_flushes_and_expired_records(shared: RedisStore, redis_server: RedisServer) -> None:
    artifacts = [numbered(number) for number in range(4)]
    for artifact in artifacts:
        shared.publish(artifact)
    assert len(list(shared.list())) == 4
    with redis_server.client() as client:
        client.delete(f"mlaprep:1:record:{artifacts[0].key}")
        with store_at(redis_server.url) as fresh:
            assert {manifest.key for manifest in fresh.list()} == {artifact.key for artifact in artifacts[1:]}
        assert len(list(shared.list())) == 3
        client.flushall()
        assert list(shared.list()) == []
        shared.publish(artifacts[2])
        assert [manifest.key for manifest in shared.list()] == [artifacts[2].key]


def test_what_is_read_stays_for_longer(shared: RedisStore, redis_server: RedisServer) -> None:
    artifact = make_artifact()
    shared.publish(artifact)
    shared.link("1" * 64, artifact.key)
    with redis_server.client() as client:
        places = [place for kind in ("record", "blob", "holders", "link") for place in names(redis_server, kind)]
        assert len(places) == 5
        for place in places:
            assert 0 < client.ttl(place) <= 30 * 86400
            client.expire(place, 60)
        assert shared.get(artifact.key) == artifact
        assert shared.resolve("1" * 64) == artifact.key
        assert all(client.ttl(place) > 86400 for place in places)


def test_a_list_is_one_round_trip_after_a_removal_too(shared: RedisStore, redis_server: RedisServer) -> None:
    artifacts = [numbered(number) for number in range(3)]
    for artifact in artifacts:
        shared.publish(artifact)
    assert len(list(shared.list())) == 3
    for gone in (artifacts[2], artifacts[0]):
        shared.delete(gone.key)
        assert gone.key not in {manifest.key for manifest in shared.list()}
        calls = shared.redis.stats().calls
        assert list(shared.list())
        assert shared.redis.stats().calls == calls + 1


def test_sizes_stay_right_over_damage_and_removal(shared: RedisStore, redis_server: RedisServer) -> None:
    one, other = numbered(1), make_artifact("// a longer source\n" * 50)
    for artifact in (one, other, one):
        shared.publish(artifact)
    with redis_server.client() as client:
        client.set(f"mlaprep:1:blob:{one.digest}", b"damaged")
        assert shared.get(one.key) is None
        shared.publish(one)
        assert (shared.stats().entries, shared.stats().bytes) == (2, one.size + other.size)
        client.delete(f"mlaprep:1:record:{other.key}")
        with store_at(redis_server.url) as fresh:
            assert len(list(fresh.list())) == 1
            assert (fresh.stats().entries, fresh.stats().bytes) == (1, one.size)
    shared.delete(one.key)
    assert (shared.stats().entries, shared.stats().bytes) == (0, 0)


def test_a_long_index_is_read_in_batches(
    shared: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_index, "_BATCH", 20)
    for number in range(110):
        shared.publish(numbered(number))
    with store_at(redis_server.url) as fresh:
        assert len(list(fresh.list())) == fresh.stats().entries == 110
        calls = fresh.redis.stats().calls
        assert len(list(fresh.list())) == 110
        assert fresh.redis.stats().calls == calls + 1


def test_signatures_are_made_and_asked_for_where_keys_are_configured(redis_server: RedisServer, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, stranger = generate_key(tmp_path / "own"), generate_key(tmp_path / "stranger")
    trust = TrustedKeys((key.public,))
    artifact = make_artifact()
    with (
        store_at(redis_server.url) as unsigned,
        store_at(redis_server.url, sign=stranger) as foreign,
        store_at(redis_server.url, sign=key, trust=trust) as own,
        store_at(redis_server.url, trust=trust) as reader,
    ):
        unsigned.publish(artifact)
        assert unsigned.get(artifact.key) == artifact
        assert reader.get(artifact.key) is None
        assert reader.get_blob(artifact.digest) is None
        reader.publish(artifact)  # unsigned: it would not read that itself
        assert reader.get(artifact.key) is None
        own.publish(artifact)
        found = reader.get(artifact.key)
        assert found is not None
        assert found.manifest.signature
        trust.require(found.manifest)
        other = make_artifact(cubin=synthetic_cubin(text=b"of a stranger"), source="// other\n")
        mine = make_artifact(cubin=synthetic_cubin(text=b"of my own"), source="// other\n")
        foreign.publish(other)
        assert reader.get(other.key) is None
        own.publish(mine)
        taken = reader.get(other.key)
        assert taken is not None
        assert taken.cubin == mine.cubin
        assert (reader.stats().damaged, own.stats().differing) == (0, 0)


# A server in trouble


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def assert_goes_on_alone(store: RedisStore) -> None:
    """Every operation gives up within the budget, the first time, and at once from then on."""
    artifact = numbered(77)

    def all_of_them() -> None:
        assert store.get(artifact.key) is None
        assert store.get_blob(artifact.digest) is None
        store.publish(artifact)
        store.link("1" * 64, artifact.key)
        assert store.resolve("1" * 64) is None
        assert not store.delete(artifact.key)
        assert store.find(artifact.key[:9]) is None
        with store.key_lock(artifact.key, 5.0) as held:
            assert held
        store.stats()

    assert timed(all_of_them) < BOUND_S
    assert not store.redis.is_up
    assert timed(all_of_them) < BOUND_S
    assert store.stats().write_errors >= 6


def test_B028_a_server_that_refuses_connections() -> None:
    with store_at(f"redis://127.0.0.1:{free_port()}", 0.25) as store:
        assert_goes_on_alone(store)
        assert store.redis.stats().reason == "connection refused"


def test_B028_a_server_that_was_stopped_with_sigstop(redis_server: RedisServer) -> None:
    artifact = make_artifact()
    with store_at(redis_server.url, 0.25) as store, store_at(redis_server.url, 0.25) as fresh:
        store.publish(artifact)
        redis_server.pause()
        for each in (store, fresh):
            assert_goes_on_alone(each)
            stats = each.redis.stats()
            assert (stats.state, stats.reason, stats.opened) == ("down", "no answer within 250 ms", 1)
            assert stats.timeouts == 1
            assert stats.skipped > 10
        redis_server.resume()
        until(lambda: store.redis.is_up and fresh.redis.is_up)
        assert store.get(artifact.key) == artifact
        assert fresh.get(artifact.key) == artifact


def test_B028_a_herd_at_a_hung_server_waits_once(redis_server: RedisServer) -> None:
    with store_at(redis_server.url, 0.25) as store:
        redis_server.pause()
        waits: list[float] = []
        threads = [threading.Thread(target=lambda: waits.append(timed(lambda: store.get("0" * 64)))) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(waits) == 40
        assert max(waits) < BOUND_S
        redis_server.resume()


def test_B028_a_server_that_is_killed_and_started_anew(redis_server: RedisServer) -> None:
    artifact = make_artifact()
    with store_at(redis_server.url, 0.25) as store:
        store.publish(artifact)
        redis_server.kill()
        assert_goes_on_alone(store)
        redis_server.start()
        until(lambda: store.redis.is_up)
        assert store.get(artifact.key) is None  # it kept nothing
        assert list(store.list()) == []
        store.publish(artifact)
        assert store.get(artifact.key) == artifact
        assert [manifest.key for manifest in store.list()] == [artifact.key]


def test_B028_idle_connections_that_died_cost_nothing(redis_server: RedisServer) -> None:
    artifact = make_artifact()
    with store_at(redis_server.url) as store:
        store.publish(artifact)
        redis_server.client().client_kill_filter(_type="normal", skipme=True)
        assert store.get(artifact.key) == artifact
        assert store.redis.stats().opened == 0


@pytest.mark.parametrize("given", ["", ":wrong-s3cret@", "someone:wrong-s3cret@"])
def test_B028_a_wrong_password_shows_without_the_password(
    tmp_path: Path, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        running_redis(tmp_path, requirepass="right-s3cret") as server,
        store_at(server.url.replace("://", f"://{given}"), 0.25) as store,
    ):
        assert_goes_on_alone(store)
        assert store.redis.stats().reason == "it refuses the user or password"
        with server.client() as client:
            client.config_set("requirepass", "")
            client.execute_command("ACL", "SETUSER", "someone", "on", "nopass", "~*", "&*", "+@all")
        until(lambda: store.redis.is_up)
        store.publish(make_artifact())
        assert store.get(make_artifact().key) is not None
        assert "s3cret" not in caplog.text + repr(store.redis.stats()) + repr(store.redis.url) + str(store.redis.url)


def test_B028_a_full_server_still_reads(tmp_path: Path) -> None:
    with running_redis(tmp_path, maxmemory="100mb", maxmemory_policy="noeviction") as server:
        artifact = make_artifact()
        with store_at(server.url) as store:
            store.publish(artifact)
            server.client().config_set("maxmemory", "1")
            other = numbered(1)
            store.publish(other)
            store.link("1" * 64, other.key)
            assert store.get(other.key) is None
            assert store.get(artifact.key) == artifact
            with store.key_lock(other.key, 1) as held:
                assert held  # nobody can tell
            assert store.stats().write_errors == 2
            assert store.redis.is_up
            assert store.trouble == "it is full"
            server.client().config_set("maxmemory", "0")
            store.publish(other)
            assert store.get(other.key) == other
            assert store.trouble == ""


def test_B028_a_value_beyond_the_memory_of_the_server(tmp_path: Path) -> None:
    with (
        running_redis(tmp_path, maxmemory="16mb", maxmemory_policy="noeviction") as server,
        store_at(server.url) as store,
    ):
        large = [
            make_artifact(f"// {number}\n", cubin=synthetic_cubin(text=bytes([number]) * 2_000_000))
            for number in range(8)
        ]
        for artifact in large:
            store.publish(artifact)
        kept = [artifact for artifact in large if store.get(artifact.key) is not None]
        assert 0 < len(kept) < 8
        assert store.stats().write_errors > 0
        assert store.stats().damaged == 0


@contextmanager
def imposter(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens where a Redis should be; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def drips(connection: socket.socket) -> None:
    """Sends a bulk string, a byte at a time, each within the time-out of a socket."""
    connection.recv(4096)
    connection.sendall(b"$4096\r\n")
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.05)


def talks_http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def hangs_up(connection: socket.socket) -> None:
    connection.recv(4096)


def is_loading(connection: socket.socket) -> None:
    while connection.recv(4096):
        connection.sendall(b"-LOADING Redis is loading the dataset in memory\r\n" * 8)


def answers_nonsense(connection: socket.socket) -> None:
    while connection.recv(4096):
        connection.sendall(b"*2\r\n:1\r\n*0\r\n" * 64)


@pytest.mark.parametrize("answer", [drips, talks_http, hangs_up, is_loading, answers_nonsense])
def test_B028_something_that_is_no_good_redis(answer: Callable[[socket.socket], None]) -> None:
    with imposter(answer) as url, store_at(url, 0.25) as store:
        assert_goes_on_alone(store)
        assert store.redis.stats().reason


def test_B028_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    with store_at("redis://redis.invalid", 0.25) as store:
        assert_goes_on_alone(store)


def test_B028_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(5) and [])
    with store_at("redis://redis.internal", 0.25) as store:
        assert_goes_on_alone(store)
        assert store.redis.stats().reason == "no answer within 250 ms"
        ended.set()


def test_B028_a_read_only_replica_is_read(redis_server: RedisServer, tmp_path: Path) -> None:
    artifact = make_artifact()
    with store_at(redis_server.url) as store:
        store.publish(artifact)
        (tmp_path / "replica").mkdir()
        redis_server.client().config_set("repl-diskless-sync-delay", "0")
        with running_redis(tmp_path / "replica", replicaof=f"127.0.0.1 {redis_server.port}") as replica:
            with replica.client() as client:
                until(lambda: client.exists(f"mlaprep:1:record:{artifact.key}"), 30)
            with store_at(replica.url) as reader:
                assert reader.get(artifact.key) == artifact
                assert [manifest.key for manifest in reader.list()] == [artifact.key]
                reader.publish(numbered(1))
                assert "READONLY" in reader.trouble.upper()
                assert reader.redis.is_up


def test_a_socket_of_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running_redis(tmp_path, unixsocket=str(path)), store_at(f"unix://{path}?db=1") as store:
        store.publish(make_artifact())
        assert store.get(make_artifact().key) is not None


def test_tls_is_checked_and_spoken(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    options = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_auth_clients": "no"}
    with running_redis(tmp_path, tls_port=str(port), **options):
        with store_at(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}") as store:
            store.publish(make_artifact())
            assert store.get(make_artifact().key) is not None
        with store_at(f"rediss://127.0.0.1:{port}/0", 0.25) as stranger:
            assert_goes_on_alone(stranger)
            assert "certificate" in stranger.redis.stats().reason


@pytest.mark.parametrize(
    "url",
    ["", "http://s3cret@host", "redis://", "redis://h:s3cret", "redis://:s3cret/x@host:1/a/b", "redis://h/s3cret", "redis://h:70000",
     "redis://user:s3cret@h?max_connections=s3cret", "redis://h#s3cret", "unix://relative-s3cret", "redis://h\n", "rediss:///0"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        RedisUrl.parse(url)
    assert "s3cret" not in str(caught.value)
    assert "rediss://" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:s3cret@h", "redis://h:6379/0"),
        ("rediss://:s3cret@H:7000/3?ssl_cert_reqs=none", "rediss://h:7000/3"),
        ("redis://[::1]:1/2", "redis://[::1]:1/2"),
        ("unix:///run/redis.sock?db=2&password=s3cret", "unix:///run/redis.sock"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, place: str) -> None:
    parsed = RedisUrl.parse(url)
    assert str(parsed) == parsed.place == place
    assert "s3cret" not in repr(parsed)
