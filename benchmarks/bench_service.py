"""The service under load, beside a bare ASGI application with the same bytes and nginx. Prints one JSON record.

    python benchmarks/bench_service.py [--quick] [--parts artifacts,listing,...] [--out FILE]

Contenders take turns in short rounds, and what is judged is the median of the ratios of each round, since a shared
machine is slower at one moment than at the next. Every reply that is counted as an answer has the right bytes: they are
compared before and after the rounds, and in the herd each one. Needs wrk and nginx for ``artifacts``; no GPU. The exit
status is 1 where bytes differed or a request failed; a goal that is missed is printed and fails nothing.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from filled_store import ARCHS, fill
from machine import describe_host, now
from service_goals import judge, lines, paired, percentile, spread
from serving import SERVE, Served, bare, environ_of, free_port, herd, nginx, running, sampling, service, wrk

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_100a")
PARTS = ("artifacts", "parsers", "start", "listing", "warmup", "herd")
RESULTS = Path(__file__).resolve().parent / "results"
# Without the parts in C that the service takes along, for the record of what they are worth.
PLAIN = "import sys; sys.modules['httptools'] = sys.modules['uvloop'] = None; " + SERVE
NVRTC_ALONE = """
import json, sys, time
from cupy.cuda import nvrtc
sources, options = json.load(sys.stdin)
def compile(source):
    program = nvrtc.createProgram(source, "mla_prepare.cu", (), ())
    nvrtc.compileProgram(program, options)
    cubin = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
