"""What a kernel costs to build and to serve, without a GPU. Prints one JSON record.

    python benchmarks/bench_build.py [--variants 40] [--calls 500] [--out FILE]

Milliseconds, medians with the smallest and the largest beside them. Every kernel that was timed is verified, and those
built by one process and by two are compared byte for byte; the exit status is 1 where anything differs.
"""

import argparse
import http.client
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import describe_host, now

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import KernelStore, MemoryStore
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_100a")
GOALS = {"spec_to_cubin_ms": 60.0, "two_processes_speedup": 1.5, "disk_hit_ms": 1.0, "put_built_ms": 3.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=40, help="different kernels to build")
    parser.add_argument("--calls", type=int, default=500, help="look-ups and requests to time")
    parser.add_argument("--out", type=Path, help="write the record here too")
    options = parser.parse_args()
    specs = [KernelSpec(num_heads=1 + heads) for heads in range(options.variants)]
    with tempfile.TemporaryDirectory(prefix="mlaprep-bench-") as folder:
        record = measure(specs, options.calls, Path(folder))
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if record["verified"] else 1


def measure(specs: list[KernelSpec], calls: int, folder: Path) -> dict[str, Any]:
    start_ms, one, one_artifacts, total_one = build_all(specs, processes=1)
    _, _, two_artifacts, total_two = build_all(specs, processes=2)
    same = [a.cubin == b.cubin for a, b in zip(one_artifacts, two_artifacts, strict=True)]
    for artifact in one_artifacts:
        artifact.verify(arch=ARCH.name)
    nvcc = through_nvcc(specs[-1], folder)
    figures: dict[str, Any] = {
        "first_process_start_ms": start_ms,
        "spec_to_cubin_ms": spread(one),
        "of_which_nvrtc_ms": spread([artifact.manifest.compile_ms for artifact in one_artifacts]),
        "two_processes_speedup": round(total_one / total_two, 2),
        "kernels_a_second_two_processes": round(len(specs) / total_two, 1),
        "nvcc_ms": nvcc,
        "nvcc_over_ours": nvcc and round(nvcc / statistics.median(one), 1),
    }
    figures |= look_ups(one_artifacts, calls, folder / "look-ups")
    figures |= over_http(specs[0], calls, folder / "served")
    return {
        "benchmark": "build",
        "date": now(),
        "machine": describe_host(),
        "versions": {"python": platform.python_version(), "nvrtc": one_artifacts[0].manifest.nvrtc_version},
        "arch": ARCH.name,
        "variants": len(specs),
        "figures": figures,
        "goals": GOALS,
        "verified": all(same),
    }


def build_all(specs: list[KernelSpec], processes: int) -> tuple[float, list[float], list[KernelArtifact], float]:
    """Start of the pool, milliseconds a spec one after the other, the kernels, seconds for all at once."""
    with Compiler(processes=processes) as compiler:
        began = time.perf_counter()
        compiler.version()
        start_ms = (time.perf_counter() - began) * 1000
        compiler.start()
        while len(compiler.state().pids) < processes:
            time.sleep(0.01)
        for _ in range(2 * processes):  # the first compile of a process loads what later ones find loaded
            compiler.compile(render(KernelSpec(num_heads=200)), ARCH)
        taken, artifacts = [], []
        render.cache_clear()
        for spec in specs:
            began = time.perf_counter()
            artifacts.append(compiler.compile(render(spec), ARCH))
            taken.append((time.perf_counter() - began) * 1000)
        render.cache_clear()
        began = time.perf_counter()
        futures = [compiler.submit(render(spec), ARCH) for spec in specs]
        for future in futures:
            future.result()
        total = time.perf_counter() - began
    return round(start_ms, 1), taken, artifacts, total


def look_ups(artifacts: list[KernelArtifact], calls: int, folder: Path) -> dict[str, Any]:
    """A built kernel through the builder: from disk and from memory, verified each time."""
    return {
        "disk_hit_ms": hits(artifacts, calls, DiskStore(folder)),
        "memory_hit_ms": hits(artifacts, calls, MemoryStore()),
    }


def hits(artifacts: list[KernelArtifact], calls: int, store: KernelStore) -> dict[str, float]:
    for artifact in artifacts:
        store.publish(artifact)
    specs = [KernelSpec.from_dict(artifact.manifest.spec) for artifact in artifacts]
    with Builder(store) as builder:
        taken = timed(lambda index: builder.get(specs[index % len(specs)], ARCH), calls)
        if builder.stats().hits != calls:
            raise SystemExit(f"{calls - builder.stats().hits} of {calls} look-ups found nothing")
    return spread(taken)


def over_http(spec: KernelSpec, calls: int, folder: Path) -> dict[str, Any]:
    """A built kernel over one loopback connection."""
    path = f"/v1/kernels/{ARCH}/{spec.variant_id}"
    with served(folder) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def ask(method: str, target: str) -> bytes:
            connection.request(method, target)
            reply = connection.getresponse()
            body = reply.read()
            if reply.status not in (200, 201):
                raise SystemExit(f"{method} {target}: {reply.status} {body.decode(errors='replace')}")
            return body

        digest = json.loads(ask("PUT", path))["manifest"]["cubin_sha256"]
        return {
            "put_built_ms": spread(timed(lambda _: ask("PUT", path), calls)),
            "put_built_inline_ms": spread(timed(lambda _: ask("PUT", f"{path}?inline=true"), calls)),
            "get_artifact_ms": spread(timed(lambda _: ask("GET", f"/v1/artifacts/{digest}"), calls)),
        }


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The service on a free port of the loopback interface, ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"MLAPREP_CACHE_DIR": str(folder), "MLAPREP_HOST": "127.0.0.1", "MLAPREP_PORT": str(port)}
    environ.pop("MLAPREP_TOKEN", None)
    command = [sys.executable, "-c", "from mlaprep.service.server import serve; serve()"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the service did not get ready")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def through_nvcc(spec: KernelSpec, folder: Path) -> float | None:
    """The same source through nvcc, milliseconds in the median of three, where there is one that takes it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    source = folder / "kernel.cu"
    source.write_text(render(spec).text)
    command = [nvcc, "-cubin", "-std=c++17", f"-arch={ARCH}", "-o", str(folder / "kernel.cubin"), str(source)]
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken), 1)


def timed(call: Callable[[int], object], calls: int) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for index in range(calls):
        began = time.perf_counter()
        call(index)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def spread(taken: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(taken), 3),
        "least": round(min(taken), 3),
        "most": round(max(taken), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
