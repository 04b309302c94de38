"""What a full store costs: start to ready, the first listing, pages of `/v1/variants`, and the process's memory.

``python benchmarks/bench_listing.py --entries 10000`` writes so many entries (without real machine code: a listing
reads manifests only), starts ``mlaprep serve`` over them on a free port, and asks it over one connection. It prints
one line a figure, and what machine it was.
"""

import argparse
import hashlib
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlaprep.kernels_cache.artifact import Manifest, utc_now
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import cache_key, request_key
from mlaprep.service.toolchain import compile_options, installed_nvrtc_version
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec

PAGES = (
    "limit=100",
    "limit=100&state=built",
    "limit=100&num_heads=12",
    "limit=100&layout=fp8&arch=sm_100a&state=built",
    "limit=100&model=kimi-k3&tp=8",
    "limit=100&sort=size",
    "limit=100&sort=registers&state=built",
    "limit=100&sort=hits",
)
ARCH = Arch("sm_100a")


def fill(root: Path, entries: int) -> None:
    """Entries that differ in a stride, each under the key that this release looks for."""
    version = installed_nvrtc_version()
    if version is None:
        sys.exit("no NVRTC wheel is installed, so no entry would be given out")
    options, store = compile_options(ARCH), DiskStore(root)
    for number in range(entries):
        spec = KernelSpec(num_heads=1 + number % 100, out_token_stride=65536 + 16 * number)
        source = render(spec)
        key = cache_key(source=source.text, options=options, arch=ARCH.name, nvrtc_version=version)
        cubin = b"\x7fELF" + key.encode() * (1 + number % 7)
        manifest = Manifest(
            variant_id=spec.variant_id,
            spec=spec.to_dict(),
            arch=ARCH.name,
            key=key,
            cubin_sha256=hashlib.sha256(cubin).hexdigest(),
            cubin_size=len(cubin),
            source_sha256=source.sha256,
            entry=source.entry,
            launch=source.launch,
            registers=20 + number % 40,
            spill_stores=0,
            spill_loads=0,
            stack_bytes=0,
            shared_bytes=0,
            nvrtc_version=version,
            options=options,
            compile_ms=40.0,
            created_at=utc_now(),
        )
        entry = root / ARCH.name / key[:2] / key
        entry.mkdir(parents=True, mode=0o700)
        files = {"kernel.cubin": cubin, "manifest.json": manifest.to_json().encode(), "kernel.cu": b""}
        for name, content in files.items():
            (entry / name).write_bytes(content)
            (entry / name).chmod(0o600)
        store.link(request_key(arch=ARCH.name, spec=spec.to_dict(), generator=templates_fingerprint()), key)


def ask(connection: http.client.HTTPConnection, path: str) -> tuple[float, int, Any]:
    """Milliseconds, status and document of one call."""
    began = time.perf_counter()
    connection.request("GET", path)
    reply = connection.getresponse()
    content = reply.read()
    return (time.perf_counter() - began) * 1000, reply.status, json.loads(content)


def wait_ready(folder: Path, began: float) -> tuple[http.client.HTTPConnection, float]:
    """A connection, and the seconds until /readyz said 200."""
    port_file = folder / "port"
    while not port_file.exists():
        time.sleep(0.005)
    connection = http.client.HTTPConnection("127.0.0.1", int(port_file.read_text()), timeout=600)
    while ask(connection, "/readyz")[1] != 200:
        time.sleep(0.01)
    return connection, time.perf_counter() - began


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path, rounds: int) -> None:
    """Start the service over a filled cache, and print what it took."""
    command = [sys.executable, "-m", "mlaprep.clients.cli", "serve", "--port", "0", "--port-file", str(folder / "port")]
    began = time.perf_counter()
    server = subprocess.Popen([*command, "--cache-dir", str(folder / "cache")], stdout=subprocess.DEVNULL)
    try:
        connection, ready = wait_ready(folder, began)
        print(f"start to ready           {ready:8.2f} s     RSS {rss_mib(server.pid):6.0f} MiB")
        took, _, first = ask(connection, "/v1/variants?limit=100")
        indexed = time.perf_counter() - began
        print(f"start to first listing   {indexed:8.2f} s     waited {took / 1000:.2f} s, {first['total']:,} variants")
        for query in PAGES:
            cold, _, document = ask(connection, f"/v1/variants?{query}")
            cursor = document["next_cursor"]
            warm = [ask(connection, f"/v1/variants?{query}")[0] for _ in range(rounds)]
            deep = [ask(connection, f"/v1/variants?{query}&cursor={cursor}")[0] for _ in range(rounds if cursor else 0)]
            behind = f", next page {statistics.median(deep):6.1f}" if deep else ""
            print(f"{query:48} {statistics.median(warm):6.1f} ms{behind}, first {cold:6.1f} ({document['total']:,})")
        print(f"afterwards                              RSS {rss_mib(server.pid):6.0f} MiB")
    finally:
        server.terminate()
        server.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="mlaprep-listing-") as name:
        folder = Path(name)
        (folder / "cache").mkdir(mode=0o700)
        began = time.perf_counter()
        fill(folder / "cache", arguments.entries)
        print(f"wrote {arguments.entries:,} entries in {time.perf_counter() - began:.1f} s")
        measure(folder, arguments.rounds)


if __name__ == "__main__":
    main()
