"""A flipped bit in any file of the cache or value of Redis, under a running service: never wrong bytes, never a 500."""

import base64
import contextlib
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis_server import RedisServer, redis_server
from service_kit import Server, running_server, wait_for

from mlaprep.templates.spec import KernelSpec

__all__ = ["redis_server"]

BUILT, REVOKED, MISSED = (1, 2, 3), 4, 5
PLACES = (0.0, 0.31, 1.0)
"""Where in a file or value a bit is flipped, as shares of its length."""


def path(heads: int) -> str:
    return f"/v1/kernels/sm_100a/{KernelSpec(num_heads=heads).variant_id}"


PLAN = {"arch": "sm_100a", "kernels": [{"variant_id": KernelSpec(num_heads=heads).variant_id} for heads in BUILT]}
READS = (
    "/v1/variants?state=built", "/v1/misses", "/v1/warmups", "/v1/revocations", "/v1/presets", "/metrics", "/readyz",
    "/", "/misses", "/warmups", "/status",
)  # fmt: skip


@dataclass
class Caller:
    """Asks a service for all that it has, and proves what it gets."""

    http: httpx.Client
    manifests: dict[int, dict[str, Any]] = field(default_factory=dict)
    job: str = ""
    rebuilt: int = 0
    before: Callable[[], None] = lambda: None
    """Takes away what the service has nearer than what was damaged."""

    def fill(self) -> None:
        """Give the service something of every kind to keep."""
        for heads in (*BUILT, REVOKED):
            self.manifests[heads] = self.http.put(path(heads)).json()["manifest"]
        assert self.http.delete(path(REVOKED), params={"reason": "wrong rows"}).status_code == 200
        self.job = self.http.post("/v1/warmups", json=PLAN).json()["id"]
        missed = {"variant_id": KernelSpec(num_heads=MISSED).variant_id, "arch": "sm_90a"}
        assert self.http.post("/v1/misses", json={"misses": [missed]}).status_code == 200

    def ask(self, what: str) -> None:
        """Every call. ``what`` says what was damaged, for whoever reads of a failure."""
        for heads in BUILT:
            digest = self.manifests[heads]["cubin_sha256"]
            self._blob(heads, what)
            self.before()
            self._kernel(self.http.get(path(heads), params={"inline": "true"}), heads, (200, 404), what)
            self.before()
            source = self.http.get(path(heads) + "/source")
            assert source.status_code in (200, 404), (what, source.text)
            if source.status_code == 200:
                assert hashlib.sha256(source.content).hexdigest() == self.manifests[heads]["source_sha256"], what
            self.before()
            put = self.http.put(path(heads), params={"inline": "true"})
            self._kernel(put, heads, (200, 201), what)
            self.rebuilt += put.status_code == 201
            self._blob(heads, what)
            assert self.http.get(f"/v1/artifacts/{digest[:12]}", follow_redirects=True).status_code in (200, 404), what
        for call in (self.http.get, self.http.put):
            assert call(path(REVOKED)).status_code == 410, what
        for read in READS:
            reply = self.http.get(read)
            assert reply.status_code == 200, (what, read, reply.text)
        assert self.http.get(f"/v1/warmups/{self.job}").status_code in (200, 404), what
        assert self.http.post("/v1/warmups", json=PLAN).status_code in (200, 202), what

    def _kernel(self, reply: httpx.Response, heads: int, due: tuple[int, ...], what: str) -> None:
        assert reply.status_code in due, (what, reply.text)
        if reply.status_code == 404:
            return
        document, known = reply.json(), self.manifests[heads]
        assert {name: document["manifest"][name] for name in ("key", "cubin_sha256", "source_sha256", "spec")} == {
            name: known[name] for name in ("key", "cubin_sha256", "source_sha256", "spec")
        }, what
        cubin = base64.b64decode(document["cubin_base64"])
        assert hashlib.sha256(cubin).hexdigest() == known["cubin_sha256"], what
        assert hashlib.sha256(document["source"].encode()).hexdigest() == known["source_sha256"], what

    def _blob(self, heads: int, what: str) -> None:
        digest = self.manifests[heads]["cubin_sha256"]
        self.before()
        reply = self.http.get(f"/v1/artifacts/{digest}")
        assert reply.status_code in (200, 404), (what, reply.text)
        if reply.status_code == 200:
            assert hashlib.sha256(reply.content).hexdigest() == digest, what


