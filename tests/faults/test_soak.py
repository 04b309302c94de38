"""Mixed traffic on one server: no error, and memory that does not grow. Seconds in CI, ten minutes by ``make soak``."""

import json
import os
import platform
import random
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_kit import Server, children_of, running_server

from mlaprep.templates.spec import KernelSpec

MB_AN_HOUR = 60.0
"""Bound of the slope, after the first third, where a run is long enough to tell it from noise."""
LONG_S = 120.0


@dataclass(frozen=True)
class Sample:
    """The server at one moment: seconds since the start, resident MB, open descriptors, and its compile processes."""

    at: float
    rss: float
    descriptors: int
    threads: int
    children: int
    children_rss: float


def test_mixed_traffic_leaves_memory_flat(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds: float = request.config.getoption("--soak-seconds")
    out: str = request.config.getoption("--soak-out")
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    failures: list[str] = []
    answers: dict[int, int] = {}
    with running_server(tmp_path, MLAPREP_CACHE_MAX_BYTES=str(4 * 2**20)) as server:
        stop = threading.Event()
        lock = threading.Lock()

        def traffic(number: int) -> None:
            chance = random.Random(number)
            with httpx.Client(base_url=server.url, timeout=30) as http:
                while not stop.is_set():
                    method, path, due, body = draw(chance)
                    try:
                        status = http.request(method, path, json=body).status_code
                    except httpx.TransportError as error:
                        failures.append(f"{method} {path}: {error}")
                        continue
                    with lock:
                        answers[status] = answers.get(status, 0) + 1
                    if status not in due:
                        failures.append(f"{method} {path}: {status}")

        threads = [threading.Thread(target=traffic, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        samples = watched(server, seconds)
        stop.set()
        for thread in threads:
            thread.join()
        told = httpx.get(server.url + "/readyz").json()
        code = server.stop()
    found = figures(samples, seconds) | {"answers": {str(status): answers[status] for status in sorted(answers)}}
    print(json.dumps(found))
    if out:
        nvrtc = told["compiler"]["nvrtc_version"]
        Path(out).write_text(json.dumps(record(began, found, samples, failures, nvrtc), indent=1) + "\n")
    assert not failures, failures[:5]
    assert code == 0
    assert told["warnings"] == []
    if seconds >= LONG_S:
        # The first minutes of a run fill caches that are bounded; a leak goes on.
        assert found["mb_an_hour"] * seconds / 3600 < 2 + MB_AN_HOUR * seconds / 3600
        assert found["descriptors"]["end"] < found["descriptors"]["middle"] + 20
        assert found["threads"]["end"] < found["threads"]["middle"] + 8
    assert found["rss_mb"]["highest"] < 150


def draw(chance: random.Random) -> tuple[str, str, tuple[int, ...], Any]:
    """One request, what may come of it, and its body; kernels come and go, since the cache holds a hundred."""
    variant = KernelSpec(num_heads=chance.randint(1, 200)).variant_id
    kernel = f"/v1/kernels/sm_100a/{variant}"
    few = f"/v1/kernels/sm_100a/{KernelSpec(num_heads=chance.randint(1, 8)).variant_id}"
    plan = {"arch": "sm_100a", "kernels": [{"variant_id": variant}]}
    report = {"misses": [{"variant_id": variant, "arch": "sm_90a"}]}
    method, path, due, *body = chance.choice(
        (
            *[("PUT", f"{few}?inline=true", (200, 201))] * 6,
            ("PUT", kernel, (200, 201)),
            ("GET", kernel, (200, 404)),
            ("GET", f"{few}/source", (200, 404)),
            ("GET", f"/v1/artifacts/{chance.randbytes(32).hex()}", (404,)),
            ("GET", "/v1/variants?state=built&limit=50", (200,)),
            ("GET", "/v1/kernels/sm_1/x", (422,)),
            ("GET", f"/v1/nothing/{chance.random()}", (404,)),
            ("GET", "/readyz", (200,)),
            ("GET", "/metrics", (200,)),
            ("HEAD", "/healthz", (200,)),
            ("GET", "/v1/misses", (200,)),
            ("POST", "/v1/misses", (200,), report),
            ("POST", "/v1/warmups", (200, 202, 429), plan),
            ("GET", "/v1/warmups", (200,)),
            ("GET", "/", (200,)),
        )
    )
    return method, path, due, body[0] if body else None


def watched(server: Server, seconds: float) -> list[Sample]:
    """The server's own process and its compile processes, twice a second."""
    samples = []
    began = time.monotonic()
    pid = server.process.pid
    while (at := time.monotonic() - began) < seconds:
        children = [rss for child in children_of(pid) if (rss := resident(child)) is not None]
        descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        samples.append(Sample(at, resident(pid) or 0.0, descriptors, threads, len(children), sum(children)))
        time.sleep(0.5)
    return samples


def resident(pid: int) -> float | None:
    """MB; None for a process that is gone, or that waits to be reaped."""
    try:
        _, found, rest = Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(rest.split()[0]) / 1024 if found else None


def figures(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """What a run comes to: each measure at its start, after a third, in the middle and at its end, and the slope."""
    moments = {"start": 0, "third": len(samples) // 3, "middle": len(samples) // 2, "end": -1}

    def measure(name: str) -> dict[str, float]:
        found = {moment: getattr(samples[place], name) for moment, place in moments.items()}
        return found | {"highest": max(getattr(sample, name) for sample in samples)}

    names = {"rss_mb": "rss", "descriptors": "descriptors", "threads": "threads", "children_rss_mb": "children_rss"}
    slope = slope_of([(sample.at, sample.rss) for sample in samples[len(samples) // 3 :]]) * 3600
    rounded = {told: {at: round(value, 1) for at, value in measure(name).items()} for told, name in names.items()}
    return {"seconds": round(seconds), **rounded, "mb_an_hour": round(slope, 2)}


def record(
    date: str, found: dict[str, Any], samples: list[Sample], failures: list[str], nvrtc: str | None
) -> dict[str, Any]:
    """A run as ``benchmarks/results`` keeps it, with a sample of every ten seconds."""
    _, _, processor = Path("/proc/cpuinfo").read_text().partition("model name")
    return {
        "benchmark": "soak",
        "schema": 1,
        "date": date,
        "complete": found["seconds"] >= LONG_S,
        "machine": {"cpu": processor.splitlines()[0].lstrip("\t :"), "cores": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version(), "nvrtc": nvrtc},
        "figures": found,
        "samples": [
            {"at_s": round(s.at), "rss_mb": round(s.rss, 1), "descriptors": s.descriptors} for s in samples[::20]
        ],
        "problems": failures[:20],
        "verified": not failures,
    }


def slope_of(samples: list[tuple[float, float]]) -> float:
    """Least squares, in MB a second."""
    count = len(samples)
    at, rss = sum(x for x, _ in samples) / count, sum(y for _, y in samples) / count
    spread = sum((x - at) ** 2 for x, _ in samples) or 1.0
    return sum((x - at) * (y - rss) for x, y in samples) / spread