compile(sources[0])
print("warm", flush=True)
sys.stdin.close()
began = time.perf_counter()
for source in sources: compile(source)
print(len(sources) / (time.perf_counter() - began), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small stores: whether it runs, no figures")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them: " + ",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=9, help="rounds of wrk, each with every contender")
    parser.add_argument("--seconds", type=float, default=2, help="of wrk, a contender and round")
    parser.add_argument("--connections", type=int, default=32, help="of wrk")
    parser.add_argument("--variants", type=int, default=100_000, help="entries that are listed")
    parser.add_argument("--entries", type=int, default=10_000, help="entries in the cache of a start")
    parser.add_argument("--kernels", type=int, default=120, help="kernels of a warm-up")
    parser.add_argument("--herd", type=int, default=2000, help="workers that start cold at once")
    parser.add_argument("--herd-kernels", type=int, default=40, help="kernels that they want, one each")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/service-<cores>core-<date>.json")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.variants, options.entries = 1, 1, 2000, 500
        options.kernels, options.herd, options.herd_kernels = 6, 40, 3
    record = measure(options, options.parts.split(","))
    text = json.dumps(record, indent=2)
    print(text)
    print(lines(record["goals"]), file=sys.stderr)
    out = options.out or RESULTS / f"service-{record['machine']['cores']}core-{record['date'][:10]}.json"
    if options.out or not options.quick:
        out.write_text(text + "\n")
    return 0 if record["verified"] else 1


def measure(options: argparse.Namespace, parts: list[str]) -> dict[str, Any]:
    began, date = time.perf_counter(), now()
    figures: dict[str, Any] = {}
    made = {"artifacts": artifacts, "parsers": parsers, "start": start, "listing": listing, "warmup": warmup,
            "herd": cold_herd}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mlaprep-bench-") as folder, Compiler(processes=1) as compiler:
        compiled = {arch: compiler.compile(render(KernelSpec(num_heads=12)), arch) for arch in ARCHS}
        compiler.close()
        for part in parts:
            place = Path(folder) / part
            place.mkdir()
            print(f"{part} …", file=sys.stderr)
            figures[part] = made[part](options, place, compiled)
    problems = [problem for found in figures.values() for problem in found.pop("problems", [])]
    goals = judge(figures, len(os.sched_getaffinity(0)))
    return {
        "benchmark": "service",
        "schema": 1,
        "date": date,
        "wall_s": round(time.perf_counter() - began),
        "quick": options.quick,
        "complete": not options.quick and set(PARTS) <= set(parts),
        "machine": describe_host() | {"load_at_end": round(os.getloadavg()[0], 2)},
        "versions": versions(compiled[ARCH].manifest.nvrtc_version),
        "figures": figures,
        "goals": goals,
        "problems": problems,
        "verified": not problems,
    }


def artifacts(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """A cubin by its digest: the service, a bare application under the same uvicorn, nginx."""
    artifact = compiled[ARCH]
    fill(folder / "cache", 1, {ARCH: artifact})
    body = folder / "kernel.cubin"
    body.write_bytes(artifact.cubin)
    with contextlib.ExitStack() as stack:
        servers = {
            "service": (stack.enter_context(service(folder / "cache")), f"/v1/artifacts/{artifact.digest}"),
            "bare": (stack.enter_context(bare(body)), "/"),
            "nginx": (stack.enter_context(nginx(body, folder)), f"/{body.name}"),
        }
        found = in_turns(servers, options, hashlib.sha256(artifact.cubin).hexdigest())
        found["service_rss_mb"] = servers["service"][0].rss_mb()
        return found | {"bytes": len(artifact.cubin), "connections": options.connections}


def parsers(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """What httptools and uvloop are worth: the service with them and without."""
    artifact = compiled[ARCH]
    fill(folder / "cache", 1, {ARCH: artifact})
    path, port = f"/v1/artifacts/{artifact.digest}", free_port()
    plain = running([sys.executable, "-c", PLAIN], port, "/readyz", environ_of(port, folder / "cache"))
    with service(folder / "cache") as fast, plain as slow:
        servers = {"with": (fast, path), "without": (slow, path)}
        return in_turns(servers, options, hashlib.sha256(artifact.cubin).hexdigest(), rounds=3)


def in_turns(servers: dict[str, Any], options: argparse.Namespace, digest: str, rounds: int = 99) -> dict[str, Any]:
    """Rounds in which each server is driven once, the first of them another each time."""
    problems = []

    def compare(when: str) -> None:
        for name, (server, path) in servers.items():
            status, body = server.ask("GET", path)
            if (status, hashlib.sha256(body).hexdigest()) != (200, digest):
                problems.append(f"{name}: {status} or other bytes {when}")

    compare("before")
    names = list(servers)
    found: list[dict[str, Any]] = []
    for number in range(min(rounds, options.rounds)):
        turn = number % len(names)
        results = {}
        for name in [*names[turn:], *names[:turn]]:
            server, path = servers[name]
            results[name] = wrk(server.port, path, options.seconds, options.connections)
            if results[name]["errors"]:
                problems.append(f"{name}: {results[name]['errors']} requests failed in round {number}")
        found.append(results)
    compare("after")
    measures = ("rps", "p50_ms", "p99_ms")
    summary = {name: {key: spread([r[name][key] for r in found]) for key in measures} for name in names}
    ratios = {
        f"{names[0]}/{other}": {key: paired(found, names[0], other, key) for key in measures} for other in names[1:]
    }
    return {"rounds": len(found), "servers": summary, "ratios": ratios, "problems": problems}


def start(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """From the start of the process to its first 200 of /readyz over a full cache; memory then and after a listing."""
    fill(folder / "cache", options.entries, compiled)
    ready, rss, listed = [], [], []
    for _ in range(1 if options.quick else 5):
        with service(folder / "cache", MLAPREP_CACHE_MAX_BYTES=str(2**40)) as server:
            ready.append(server.ready_s)
            rss.append(server.rss_mb())
            server.ask("GET", "/v1/variants?state=built")
            listed.append(server.rss_mb())
    return {
        "entries": options.entries,
        "ready_s": spread(ready),
        "rss_mb": spread(rss),
        "rss_listed_mb": spread(listed),
    }


def listing(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """The first page of all variants."""
    began = time.perf_counter()
    fill(folder / "cache", options.variants, compiled)
    filled = time.perf_counter() - began
    problems, taken = [], []
    with service(folder / "cache", MLAPREP_CACHE_MAX_BYTES=str(2**40)) as server:
        began = time.perf_counter()
        server.ask("GET", "/v1/variants")
        first = time.perf_counter() - began
        for _ in range(50):
            time.sleep(0.1)
            began = time.perf_counter()
            status, body = server.ask("GET", "/v1/variants")
            taken.append((time.perf_counter() - began) * 1e3)
            if status != 200 or json.loads(body)["total"] < options.variants // len(ARCHS):
                problems.append(f"a listing with status {status}, or not of everything")
        rss = server.rss_mb()
    page = {"p50_ms": percentile(taken, 50), "p99_ms": percentile(taken, 99), "most_ms": round(max(taken), 2)}
    return {"entries": options.variants, "filled_s": round(filled, 1), "first_s": round(first, 2), "page": page,
            "rss_mb": rss, "problems": problems}  # fmt: skip


def warmup(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """A warm-up job beside NVRTC alone, on one core and on all; /healthz meanwhile."""
    cores = len(os.sched_getaffinity(0))
    rounds, health, problems = [], [], []
    for number in range(1 if options.quick else 3):
        heads = range(1, options.kernels + 1)
        plan = {
            "arch": "sm_100a",
            "kernels": [{"spec": {"num_heads": h, "kv_lora_rank": 512 - 16 * number}} for h in heads],
        }
        sources = [render(KernelSpec(num_heads=h, kv_lora_rank=512 - 16 * number)).text for h in heads]
        one = nvrtc_rate(sources[: max(2, options.kernels // 3)], compiled[ARCH], 1)
        every = nvrtc_rate(sources[: max(2, options.kernels // 3)], compiled[ARCH], cores)
        with service(folder / f"cache{number}", MLAPREP_MAX_BODY_BYTES=str(2**20)) as server:
            # A compile process is slower with its first kernels, here as in NVRTC alone.
            for h in range(cores * 2):
                server.ask("PUT", f"/v1/kernels/sm_100a/{KernelSpec(num_heads=200 + h).variant_id}")
            with sampling(server.port, "/healthz", 0.005) as samples:
                job, took = run_job(server, plan)
        if job.get("state") != "done" or job["built"] != options.kernels:
            problems.append(f"a warm-up ended {job.get('state')} with {job.get('built')} built")
        rate = options.kernels / took
        health += samples
        rounds.append({"one_core": one, "all_cores": every, "service": rate})
    return {
        "kernels": options.kernels,
        "cores": cores,
        "kernels_a_second": {name: spread([r[name] for r in rounds]) for name in ("one_core", "all_cores", "service")},
        "service/one_core": paired([{k: {"v": v} for k, v in r.items()} for r in rounds], "service", "one_core", "v"),
        "service/all_cores": paired([{k: {"v": v} for k, v in r.items()} for r in rounds], "service", "all_cores", "v"),
        "healthz": {
            "samples": len(health),
            "p50_ms": percentile(health, 50),
            "p99_ms": percentile(health, 99),
            "most_ms": round(max(health), 2),
        },
        "problems": problems,
    }


def run_job(server: Served, plan: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """A warm-up job when it is finished, and the seconds that took."""
    began = time.perf_counter()
    status, body = server.ask("POST", "/v1/warmups", json.dumps(plan).encode())
    job: dict[str, Any] = json.loads(body)
    while status in (200, 202) and job["state"] in ("queued", "running"):
        time.sleep(0.02)
        job = json.loads(server.ask("GET", f"/v1/warmups/{job['id']}")[1])
    return job, time.perf_counter() - began


def nvrtc_rate(sources: list[str], artifact: KernelArtifact, processes: int) -> float:
    """Kernels a second of NVRTC with nothing around it, in so many processes at once."""
    given = json.dumps([sources, artifact.manifest.options])
    running_now = [
        subprocess.Popen([sys.executable, "-c", NVRTC_ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for process in running_now:
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
    total = 0.0
    for process in running_now:
        assert process.stdout is not None
        total += float(process.stdout.read().split()[-1])
        process.stdout.close()
        process.wait()
    return total


def cold_herd(options: argparse.Namespace, folder: Path, compiled: dict[Arch, KernelArtifact]) -> dict[str, Any]:
    """Workers that start at once on an empty cache, each after one whole kernel in one request; then once more."""
    paths = [
        f"/v1/kernels/sm_100a/{KernelSpec(num_heads=1 + n).variant_id}?inline=true" for n in range(options.herd_kernels)
    ]
    requests = [("PUT", paths[number % len(paths)]) for number in range(options.herd)]
    found: dict[str, Any] = {"workers": options.herd, "kernels": options.herd_kernels}
    problems: list[str] = []
    with service(folder / "cache", MLAPREP_MAX_CONNECTIONS=str(max(64, options.herd + 100))) as server:
        for name in ("cold", "built"):
            calls, took = herd(server.port, requests)
            good = [call for call in calls if call.status in (200, 201)]
            digests = {proved(call.body, problems) for call in good}
            seconds = [call.seconds for call in good] or [0.0]
            counters = json.loads(server.ask("GET", "/readyz")[1])["counters"]
            found[name] = {
                "wall_s": round(took, 2), "answers_a_second": round(len(good) / took, 1),
                "p50_s": percentile(seconds, 50), "p99_s": percentile(seconds, 99), "most_s": round(max(seconds), 3),
                "errors": len(calls) - len(good), "compiles": counters["compiles"], "different_cubins": len(digests),
            }  # fmt: skip
            if len(good) < len(calls) or counters["compiles"] != len(paths) or len(digests) != len(paths):
                problems.append(f"the {name} herd: {found[name]}")
        found["rss_mb"] = server.rss_mb()
    return found | {"problems": problems}


def proved(body: bytes, problems: list[str]) -> str:
    document = json.loads(body)
    digest: str = document["manifest"]["cubin_sha256"]
    if hashlib.sha256(base64.b64decode(document["cubin_base64"])).hexdigest() != digest:
        problems.append("a kernel whose bytes are not those of its digest")
    return digest


def versions(nvrtc: str) -> dict[str, Any]:
    def first_line(*command: str) -> str | None:
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = re.search(r"\d+\.\d+[\w.+-]*", done.stdout + done.stderr)
            return found[0] if found else None
        return None

    names = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop")
    packages: dict[str, Any] = {"python": platform.python_version(), "nvrtc": nvrtc}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages | {"wrk": first_line("wrk", "--version"), "nginx": first_line("nginx", "-v")}


if __name__ == "__main__":
    sys.exit(main())
