"""A worker's rank in a process of its own: ``python -m rank VARIANT ARCH [DEVICE]``.

Prints a line when everything is imported, reads one, makes itself ready, on a device where one is given, and prints
what that took as a JSON object.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from mlaprep.clients import KernelClient


def main(variant_id: str, arch: str, *device: str) -> None:
    place: dict[str, Any] = {"arch": arch}
    if device:
        import torch  # a worker has it

        torch.zeros(1, device=torch.device("cuda", int(device[0])))  # and its context, before its kernels
        place = {"devices": int(device[0])}
    with KernelClient() as client:
        print("imported", flush=True)
        sys.stdin.readline()
        cpu, began = time.process_time(), time.perf_counter()
        report = client.ensure_ready(variant_id, strict=True, **place)
        ready_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        stats = client.stats()
        found = {
            "ready_s": ready_s,
            "cpu_s": cpu_s,
            "tier": report.kernels[0].tier,
            "compiled": stats.compiled,
            "fetched": stats.service,
            "digest": client.artifact(variant_id, arch).digest,
        }
        print(json.dumps(found), flush=True)


@contextmanager
def started(
    arguments: Sequence[str], environments: Sequence[dict[str, str]]
) -> Iterator[list["subprocess.Popen[str]"]]:
    """One rank for each environment, imported and waiting."""
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    command = [sys.executable, "-m", "rank", *arguments]
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths} | environment,
        )
        for environment in environments
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "imported\n"
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()


def run(arguments: Sequence[str], environments: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """What each of several ranks found that set off together."""
    with started(arguments, environments) as ranks, ThreadPoolExecutor(len(ranks)) as pool:
        return [json.loads(text) for text, _ in pool.map(lambda rank: rank.communicate("go\n", timeout=120), ranks)]


if __name__ == "__main__":
    main(*sys.argv[1:])
