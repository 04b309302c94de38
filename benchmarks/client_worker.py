"""One fresh worker process for bench_client: imports, makes itself ready, and prints what that took as JSON.

    python client_worker.py CACHE VARIANT ARCH DEVICE [URL]

DEVICE is an ordinal, or ``-`` for a machine without a GPU, where the kernel is brought and not loaded.
"""

import importlib
import sys
import time

began = time.perf_counter()
clients = importlib.import_module("mlaprep.clients")
imported = time.perf_counter()
for name in ("KernelClient", "KernelHandle", "ReadinessReport", "prepare"):
    getattr(clients, name)
client_imported = time.perf_counter()

import json  # noqa: E402
from typing import Any  # noqa: E402

from mlaprep.clients import KernelClient  # noqa: E402
from mlaprep.kernels_cache.disk import DiskStore  # noqa: E402
from mlaprep.kernels_cache.location import default_cache_dir  # noqa: E402
from mlaprep.templates.spec import KernelSpec, parse_variant_id  # noqa: E402

LOOK_UPS = 20_000
NEXT = KernelSpec(num_heads=16)


def main(cache: str, variant_id: str, arch: str, device: str, url: str | None = None) -> dict[str, Any]:
    spec, place = parse_variant_id(variant_id), {"arch": arch}
    if device == "-":
        import http.client  # noqa: F401  # torch, which a worker has imported, loads it
    else:
        import torch

        torch.zeros(1, device=torch.device("cuda", int(device)))  # a worker has its context before its kernels
        place = {"devices": int(device)}
    store = DiskStore(default_cache_dir({"MLAPREP_CACHE_DIR": cache}))
    start = time.perf_counter()
    with KernelClient(url, store=store, offline=url is None, on_miss="error") as client:
        made_ms = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        report = client.ensure_ready(spec, strict=True, **place)
        ready = time.perf_counter()
        again = client.ensure_ready(spec, strict=True, **place)
        end = time.perf_counter()
        stats = client.stats()
        found = {
            "tier": report.kernels[0].tier,
            "again_tier": again.kernels[0].tier,
            "import_ms": (imported - began) * 1e3,
            "import_client_ms": (client_imported - began) * 1e3,
            "client_ms": made_ms,
            "ready_ms": (ready - start) * 1e3,
            "load_ms": stats.loads.total_ms if stats.loads.count else None,
            "again_us": (end - ready) * 1e6,
            "digest": client.artifact(spec, arch).digest,
        }
        found["next_ms"] = None
        if url is None:  # a second kernel of the process, from the same store
            start = time.perf_counter()
            client.ensure_ready(NEXT, strict=True, **place)
            found["next_ms"] = (time.perf_counter() - start) * 1e3
        found["look_up_us"] = None if device == "-" else per_call_us(client, spec, int(device))
        return found


def per_call_us(client: KernelClient, spec: Any, device: int) -> float:
    look_up, turns = client.serving_handle, range(LOOK_UPS)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in turns:
            look_up(spec, device)
        best = min(best, time.perf_counter() - start)
    return best / LOOK_UPS * 1e6


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
