"""Mixed traffic on one server: no error, and memory that does not grow. Seconds in CI, ten minutes by ``make soak``."""

import random
import threading
import time
from pathlib import Path

import httpx
import pytest
from service_kit import Server, running_server

from mlaprep.templates.spec import KernelSpec

MB_AN_HOUR = 60.0
"""Bound of the slope, after the first third, where a run is long enough to tell it from noise."""
LONG_S = 120.0


def test_mixed_traffic_leaves_memory_flat(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds: float = request.config.getoption("--soak-seconds")
    failures: list[str] = []
    answers: dict[int, int] = {}
    with running_server(tmp_path, MLAPREP_CACHE_MAX_BYTES=str(4 * 2**20)) as server:
        stop = threading.Event()
        lock = threading.Lock()

        def traffic(number: int) -> None:
            chance = random.Random(number)
            with httpx.Client(base_url=server.url, timeout=30) as http:
                while not stop.is_set():
                    method, path, due = draw(chance)
                    try:
                        status = http.request(method, path).status_code
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
        assert not failures, failures[:5]
        assert server.stop() == 0
    slope = slope_of(samples[len(samples) // 3 :]) * 3600
    first, last = samples[len(samples) // 3][1], samples[-1][1]
    print(f"{sum(answers.values())} answers {answers}; RSS {first:.1f} MB after a third, {last:.1f} MB at the end, "
          f"highest {max(rss for _, rss in samples):.1f} MB, {slope:+.1f} MB an hour over {seconds:.0f} s")  # fmt: skip
    if seconds >= LONG_S:
        # The first minutes of a run fill caches that are bounded; a leak goes on.
        assert slope * seconds / 3600 < 2 + MB_AN_HOUR * seconds / 3600
    assert max(rss for _, rss in samples) < 150


def draw(chance: random.Random) -> tuple[str, str, tuple[int, ...]]:
    """One request, and what may come of it; kernels come and go, since the cache holds a hundred."""
    variant = KernelSpec(num_heads=chance.randint(1, 200)).variant_id
    kernel = f"/v1/kernels/sm_100a/{variant}"
    few = f"/v1/kernels/sm_100a/{KernelSpec(num_heads=chance.randint(1, 8)).variant_id}"
    return chance.choice(
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
            ("HEAD", "/healthz", (200,)),
            ("GET", "/v1/misses", (200,)),
        )
    )


def watched(server: Server, seconds: float) -> list[tuple[float, float]]:
    """(seconds, resident MB) of the server's own process, twice a second."""
    samples = []
    began = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        samples.append((at, int(status.partition("VmRSS:")[2].split()[0]) / 1024))
        time.sleep(0.5)
    return samples


def slope_of(samples: list[tuple[float, float]]) -> float:
    """Least squares, in MB a second."""
    count = len(samples)
    at, rss = sum(x for x, _ in samples) / count, sum(y for _, y in samples) / count
    spread = sum((x - at) ** 2 for x, _ in samples) or 1.0
    return sum((x - at) * (y - rss) for x, y in samples) / spread