def flipped(data: bytes, place: float, chance: random.Random) -> bytes:
    at = min(int(place * len(data)), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


@contextlib.contextmanager
def caller_of(server: Server) -> Iterator[Caller]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield Caller(http)
    assert server.stop() == 0
    assert "failed: " not in server.log.read_text()


@pytest.mark.parametrize("memory", ["0", str(2**20)], ids=["disk alone", "with memory"])
def test_B031_a_flipped_bit_in_any_file(tmp_path: Path, chance: random.Random, memory: str) -> None:
    cache = tmp_path / "cache"
    with (
        running_server(tmp_path, MLAPREP_MEMORY_MAX_BYTES=memory, MLAPREP_LOG_LEVEL="error") as server,
        caller_of(server) as caller,
    ):
        caller.fill()
        wait_for(lambda: (cache / "misses.json").exists() and list(cache.glob("warmed/*")))
        caller.ask("nothing")
        files = sorted(file for file in cache.rglob("*") if file.is_file() and file.stat().st_size)
        kinds = {file.relative_to(cache).parts[0] for file in files}
        assert kinds >= {"sm_100a", "links", "blobs", "jobs", "warmed", "revoked", "misses.json"}, kinds
        for file in files:
            for place in PLACES:
                with contextlib.suppress(FileNotFoundError):  # set aside by now, and perhaps built again
                    flip_in_place(file, place, chance)
                    caller.ask(f"{file.relative_to(cache)} at {place}")
        found = caller.http.get("/readyz").json()["store"]
        if memory == "0":
            assert found["quarantined"] == found["damaged"] >= len(BUILT) * 3
            assert caller.rebuilt >= len(BUILT) * 3
        else:
            assert caller.rebuilt == 0  # memory had them


def flip_in_place(file: Path, place: float, chance: random.Random) -> None:
    """The same file, one bit of it another; what stands where is still the same inode."""
    data = flipped(file.read_bytes(), place, chance)
    with file.open("r+b") as opened:
        opened.write(data)


def test_B031_a_flipped_bit_in_any_value_of_redis(
    tmp_path: Path, chance: random.Random, redis_server: RedisServer
) -> None:
    variables = {"MLAPREP_MEMORY_MAX_BYTES": "0", "MLAPREP_LOG_LEVEL": "error"}
    with (
        running_server(
            tmp_path, MLAPREP_REDIS_URL=redis_server.url, MLAPREP_REDIS_TIMEOUT_S="5", **variables
        ) as server,
        caller_of(server) as caller,
    ):
        caller.fill()
        caller.before = lambda: shutil.rmtree(tmp_path / "cache" / "sm_100a", ignore_errors=True)
        client = redis_server.client()
        wait_for(lambda: any(b"miss" in key for key in client.scan_iter()))
        caller.ask("nothing")
        values = {key: client.type(key) for key in sorted(client.scan_iter())}
        assert {b"string", b"hash", b"zset"} <= set(values.values()), values
        for key, kind in values.items():
            for place in PLACES:
                if flip_in_redis(client, key, kind, place, chance):
                    caller.ask(f"{key!r} at {place}")
        shared = caller.http.get("/readyz").json()["shared"]
        assert shared["damaged"] >= len(BUILT) * 2
        assert shared["state"] == "up"
        assert caller.rebuilt >= len(BUILT) * 2


def flip_in_redis(client: Any, key: bytes, kind: bytes, place: float, chance: random.Random) -> bool:
    """One bit of a value, or of one member of it; False where there is none any more."""
    if not client.exists(key):
        return False
    match kind:
        case b"string":
            client.set(key, flipped(client.get(key), place, chance), keepttl=True)
        case b"hash":
            name, value = chance.choice(sorted(client.hgetall(key).items()))
            client.hset(key, name, flipped(value or b"\0", place, chance))
        case b"zset":
            member, score = chance.choice(client.zrange(key, 0, -1, withscores=True))
            client.zrem(key, member)
            client.zadd(key, {flipped(member, place, chance): score})
        case b"set":
            member = chance.choice(sorted(client.smembers(key)))
            client.srem(key, member)
            client.sadd(key, flipped(member, place, chance))
        case b"list":
            at = chance.randrange(client.llen(key))
            client.lset(key, at, flipped(client.lindex(key, at), place, chance))
        case other:
            raise AssertionError(f"{key!r} is a {other!r}, which nothing here can flip")
    return True
