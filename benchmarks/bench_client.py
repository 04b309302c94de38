"""What a worker waits for before it serves: import, a kernel from service, disk and memory, eight ranks; and what an
eager call costs. Prints one JSON record.

    python benchmarks/bench_client.py [--runs 21] [--ranks 8] [--stand-in] [--cubins DIR] [--sglang DIR] [--out FILE]

Every figure of readiness is of fresh processes that have imported what a worker imports, torch and its context
included where there is a GPU: medians with the smallest and the largest beside them. Each run's kernel is compared
with the one that was built. The service is the real one on loopback, or, where that is not installed, a
stand-in of the standard library that speaks its two routes; the record says which. What needs a GPU is left out by
name where there is none. Needs ``PYTHONPATH=tests/namespace:tests`` where the project is not installed.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import rank  # noqa: E402
from bench_build import served, spread  # noqa: E402
from machine import describe_host, describe_machine, describe_versions, now  # noqa: E402

from mlaprep.clients.client import KernelClient  # noqa: E402
from mlaprep.clients.launch import cuda_driver  # noqa: E402
from mlaprep.kernels_cache.artifact import KernelArtifact  # noqa: E402
from mlaprep.kernels_cache.disk import DiskStore  # noqa: E402
from mlaprep.kernels_cache.key import request_key  # noqa: E402
from mlaprep.kernels_cache.store import MemoryStore  # noqa: E402
from mlaprep.templates.arch import Arch  # noqa: E402
from mlaprep.templates.render import templates_fingerprint  # noqa: E402
from mlaprep.templates.spec import KernelSpec  # noqa: E402

SPEC, NEXT = KernelSpec(num_heads=12), KernelSpec(num_heads=16)
GOALS = {
    "import_ms": 60.0, "cold_ms": 20.0, "disk_ms": 3.0, "look_up_us": 1.0, "ranks_over_one": 1.5, "ours/sglang": 0.4,
}  # fmt: skip
_SERVICE = ("fastapi", "uvicorn", "pydantic_settings")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="fresh processes a figure")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that start together")
    parser.add_argument("--rank-runs", type=int, default=5, help="times that they do")
    parser.add_argument("--stand-in", action="store_true", help="do not use the real service where it is installed")
    parser.add_argument("--no-eager", action="store_true", help="leave out the eager call")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked SGLang wheel (default: .peers)")
    parser.add_argument("--out", type=Path, help="write the record here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlaprep-bench-") as folder:
        # Bytecode as an installation has it, whatever the environment says of writing it.
        os.environ |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        for name in [name for name in os.environ if name.startswith("MLAPREP_")]:
            del os.environ[name]
        record = measure(options, Path(folder))
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if record["verified"] else 1


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    arch, devices = find_devices()
    device = "0" if devices else "-"
    artifact, following = (obtain(spec, arch, options.cubins, folder) for spec in (SPEC, NEXT))
    skipped = {}
    if not devices:
        skipped = dict.fromkeys(("load_ms", "look_up_us", "eager"), "needs a GPU; kernels are brought, not loaded")
    bench = Bench(folder, artifact, following, device)
    real = not options.stand_in and all(importlib.util.find_spec(name) for name in _SERVICE)
    with served_by(real, folder / "served", artifact) as url:
        bench.worker(bench.empty(), url)  # what it writes of bytecode, and a service's first answer, are no figures
        with KernelClient(url, store=MemoryStore(), on_miss="error") as client:
            served_digest = client.artifact(SPEC, arch).digest  # of the service's compiler, which may be a newer one
        cold = [bench.worker(bench.empty(), url) for _ in range(options.runs)]
        fetching = ranks_of(options, bench, {"MLAPREP_URL": url}, devices)
    disk = [bench.worker(bench.filled()) for _ in range(options.runs)]
    compiling = ranks_of(options, bench, {"MLAPREP_OFFLINE": "1"}, devices)
    runs = cold + disk
    figures: dict[str, Any] = {
        "import_ms": spread([run["import_ms"] for run in runs]),
        "import_client_ms": spread([run["import_client_ms"] for run in runs]),
        "client_ms": spread([run["client_ms"] for run in runs]),
        "cold_ms": spread([run["ready_ms"] for run in cold]),
        "disk_ms": spread([run["ready_ms"] for run in disk]),
        "disk_next_ms": spread([run["next_ms"] for run in disk]),
        "memory_us": spread([run["again_us"] for run in runs]),
        "ranks_with_service": fetching,
        "ranks_without_service": compiling,
    }
    if devices:
        figures["load_ms"] = spread([run["load_ms"] for run in runs])
        figures["look_up_us"] = spread([run["look_up_us"] for run in runs])
        if options.no_eager:
            skipped["eager"] = "left out by option"
        else:
            figures["eager"] = eager(arch, options)
    fetched = {run["digest"] for run in cold} | set(fetching.pop("digests", []))
    compiled = compiling.pop("digests", [])  # by the compiler of this machine, which need not be that of the others
    checks = {
        "cold from the service": {run["tier"] for run in cold} == {"service"},
        "disk from disk": {run["tier"] for run in disk} == {"disk"},
        "the kernel that the service has": fetched == {served_digest},
        "the kernel that was stored": {run["digest"] for run in disk} == {artifact.digest},
        "compiled alike": len(compiled) <= 1,
    }
    return {
        "benchmark": "client",
        "schema": 1,
        "date": now(),
        "machine": describe_machine() if devices else describe_host(),
        "versions": versions(artifact, devices),
        "service": "uvicorn on loopback" if real else "stand-in of the standard library on loopback",
        "spec": SPEC.variant_id,
        "arch": arch.name,
        "runs": options.runs,
        "figures": figures,
        "goals": GOALS,
        "skipped": skipped,
        "checks": checks,
        "verified": all(checks.values()),
    }


class Bench:
    """Folders, and a fresh worker process for each run."""

    def __init__(self, folder: Path, artifact: KernelArtifact, following: KernelArtifact, device: str) -> None:
        self.artifact, self.device = artifact, device
        self._folder, self._made = folder / "caches", 0
        keep(folder / "filled", artifact)
        keep(folder / "filled", following)
        self._filled = folder / "filled"

    def empty(self) -> Path:
        self._made += 1
        return self._folder / str(self._made)

    def filled(self) -> Path:
        """A copy of a store that holds the kernel, so that no run finds what another left."""
        return Path(shutil.copytree(self._filled, self.empty(), copy_function=shutil.copy2))

    def worker(self, cache: Path, *url: str) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__).with_name("client_worker.py")), str(cache)]
        command += [SPEC.variant_id, self.artifact.manifest.arch, self.device, *url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"a worker failed: {done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def ranks_of(options: argparse.Namespace, bench: Bench, settings: dict[str, str], devices: int) -> dict[str, Any]:
    """One rank alone and all of them, each time on one cold cache; ``over_one`` is the slowest beside one alone."""
    arguments = [SPEC.variant_id, bench.artifact.manifest.arch, *(["0"] if devices else [])]

    def start(count: int) -> list[dict[str, Any]]:
        return rank.run(arguments, [settings | {"MLAPREP_CACHE_DIR": str(bench.empty())}] * count)

    try:
        start(1)
        alone = [start(1)[0] for _ in range(options.rank_runs)]
        together = [start(options.ranks) for _ in range(options.rank_runs)]
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    one = spread([run["ready_s"] * 1e3 for run in alone])
    slowest = spread([max(run["ready_s"] for run in runs) * 1e3 for runs in together])
    return {
        "ranks": options.ranks,
        "one_ms": one,
        "slowest_ms": slowest,
        "over_one": round(slowest["median"] / one["median"], 3),
        "processor_ms_a_rank": spread([run["cpu_s"] * 1e3 for runs in together for run in runs]),
        "compiled_here": [sum(run["compiled"] for run in runs) for runs in together],
        "fetched": [sum(run["fetched"] for run in runs) for runs in together],
        "digests": sorted({run["digest"] for runs in [alone, *together] for run in runs}),
    }


def find_devices() -> tuple[Arch, int]:
    """The architecture to measure for, and how many GPUs there are."""
    try:
        import torch

        arch = Arch.for_device(cuda_driver().capability(0)) if torch.cuda.is_available() else None
        return (Arch("sm_100a"), 0) if arch is None else (arch, torch.cuda.device_count())
    except Exception:
        return Arch("sm_100a"), 0


def obtain(spec: KernelSpec, arch: Arch, cubins: Path | None, folder: Path) -> KernelArtifact:
    if cubins is not None:
        with KernelClient(store=DiskStore(cubins), offline=True, on_miss="error") as client:
            return client.artifact(spec, arch)
    with KernelClient(store=DiskStore(folder / "built"), offline=True) as client:
        return client.artifact(spec, arch)


def keep(root: Path, artifact: KernelArtifact) -> None:
    store, manifest = DiskStore(root), artifact.manifest
    store.publish(artifact)
    request = request_key(arch=manifest.arch, spec=manifest.spec, generator=templates_fingerprint())
    store.link(request, artifact.key)


@contextmanager
def served_by(real: bool, folder: Path, artifact: KernelArtifact) -> Iterator[str]:
    """The URL of a service that has the kernel."""
    keep(folder, artifact)
    if real:
        with served(folder) as port:
            yield f"http://127.0.0.1:{port}"
        return
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    process = subprocess.Popen(
        [sys.executable, "-m", "loopback_service", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def eager(arch: Arch, options: argparse.Namespace) -> dict[str, Any]:
    """An eager call's parts beside SGLang's call, as bench_host measures them."""
    from bench_host import measure as measure_host
    from peer_sglang import Sglang

    return measure_host(arch, Sglang(options.sglang, arch.capability), options.cubins)


def versions(artifact: KernelArtifact, devices: int) -> dict[str, Any]:
    if devices:
        return describe_versions(artifact.manifest.nvrtc_version)
    return {"python": platform.python_version(), "nvrtc": artifact.manifest.nvrtc_version}


if __name__ == "__main__":
    sys.exit(main())
