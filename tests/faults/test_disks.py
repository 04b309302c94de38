"""A disk that fills up, runs out of inodes or turns read-only under a running service, and one that recovers."""

import base64
import contextlib
import hashlib
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_kit import Server, ServerMaker, running_server, wait_for
from tmpfs import may_mount, mounted, remounted

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.spec import KernelSpec

OPTIONS = {"space": "size=256k", "inodes": "size=4m,nr_inodes=90", "read-only": "size=4m"}
TOLD = {
    "space": "the cache's disk is full: ",
    "inodes": "the cache's disk has no inode left: ",
    "read-only": "the cache's disk is read-only: ",
    "file size": "the cache's disk fails (File too large): ",
}
# What takes no root is tried everywhere.
KINDS = ["file size", *(OPTIONS if may_mount() else [])]


@dataclass(frozen=True)
class Disk:
    """Where a service keeps its cache, and how to spoil that and mend it."""

    kind: str
    place: Path

    @property
    def cache(self) -> Path:
        return self.place / "cache"

    def spoil(self, server: Server) -> None:
        match self.kind:
            case "space":
                with contextlib.suppress(OSError), (self.place / "filler").open("wb", buffering=0) as filler:
                    while filler.write(bytes(4096)):
                        pass
            case "inodes":
                with contextlib.suppress(OSError):
                    for number in range(1000):
                        (self.place / f"filler{number}").touch()
            case "read-only":
                wait_for(lambda: remounted(self.place, "ro"))
            case "file size":
                resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    def mend(self, server: Server) -> None:
        if self.kind == "read-only":
            wait_for(lambda: remounted(self.place, "rw"))
        elif self.kind == "file size":
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for filler in self.place.glob("filler*"):
            filler.unlink()


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        if request.param in OPTIONS:
            stack.enter_context(mounted(place, OPTIONS[request.param]))
        yield Disk(request.param, place)


@pytest.fixture
def start(tmp_path: Path, disk: Disk) -> ServerMaker:
    """A server whose cache is on that disk and whose log is not; with the log of what goes on at it."""

    def start(**variables: str) -> contextlib.AbstractContextManager[Server]:
        variables = {"MLAPREP_COMPILE_PROCESSES": "1", "MLAPREP_LOG_LEVEL": "warning"} | variables
        return running_server(tmp_path / "logs", MLAPREP_CACHE_DIR=str(disk.cache), **variables)

    return start


def test_B032_a_disk_that_fails_costs_a_running_service_nothing_but_the_disk(start: ServerMaker, disk: Disk) -> None:
    with start() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        kept = put(http, 1)
        assert readyz(http)["warnings"] == []
        disk.spoil(server)
        with ThreadPoolExecutor(4) as threads:
            built = list(threads.map(lambda heads: put(http, heads), (2, 3, 4, 5, 2, 3, 4, 5)))[:4]
        assert put(http, 1) == kept
        for heads, kernel in enumerate(built, 2):
            assert proved(http.get(path(heads), params={"inline": "true"})) == kernel
            blob = http.get(f"/v1/artifacts/{kernel['cubin_sha256']}")
            assert hashlib.sha256(blob.content).hexdigest() == kernel["cubin_sha256"]
        assert http.post("/v1/misses", json={"misses": [{"variant_id": variant(9), "arch": "sm_90a"}]}).is_success
        plan = {"arch": "sm_100a", "kernels": [{"variant_id": variant(heads)} for heads in (1, 2, 6)]}
        job = http.post("/v1/warmups", json=plan).json()["id"]
        done = wait_for(lambda: (it := http.get(f"/v1/warmups/{job}").json())["state"] == "done" and it, 30)
        assert (done["built"], done["cached"], done["failed"]) == (1, 2, 0)

        found = readyz(http)
        assert found["ready"]
        (warning,) = found["warnings"]
        assert warning.startswith(TOLD[disk.kind])
        assert str(disk.place) not in http.get("/readyz").text + http.get("/status").text
        assert "ready, with warnings" in http.get("/").text
        assert write_errors(http) >= 5
        log = server.log.read_text()
        assert log.count("cannot write") == 1
        assert str(disk.cache) in log
        left = {entry.name: sorted(entry.glob("*")) for entry in disk.cache.glob("sm_*/??/*")}
        assert set(left) == {kept["key"]}, left
        assert list((disk.cache / "tmp").glob("*")) == []

        disk.mend(server)
        wait_for(lambda: readyz(http)["warnings"] == [])
        assert "ready, with warnings" not in http.get("/").text
        assert "can be written again" in server.log.read_text()
        for kernel in (kept, *built):  # what could not be written is written now
            artifact = DiskStore(disk.cache).get(kernel["key"])
            assert artifact is not None
            assert artifact.digest == kernel["cubin_sha256"]
        late = put(http, 7)
        assert server.stop() == 0
    with start() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert proved(http.get(path(7), params={"inline": "true"})) == late
        assert proved(http.get(path(3), params={"inline": "true"})) == built[1]
        assert readyz(http)["counters"]["compiles"] == 0


def test_a_revocation_that_cannot_be_kept_is_a_503_without_the_directory(start: ServerMaker, disk: Disk) -> None:
    with start() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        put(http, 1)
        disk.spoil(server)
        reply = http.delete(path(1), params={"reason": "wrong rows"})
        assert str(disk.place) not in reply.text
        if disk.kind == "file size":  # the record of a revocation is smaller
            assert reply.status_code == 200
        else:
            assert reply.status_code == 503
            assert reply.json()["type"] == "urn:mlaprep:problem:not-kept"
            assert "holds in this process only" in reply.json()["detail"]
            assert int(reply.headers["retry-after"]) > 0
            assert str(disk.cache) in server.log.read_text()
            again = http.delete(path(1), params={"reason": "wrong rows"})
            assert again.status_code == 503  # until it is written, nobody is told that it is
            disk.mend(server)
            assert http.delete(path(1), params={"reason": "wrong rows"}).status_code == 200
        assert http.get(path(1)).status_code == 410
        assert list((disk.cache / "tmp").glob("*")) == []
        assert server.stop() == 0
    with start() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get(path(1)).status_code == 410
        assert http.put(path(1)).status_code == 410


def variant(heads: int) -> str:
    return KernelSpec(num_heads=heads).variant_id


def path(heads: int) -> str:
    return f"/v1/kernels/sm_100a/{variant(heads)}"


def put(http: httpx.Client, heads: int) -> dict[str, Any]:
    """The manifest of a kernel that was asked for, its bytes proved."""
    reply = http.put(path(heads), params={"inline": "true"})
    assert reply.elapsed.total_seconds() < 10
    return proved(reply)


def proved(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code in (200, 201), reply.text
    manifest: dict[str, Any] = reply.json()["manifest"]
    cubin = base64.b64decode(reply.json()["cubin_base64"])
    assert hashlib.sha256(cubin).hexdigest() == manifest["cubin_sha256"]
    return manifest


def readyz(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/readyz").json()
    return document


def write_errors(http: httpx.Client) -> float:
    name = 'mlaprep_store_write_errors_total{tier="disk"} '
    (line,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))
