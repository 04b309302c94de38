"""demo: the whole way in one command: serve, build, list, fetch, verify, and launch where there is a GPU."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from mlaprep.clients.building import Obtained
from mlaprep.clients.cli_kernels import bring
from mlaprep.clients.cli_output import fields_table, kernel_table
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import DriverError, KernelUnavailable, MlaprepError
from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.presets import preset
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    import torch

    from mlaprep.clients.handle import KernelHandle

MODELS: Final = ("kimi-k3", "deepseek-v3")
TP_DEGREES: Final = (1, 4, 8)
SOURCE_LINES: Final = 22

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 15.0
_THREADS: Final = 2
_TOKENS: Final = 64
_WIDEST: Final = 100
_SETTINGS: Final = "MLAPREP_"


class DemoError(MlaprepError):
    """A step that did not come out as it should."""


def main() -> None:
    """Run the demo; the exit code says whether every step came out."""
    sys.exit(run())


def run() -> int:
    """Run the demo on stdout and return its exit code."""
    console = _console()
    folder = Path(tempfile.mkdtemp(prefix="mlaprep-demo-"))
    began = time.monotonic()
    try:
        with _service(console, folder) as url:
            outcomes = _build(console, url)
            target = next(o for o in outcomes if o[0].num_heads == 12 and o[1].name == "sm_100a")
            _cold_worker(console, url, folder / "worker", *target)
            _launch(console, url, folder / "worker", target[0])
    except MlaprepError as error:
        console.print(Text(f"\nThe demo stopped: {error}", style="bold red"))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _next(console, time.monotonic() - began)
    return 0


def _console() -> Console:
    console = Console(highlight=False)
    if console.width > _WIDEST:
        console.width = _WIDEST
    return console


def _step(console: Console, title: str) -> None:
    console.print()
    console.print(Text.assemble(("▌ ", "cyan"), (title, "bold")))


def _say(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 2)))


@contextlib.contextmanager
def _service(console: Console, folder: Path) -> Iterator[str]:
    """A server of its own: a free loopback port, a private cache, stopped by its pid at the end."""
    _step(console, "Start the kernel service")
    port_file, log_file = folder / "port", folder / "server.log"
    command = [sys.executable, "-m", "mlaprep.clients.cli", "serve", "--port", "0"]
    command += ["--port-file", str(port_file), "--cache-dir", str(folder / "cache")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    began = time.monotonic()
    with open(log_file, "wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        url = f"http://127.0.0.1:{_await_port(server, port_file, log_file)}"
        console.print(
            f"  {url}, pid {server.pid}, up in {time.monotonic() - began:.1f} s, with an empty cache of its own"
        )
        yield url
    finally:
        _stop(server)
        _step(console, "Stop the service")
        code = server.returncode
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        console.print(f"  pid {server.pid} {how}, {'still there' if _exists(server.pid) else 'and is gone'}")


def _await_port(server: "subprocess.Popen[bytes]", port_file: Path, log_file: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            return int(port_file.read_text())
        time.sleep(0.02)
    tail = "\n".join(log_file.read_text("utf-8", "replace").splitlines()[-12:])
    raise DemoError(f"asked the service to start, found it did not. Its last words:\n{tail}")


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _build(console: Console, url: str) -> list[tuple[KernelSpec, Arch, Obtained]]:
    """Have the service build every kernel, two at a time, and list them."""
    specs = list(dict.fromkeys(preset(model).spec(tp) for model in MODELS for tp in TP_DEGREES))
    count = len(specs) * len(DEFAULT_ARCHS)
    degrees = ", ".join(map(str, TP_DEGREES))
    _step(console, f"Build {count} kernels: {' and '.join(MODELS)}, TP {degrees}, {len(DEFAULT_ARCHS)} architectures")
    transport = RestTransport(url, timeout=60.0)

    def ask(spec: KernelSpec, arch: Arch) -> Obtained:
        reply = transport.fetch_reply(spec, arch)
        return Obtained(reply.artifact, "service", reply.cached)

    began = time.monotonic()
    outcomes = bring(specs, DEFAULT_ARCHS, ask, "  compiling", quiet=False, threads=_THREADS, console=console)
    elapsed = time.monotonic() - began
    transport.close()
    for outcome in outcomes:
        if outcome.error is not None:
            raise DemoError(
                f"asked for {outcome.spec.variant_id} on {outcome.arch}: {outcome.error}"
            ) from outcome.error
    built = [(outcome.spec, outcome.arch, outcome.obtained) for outcome in outcomes if outcome.obtained is not None]
    manifests = [obtained.artifact.manifest for _, _, obtained in built]
    console.print(kernel_table(manifests, width=console.width))
    compile_ms = sorted(manifest.compile_ms for manifest in manifests)
    spills = sum(manifest.spill_stores + manifest.spill_loads for manifest in manifests)
    digests = len({manifest.cubin_sha256 for manifest in manifests})
    _say(
        console,
        f"{count} kernels in {elapsed:.1f} s, {compile_ms[count // 2]:.0f} ms each (median), by NVRTC "
        f"{manifests[0].nvrtc_version}: {spills} bytes spilled, {digests} distinct digests. "
        "No GPU and no nvcc took part.",
    )
    return built


def _cold_worker(console: Console, url: str, cache: Path, spec: KernelSpec, arch: Arch, built: Obtained) -> None:
    """Fetch one kernel with nothing cached, check it, and find it again without a network."""
    _step(console, f"Fetch one as a cold worker: {arch}")
    with KernelClient(url, store=DiskStore(cache), on_miss="error", offline=False) as worker:
        began = time.perf_counter()
        artifact = worker.artifact(spec, arch)
        fetch_ms = (time.perf_counter() - began) * 1e3
    found = hashlib.sha256(artifact.cubin).hexdigest()
    if not found == artifact.digest == built.artifact.digest:
        raise DemoError("asked for a kernel twice, found two digests")
    with KernelClient(store=DiskStore(cache), on_miss="error", offline=True) as again:
        began = time.perf_counter()
        again.artifact(spec, arch)
        disk_ms = (time.perf_counter() - began) * 1e3
    check = Text("✓ ", style="bold green")
    rows: list[tuple[str, object]] = [
        ("  variant", spec.variant_id),
        ("  fetched", f"{len(artifact.cubin):,} bytes in {fetch_ms:.0f} ms, one round trip"),
        ("  manifest", artifact.digest),
        ("  received", check + found),
        ("  checked", check + "spec, architecture, key, digests, ELF machine and architecture"),
        ("  again", check + f"from its own disk, offline, in {disk_ms:.1f} ms"),
    ]
    console.print(fields_table(rows))
    lines = artifact.source.splitlines()
    _step(console, f"Its source, the first {SOURCE_LINES} of {len(lines)} lines")
    width = console.width - 4
    shown = "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines[:SOURCE_LINES])
    console.print(Syntax(shown, "cuda", background_color="default", padding=(0, 2)))


def _launch(console: Console, url: str, cache: Path, spec: KernelSpec) -> None:
    """Launch the kernel against the unfused chain where there is a GPU; say so where there is none."""
    _step(console, "Launch it against the unfused chain")
    reason = _why_no_launch()
    if reason is not None:
        _say(console, f"Not run: {reason}. The kernels above are built and verified all the same.")
        return
    import torch

    with KernelClient(url, store=DiskStore(cache), on_miss="error", offline=False) as worker:
        try:
            handle = worker.load(spec)
        except (KernelUnavailable, DriverError) as error:
            _say(console, f"Not run: {error}")
            return
    device = torch.device("cuda", torch.cuda.current_device())
    query_bytes, cache_bytes = compare_with_chain(handle, device)
    told = (
        f"{torch.cuda.get_device_name(device)}: {query_bytes:,} query bytes and {cache_bytes:,} cache bytes "
        f"equal the chain's, {_TOKENS} tokens in one launch"
    )
    console.print(Padding(Text("✓ ", style="bold green") + told, (0, 0, 0, 2)))


def compare_with_chain(handle: "KernelHandle", device: "torch.device") -> tuple[int, int]:
    """Launch a kernel and run the unfused chain on the same random inputs; the bytes of query and cache compared.

    Raises:
        DemoError: a byte differs.
    """
    import torch

    from mlaprep.clients.reference import prepare_chain

    spec = handle.spec
    heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.rope_dim
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * 40

    inputs = random(_TOKENS, heads, rank), random(_TOKENS, heads, rope), random(_TOKENS, rank), random(_TOKENS, rope)
    loc = torch.randperm(4 * _TOKENS, generator=generator, device=device)[:_TOKENS]
    fused_cache = torch.zeros(4 * _TOKENS, rank + rope, dtype=torch.uint8, device=device)
    chain_cache = torch.zeros_like(fused_cache)
    fused = handle(*inputs, fused_cache, loc)
    chain = prepare_chain(*inputs, chain_cache, loc)
    assert fused is not None
    assert chain is not None
    same = torch.equal(fused.view(torch.uint8), chain.view(torch.uint8)) and torch.equal(fused_cache, chain_cache)
    if not same:
        raise DemoError(f"launched {spec.variant_id}: its bytes differ from the chain's")
    return fused.numel(), fused_cache.numel()


def _why_no_launch() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU here that torch can use"
    return None


def _next(console: Console, seconds: float) -> None:
    mlaprep = _command()
    commands = (
        (f"{mlaprep} serve", "a service that stays; its /docs lists the calls"),
        (f"{mlaprep} compile --preset glm-5 --tp 8", "another model, into your own cache"),
        (f"{mlaprep} ls", "what is in it"),
        (f"{mlaprep} render --preset kimi-k3 --tp 8", "the whole CUDA source"),
        (f"{mlaprep} doctor", "what this machine has and lacks"),
    )
    lines = Text("\n").join(Text.assemble((command, "bold"), "\n    ", (what, "dim")) for command, what in commands)
    console.print()
    console.print(Panel(lines, title=f"All done in {seconds:.1f} s. Try next", title_align="left", border_style="cyan"))


def _command() -> str:
    """How to call the command line from here."""
    if shutil.which("mlaprep"):
        return "mlaprep"
    script = Path(sys.executable).with_name("mlaprep")
    if not script.exists():
        return "python -m mlaprep.clients.cli"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


if __name__ == "__main__":
    main()
