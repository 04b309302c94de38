"""The whole way once: specs of two real models, compiled without a GPU, served, fetched and checked.

Runs the service on a free port over a cache directory of its own, and leaves nothing behind. `make demo`.
"""

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from mlaprep.clients import KernelClient
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.presets import preset
from mlaprep.templates.spec import KernelSpec

MODELS = ("kimi-k3", "deepseek-v3")
TP_DEGREES = (1, 4, 8)
START_TIMEOUT_S = 30.0

# Piped output has no width of its own; the table needs this much.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True)
class Job:
    model: str
    tp: int
    spec: KernelSpec
    arch: Arch


def main() -> int:
    began = time.perf_counter()
    jobs = [
        Job(model, tp, preset(model).spec(tp), arch) for model in MODELS for tp in TP_DEGREES for arch in DEFAULT_ARCHS
    ]
    with tempfile.TemporaryDirectory(prefix="mlaprep-demo-") as folder, service(Path(folder)) as url:
        heading(f"A service at {url}, with an empty cache")
        manifests = build(url, jobs)
        show(jobs, manifests)
        artifact = fetch_cold(url, jobs[-1])
        show_source(artifact)
        launch_if_possible(url)
    heading(f"Done in {time.perf_counter() - began:.1f} s")
    say_what_next()
    return 0


def heading(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """The service on a free port of the loopback interface, ended when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "service.log"
    environ = os.environ | {"MLAPREP_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "mlaprep.clients.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    answer = "no answer"
    while process.poll() is None and time.monotonic() < deadline:
        try:
            reply = httpx.get(f"{url}/readyz", timeout=2)
            if reply.status_code == 200:
                return
            answer = reply.text
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    sys.exit(f"the service did not get ready ({answer}); its log ends:\n{log.read_text(errors='replace')[-4000:]}")


def build(url: str, jobs: list[Job]) -> list[dict[str, Any]]:
    """Get-or-compile every job over HTTP; the manifests, in the order of the jobs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    manifests: list[dict[str, Any]] = [{}] * len(jobs)
    with (
        httpx.Client(base_url=url, timeout=60) as http,
        Progress(*columns, console=console) as progress,
        ThreadPoolExecutor(os.cpu_count() or 2) as pool,
    ):
        bar = progress.add_task(f"Compiling {len(jobs)} kernels, no GPU involved", total=len(jobs))

        def put(index: int) -> int:
            job = jobs[index]
            reply = http.put(f"/v1/kernels/{job.arch}/{job.spec.variant_id}")
            if reply.is_error:
                sys.exit(f"{job.spec.variant_id} for {job.arch}: {reply.status_code} {reply.text}")
            manifests[index] = reply.json()["manifest"]
            return index

        for _ in as_completed([pool.submit(put, index) for index in range(len(jobs))]):
            progress.advance(bar)
    return manifests


def show(jobs: list[Job], manifests: list[dict[str, Any]]) -> None:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("model", "tp", "arch", "variant"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "registers", "spills", "compile ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for job, manifest in zip(jobs, manifests, strict=True):
        table.add_row(
            job.model if (job.tp, job.arch) == (TP_DEGREES[0], DEFAULT_ARCHS[0]) else "",
            str(job.tp) if job.arch == DEFAULT_ARCHS[0] else "",
            str(job.arch),
            job.spec.variant_id,
            f"{manifest['cubin_size']:,}",
            str(manifest["registers"]),
            str(manifest["spill_stores"] + manifest["spill_loads"]),
            f"{manifest['compile_ms']:.0f}",
        )
    console.print(table)


def fetch_cold(url: str, job: Job) -> KernelArtifact:
    """What a worker with an empty cache and no compiler does: one round trip, everything verified."""
    heading("A cold worker fetches one")
    with KernelClient(url, store=MemoryStore(), on_miss="error") as client:
        began = time.perf_counter()
        obtained = client.obtain(job.spec, job.arch)
        took_ms = 1e3 * (time.perf_counter() - began)
    artifact = obtained.artifact
    digest = hashlib.sha256(artifact.cubin).hexdigest()
    if digest != artifact.manifest.cubin_sha256:
        sys.exit(f"the cubin's sha256 is {digest}, its manifest says {artifact.manifest.cubin_sha256}")
    console.print(f"{job.spec.variant_id} for {job.arch}")
    console.print(f"{len(artifact.cubin):,} bytes from the {obtained.tier} in {took_ms:.1f} ms")
    console.print(f"sha256 {digest}, as its manifest says")
    return artifact


def show_source(artifact: KernelArtifact, lines: int = 24) -> None:
    heading("The head of what was compiled")
    text = "\n".join(artifact.source.splitlines()[:lines])
    console.print(Syntax(text, "cuda", background_color="default"))
    console.print("…")


def launch_if_possible(url: str) -> None:
    """On a machine with a GPU and torch: one launch, compared with the unfused chain byte for byte."""
    heading("On this machine's GPU")
    try:
        import torch
    except ImportError:
        console.print("torch is not installed here: the kernel is not launched.")
        return
    if not torch.cuda.is_available():
        console.print("torch sees no CUDA device here: the kernel is not launched.")
        return
    from mlaprep.clients.reference import prepare_chain

    tokens, spec = 16, preset(MODELS[0]).spec(TP_DEGREES[-1])
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    query = random(tokens, spec.num_heads, spec.kv_lora_rank), random(tokens, spec.num_heads, spec.rope_dim)
    key = random(tokens, spec.kv_lora_rank), random(tokens, spec.rope_dim)
    loc = torch.randperm(1024, device="cuda")[:tokens]
    pools = [torch.zeros(1024, spec.row_width, dtype=torch.uint8, device="cuda") for _ in range(2)]
    with KernelClient(url, store=MemoryStore(), on_miss="error") as client:
        fused = client.load(spec)(*query, *key, pools[0], loc)
    chain = prepare_chain(*query, *key, pools[1], loc)
    assert fused is not None
    assert chain is not None
    same = torch.equal(fused.view(torch.uint8), chain.view(torch.uint8)) and torch.equal(*pools)
    console.print(f"{torch.cuda.get_device_name()}: one launch, {tokens} tokens, {spec.variant_id}")
    if not same:
        sys.exit("its bytes differ from the unfused chain's")
    console.print("query and cache rows equal the unfused chain's, byte for byte")


def say_what_next() -> None:
    console.print("Try next:")
    for command, what in (
        ("make serve", "keep a service running on 127.0.0.1:8400; /docs lists its calls"),
        (".venv/bin/mlaprep compile --preset kimi-k3 --tp 8 --arch sm_100a", "build into the cache on this machine"),
        (".venv/bin/mlaprep render --preset kimi-k3 --tp 8", "read the CUDA source of a variant"),
        (".venv/bin/mlaprep doctor", "see what this machine has and lacks"),
        ("make test", "compare the generated source with the unfused chain, byte for byte"),
    ):
        console.print(f"  [bold]{command}[/bold]\n      {what}")


if __name__ == "__main__":
    sys.exit(main())
