"""Redis stopped, restarted, locked or full under a service with traffic: every reply right, and none late for long."""

import base64
import contextlib
import hashlib
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from redis_server import RedisServer, redis_server
from service_kit import Server, running_server, wait_for

from mlaprep.templates.spec import KernelSpec

__all__ = ["redis_server"]

BUDGET_S = 0.25
KNOWN = range(1, 7)
FAULT_S = 2.5
SETTLED_S = 1.0
"""After so long in trouble, nobody waits for Redis any more."""


def spoil(server: RedisServer, fault: str) -> None:
    match fault:
        case "stopped":
            server.pause()
        case "restarted":
            server.kill()
        case "locked":
            server.client().config_set("requirepass", "another")
            server.options["requirepass"] = "another"
            server.client().client_kill_filter(_type="normal", skipme=True)
        case "full":
            server.client().config_set("maxmemory", "1")


def mend(server: RedisServer, fault: str) -> None:
    match fault:
        case "stopped":
            server.resume()
        case "restarted":
            server.start()  # with nothing in it
        case "locked":
            server.client().config_set("requirepass", "")
            del server.options["requirepass"]
        case "full":
            server.client().config_set("maxmemory", "0")


TOLD = {
    "stopped": ("down", ""),
    "restarted": ("down", ""),
    "locked": ("down", "it refuses the user or password"),
    "full": ("refusing", "it is full"),
}


@dataclass
class Traffic:
    """Threads that ask for kernels, some of them too impatient, and prove what they get."""

    server: Server
    digests: dict[int, str]
    stop: threading.Event = field(default_factory=threading.Event)
    wrong: list[str] = field(default_factory=list)
    answered: list[tuple[float, float]] = field(default_factory=list)
    """When, and after how many seconds."""
    fresh: int = 10
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.server.url, timeout=30) as http:
            while not self.stop.is_set():
                try:
                    self._ask(http, chance, impatient=number % 4 == 3)
                except httpx.TimeoutException:
                    http.close()
                    http = httpx.Client(base_url=self.server.url, timeout=30)
                except httpx.TransportError as error:
                    self.wrong.append(repr(error))
            http.close()

    def _ask(self, http: httpx.Client, chance: random.Random, *, impatient: bool) -> None:
        heads = chance.choice(KNOWN)
        if chance.random() < 0.05:
            with self.lock:
                heads = self.fresh = self.fresh + 1
        timeout = chance.uniform(0.001, 0.02) if impatient else 30
        kernel = path(heads)
        began = time.monotonic()
        match chance.choice(("get", "put", "blob") if heads in KNOWN else ("put",)):
            case "blob":
                reply = http.get(f"/v1/artifacts/{self.digests[heads]}", timeout=timeout)
                if reply.status_code != 404:
                    self._prove(reply, heads, hashlib.sha256(reply.content).hexdigest())
            case "put":
                reply = http.put(kernel, params={"inline": "true"}, timeout=timeout)
                self._prove_kernel(reply, heads)
            case _:
                reply = http.get(kernel, params={"inline": "true"}, timeout=timeout)
                if reply.status_code != 404:
                    self._prove_kernel(reply, heads)
        self.answered.append((time.monotonic(), time.monotonic() - began))

    def _prove_kernel(self, reply: httpx.Response, heads: int) -> None:
        if reply.status_code not in (200, 201):
            self.wrong.append(reply.text)
            return
        document = reply.json()
        digest = hashlib.sha256(base64.b64decode(document["cubin_base64"])).hexdigest()
        if document["manifest"]["spec"]["num_heads"] != heads or document["manifest"]["cubin_sha256"] != digest:
            self.wrong.append(f"{heads}: {document['manifest']}")
        self._prove(reply, heads, digest)

    def _prove(self, reply: httpx.Response, heads: int, digest: str) -> None:
        if reply.status_code not in (200, 201) or digest != self.digests.get(heads, digest):
            self.wrong.append(f"{heads}: {reply.status_code} {reply.text[:200]}")


def path(heads: int) -> str:
    return f"/v1/kernels/sm_100a/{KernelSpec(num_heads=heads).variant_id}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", TOLD)
def test_B028_redis_in_trouble_under_traffic(tmp_path: Path, redis_server: RedisServer, fault: str) -> None:
    variables = {"MLAPREP_REDIS_TIMEOUT_S": str(BUDGET_S), "MLAPREP_MEMORY_MAX_BYTES": "0"}
    with (
        running_server(tmp_path, MLAPREP_REDIS_URL=redis_server.url, **variables) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        digests = {heads: http.put(path(heads)).json()["manifest"]["cubin_sha256"] for heads in KNOWN}
        traffic = Traffic(server, digests)
        threads = [threading.Thread(target=traffic.run, args=(number,)) for number in range(6)]
        threads.append(threading.Thread(target=empty_again_and_again, args=(tmp_path, traffic.stop)))
        for thread in threads:
            thread.start()
        try:
            hits = shared(http)["hits"]
            wait_for(lambda: shared(http)["hits"] > hits + 20)  # Redis is what answers
            spoil(redis_server, fault)
            began = time.monotonic()
            wait_for(lambda: shared(http)["state"] == TOLD[fault][0], 5)
            traffic.stop.wait(FAULT_S)
            found = http.get("/readyz").json()
            until = time.monotonic()
            mend(redis_server, fault)
            wait_for(lambda: shared(http)["state"] == "up", 15)
            hits = shared(http)["hits"]
            wait_for(lambda: shared(http)["hits"] > hits + 20, 15)
            wait_for(lambda: shared(http)["owed"] == 0, 15)
        finally:
            traffic.stop.set()
            for thread in threads:
                thread.join()
        assert traffic.wrong == []
        assert found["ready"]
        assert found["shared"]["state"] == TOLD[fault][0]
        assert TOLD[fault][1] in found["shared"]["reason"]
        assert [told for told in found["warnings"] if told.startswith("shared cache")]
        assert not [told for told in http.get("/readyz").json()["warnings"] if told.startswith("shared cache")]
        # A few calls, each within its budget, may come before the breaker; then nobody waits.
        assert max(took for _, took in traffic.answered) < 10 * BUDGET_S + 2.5
        later = [took for when, took in traffic.answered if began + SETTLED_S < when < until]
        assert len(later) > 20
        assert statistics.median(later) < BUDGET_S
        assert server.stop() == 0


def shared(http: httpx.Client) -> dict[str, object]:
    document: dict[str, object] = http.get("/readyz").json()["shared"]
    return document


def empty_again_and_again(folder: Path, stop: threading.Event) -> None:
    """What is on disk is taken away, so that Redis is asked."""
    turn = 0
    while not stop.wait(0.02):
        with contextlib.suppress(FileNotFoundError):
            (folder / "cache" / "sm_100a").rename(folder / f"aside-{turn}")
            turn += 1
