"""kill -9 at random points: nothing corrupt is served, nothing is stuck, no child and no temporary file stays."""

import base64
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from service_kit import children_of, is_alive, running_server, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import CompileCrashed
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_100a")
BUILD = """
import sys
from pathlib import Path
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec
compiler = Compiler(processes=1)
builder = Builder(DiskStore(Path(sys.argv[1])), compiler)
for heads in range(int(sys.argv[2]), 257):
    built = builder.get_or_compile(KernelSpec(num_heads=heads), Arch("sm_100a"))
    print(heads, built.artifact.digest, flush=True)
"""


def whole(root: Path) -> dict[str, str]:
    """Key to digest of every entry, each of them read and found good."""
    store = DiskStore(root)
    found = {}
    for path in root.glob("sm_*/??/*"):
        artifact = store.get(path.name)
        assert artifact is not None, path
        artifact.verify(key=path.name, arch=path.parts[-3])
        found[path.name] = artifact.digest
    assert store.stats().damaged == 0
    return found


def leftovers(root: Path) -> list[Path]:
    return [path for folder in ("tmp", "locks", "quarantine") for path in (root / folder).glob("*")]


def let_time_pass(root: Path) -> None:
    """What a killed process left is two hours old now; no clock is moved but that of its files."""
    then = time.time() - 7200
    for path in leftovers(root):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (then, then), follow_symlinks=False)


def test_B051_an_embedded_builder_killed_at_random(tmp_path: Path, fault_rounds: int, chance: random.Random) -> None:
    root, known, told = tmp_path / "cache", {}, {}
    for number in range(fault_rounds // 4):
        command = [sys.executable, "-c", BUILD, str(root), str(1 + 4 * (number % 60))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first = process.stdout.readline().split()  # told means kept: it must be there from now on
        time.sleep(chance.uniform(0, 0.25))
        children = children_of(process.pid)
        process.kill()
        for line in [first, *(line.split() for line in process.stdout.read().splitlines())]:
            if len(line) == 2 and len(line[1]) == 64:
                told[line[0]] = line[1]
        process.stdout.close()
        process.wait()
        wait_for(lambda children=children: not any(map(is_alive, children)), 10)
        found = whole(root)
        assert known.items() <= found.items()
        assert set(told.values()) <= set(found.values())
        known = found
    assert len(known) >= fault_rounds // 4 - 1
    let_time_pass(root)
    done = subprocess.run([sys.executable, "-c", BUILD, str(root), "255"], capture_output=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert leftovers(root) == []


def test_B051_a_compile_child_killed_at_random(fault_rounds: int, chance: random.Random) -> None:
    """One death is tried again and never shows; what follows it finds a compiler."""
    with Compiler(processes=1, timeout_s=30) as compiler:
        expected = {heads: compiler.compile(render(KernelSpec(num_heads=heads)), ARCH).digest for heads in range(1, 4)}
        deaths = 0
        for number in range(fault_rounds // 2):
            heads = 1 + number % 3
            future = compiler.submit(render(KernelSpec(num_heads=heads)), ARCH)
            time.sleep(chance.uniform(0, 0.08))
            for pid in compiler.state().pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    deaths += 1
            assert future.result(30).digest == expected[heads]
        assert deaths >= fault_rounds // 4
        assert compiler.compile(render(KernelSpec(num_heads=2)), ARCH).digest == expected[2]
        state = compiler.state()
        assert (state.queued, len(state.pids)) == (0, 1)
        assert set(children_of(os.getpid())) >= set(state.pids)
        assert state.crashes <= deaths
        with contextlib.suppress(CompileCrashed):
            compiler.close()


def test_B051_a_server_killed_at_random(tmp_path: Path, fault_rounds: int, chance: random.Random) -> None:
    """Kernels and a warm-up are in the air each time; the next server answers for all that was told."""
    root, told = tmp_path / "cache", {}
    jobs: list[str] = []
    for number in range(max(2, fault_rounds // 4)):
        with running_server(tmp_path) as server, ThreadPoolExecutor(6) as threads:
            with httpx.Client(base_url=server.url, timeout=20) as http:
                for path, digest in told.items():
                    assert proved(http.get(path).json()) == digest
                    assert hashlib.sha256(http.get(f"/v1/artifacts/{digest}").content).hexdigest() == digest
                states = {job["id"]: job["state"] for job in http.get("/v1/warmups").json()["warmups"]}
                assert all(states[job] in ("interrupted", "done") for job in jobs), states
                paths = [kernel(1 + 5 * number + each) for each in range(5)]
                calls = [threads.submit(put, server.url, path) for path in paths]
                heads = [{"spec": {"num_heads": 100 + 10 * (number % 15) + each}} for each in range(10)]
                job = http.post("/v1/warmups", json={"arch": "sm_100a", "kernels": heads})
                assert job.status_code in (200, 202)
                jobs.append(job.json()["id"])
            time.sleep(chance.uniform(0, 0.5))
            children = server.children()
            server.process.kill()
            server.process.wait()
            for path, call in zip(paths, calls, strict=True):
                if (answer := call.result(30)) is not None:
                    told[path] = proved(answer)
            wait_for(lambda children=children: not any(map(is_alive, children)), 10)
        assert set(told.values()) <= set(whole(root).values())
    let_time_pass(root)
    with running_server(tmp_path) as server:
        assert put(server.url, kernel(256)) is not None
        for path, digest in told.items():
            assert proved(put(server.url, path) or {}) == digest
        counters = httpx.get(server.url + "/readyz").json()
        assert counters["store"]["damaged"] == 0
        assert server.stop() == 0
    assert leftovers(root) == []


def kernel(heads: int) -> str:
    return f"/v1/kernels/sm_100a/{KernelSpec(num_heads=heads).variant_id}?inline=true"


def put(url: str, path: str) -> dict[str, Any] | None:
    """The reply to a PUT; None where the server went away meanwhile."""
    try:
        reply = httpx.put(url + path, timeout=30)
    except httpx.TransportError:
        return None
    assert reply.status_code in (200, 201), reply.text
    document: dict[str, Any] = reply.json()
    return document


def proved(document: dict[str, Any]) -> str:
    digest: str = document["manifest"]["cubin_sha256"]
    assert hashlib.sha256(base64.b64decode(document["cubin_base64"])).hexdigest() == digest
    return digest
