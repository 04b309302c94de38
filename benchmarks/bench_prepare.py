"""The prepare kernel on this machine's GPU, beside what it replaces: speed and, of every time shown, the bytes.

    python benchmarks/bench_prepare.py                 the whole table, and one JSON record of the run
    python benchmarks/bench_prepare.py --quick         a few cells
    python benchmarks/bench_prepare.py --compile-only --cubins DIR --arch sm_90a
                                                       no GPU: fill DIR for a machine without a compiler

``benchmarks/README.md`` says what is measured and how.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_host
import goals
import report
import torch
from cells import DeviceLost, head, measure, measure_eager
from contenders import Contenders
from kernels import obtain, spec_of
from machine import describe_machine, describe_versions, gpu_slug, machine_line, now
from peer_flashinfer import Flashinfer
from peer_sglang import Sglang
from timing import copy_bandwidth, resident_copy_bandwidth
from workload import CACHE_ROWS, POSITIONS, RANK, ROPE_DIM, Cell, cache_pools

from mlaprep.clients.launch import cuda_driver
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import templates_fingerprint
from mlaprep.templates.spec import KernelSpec

LAYERS = 24
HEADS, QUICK_HEADS = (8, 12, 16, 96, 128), (12, 128)
ROPE_HEADS, QUICK_ROPE_HEADS = (16, 128), (16,)
TOKENS, QUICK_TOKENS = (1, 4, 16, 64, 256, 1024), (1, 16, 256)
EAGER_HEADS, EAGER_TOKENS = (16, 128), (1, 16, 256)
ROUNDS, QUICK_ROUNDS = 9, 5
COMPILE_LIMIT_S = 75.0
HOST_HEADS = 16
PARTS = ("plain", "rope", "eager", "host")

METHOD = (
    f"CUDA-graph replay of a chain of {LAYERS} layers, device events around the replays, which are enqueued behind a "
    "device-side sleep; contenders timed in turns; median of the rounds. cold: each layer has buffers of its own, so "
    "inputs come from memory where the working set exceeds the L2. hot: all layers share one set. eager: wall-clock "
    "time a call, calls enqueued back to back, no graph. Before timing, every result and cache is poisoned, the graph "
    "replayed once, and every query and whole cache compared with the reference chain. bytes: inputs read once, "
    "outputs written once."
)


def main() -> int:
    args = _arguments()
    if args.compile_only:
        return _compile_only(args)
    if not torch.cuda.is_available():
        print("bench_prepare needs an NVIDIA GPU and a CUDA build of torch; neither is here", file=sys.stderr)
        return 2
    capability = cuda_driver().capability(torch.cuda.current_device())
    arch = Arch.for_device(capability)
    if arch is None:
        print(f"no kernel is built for compute capability {capability[0]}.{capability[1]}", file=sys.stderr)
        return 2

    started = time.monotonic()
    machine, versions, date = describe_machine(), describe_versions(_kernel_nvrtc(args, arch)), now()
    sglang, flashinfer = Sglang(args.sglang, capability), Flashinfer(args.flashinfer, capability)
    bandwidth, resident = copy_bandwidth(), _resident()
    torch.cuda.empty_cache()
    contenders = Contenders(arch, sglang, flashinfer, args.cubins, args.compile_limit)
    record: dict[str, Any] = {
        "benchmark": "prepare",
        "schema": 2,
        "complete": False,
        "date": date,
        "machine": machine,
        "versions": versions
        | {"sglang": sglang.facts(), "flashinfer": flashinfer.facts(), "templates": templates_fingerprint()},
        "method": {
            "text": METHOD,
            "layers": LAYERS,
            "rounds": args.rounds,
            "seed": args.seed,
            "operands": f"bf16 to fp8, R {RANK}, D {ROPE_DIM}, int64 slots, {CACHE_ROWS} cache rows; with rope "
            f"interleaved, int64 positions, a table of {POSITIONS} rows",
        },
        "copy_gb_per_s": {"median": round(bandwidth.median, 1), "samples": [round(v, 1) for v in bandwidth.values]},
        "resident_copy_gb_per_s": resident,
        "contenders": {
            "plain": {contender.name: contender.title for contender in contenders.plain()},
            "rope": {contender.name: contender.title for contender in contenders.rope()},
        },
        "cells": [],
        "eager": [],
    }
    out = args.out or _default_out(machine["gpu"], date)
    print(machine_line(machine, versions, date))
    for peer in ("sglang", "flashinfer"):
        print(f"{peer} {record['versions'][peer]}")
    print(f"device copy {bandwidth.median:.0f} GB/s, resident in the L2 {resident}", flush=True)

    if "host" in args.parts:  # first, while no compiler's helpers share the host
        try:
            record["host"] = bench_host.measure(arch, sglang, args.cubins, HOST_HEADS)
        except Exception as error:
            record["host"] = report.failure(error)
    stopped = _run(record, contenders, args, started, out)
    record["summary"] = report.summarise(record["cells"])
    record["goals"] = goals.evaluate(record)
    record["complete"] = stopped is None
    record["stopped"] = stopped
    record["wall_s"] = round(time.monotonic() - started, 1)
    report.write(record, out)
    return _conclude(record, machine_line(machine, versions, date), out)


def _conclude(record: dict[str, Any], machine: str, out: Path) -> int:
    """Print everything, the goals last; the exit status."""
    print(report.table(record["cells"], record["copy_gb_per_s"]["median"]))
    if record["eager"]:
        print("\n" + report.eager_table(record["eager"]))
    for reason in report.failures([*record["cells"], *record["eager"]]):
        print(f"failed: {reason}")
    if "us" in record.get("host", {}):
        print("\n" + bench_host.lines(record["host"]))
    print("\n" + report.summary_lines(record["summary"]))
    print(f"\n{machine}\nwrote {out.name} after {record['wall_s']} s\n\n{goals.lines(record['goals'])}")
    wrong = report.wrong_of_ours([*record["cells"], *record["eager"]])
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    if record["stopped"] is not None:
        print(f"stopped early: {record['stopped']}", file=sys.stderr)
    return 1 if wrong or record["stopped"] is not None or not record["cells"] else 0


def _run(
    record: dict[str, Any], contenders: Contenders, args: argparse.Namespace, started: float, out: Path
) -> str | None:
    """Fill ``cells`` and ``eager`` of the record; returns why it stopped before the last one, or None."""
    pools = cache_pools(LAYERS)
    for part, cell in _cells(args):
        if args.time_limit and time.monotonic() - started > args.time_limit:
            return f"the time limit of {args.time_limit} s"
        columns = contenders.rope() if cell.rope else contenders.plain()
        if args.contenders:
            columns = [contender for contender in columns if contender.name in args.contenders]
        try:
            if part == "eager":
                record["eager"].append(measure_eager(cell, columns, rounds=args.rounds, seed=args.seed))
            else:
                record["cells"] += measure(cell, columns, pools, rounds=args.rounds, seed=args.seed)
        except DeviceLost as error:
            return report.failure(error)["error"]
        except Exception as error:
            mode = "eager" if part == "eager" else "cold"
            broken = head(cell, mode, 0) | report.failure(error) | {"results": {}, "ratios": {}}
            record["eager" if part == "eager" else "cells"].append(broken)
        report.write(record, out)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{part:<6}H {cell.heads:>3} T {cell.tokens:>4}  {time.monotonic() - started:6.1f} s", flush=True)
    return None


def _cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """(part, cell) in the order of the run: what the goals need comes first."""
    for part, heads in (("plain", args.heads), ("rope", args.rope_heads)):
        if part in args.parts:
            yield from ((part, Cell(h, tokens, part == "rope")) for tokens in args.tokens for h in heads)
    if "eager" in args.parts:
        for rope in (False, True):
            yield from (("eager", Cell(h, tokens, rope)) for h in EAGER_HEADS for tokens in EAGER_TOKENS)


def _resident() -> float | None:
    try:
        return round(resident_copy_bandwidth().median, 1)
    except Exception:
        return None


def _kernel_nvrtc(args: argparse.Namespace, arch: Arch) -> str | None:
    """The compiler of our kernels; where there is none to be had, the cells will say why."""
    try:
        return obtain(spec_of(args.heads[0], pdl=True, fixed=True), arch, args.cubins).manifest.nvrtc_version
    except Exception:
        return None


def _specs(args: argparse.Namespace) -> Iterator[KernelSpec]:
    """Every kernel that a run with these arguments calls."""
    forms = ((True, True), (True, False), (False, True))
    for heads in sorted({*args.heads, *EAGER_HEADS, HOST_HEADS}):
        yield from (spec_of(heads, pdl=pdl, fixed=fixed) for pdl, fixed in forms)
    for heads in sorted({*args.rope_heads, *EAGER_HEADS}):
        yield from (spec_of(heads, pdl=pdl, fixed=fixed, rope=True) for pdl, fixed in forms)


def _compile_only(args: argparse.Namespace) -> int:
    if args.cubins is None or args.arch is None:
        print("--compile-only needs --cubins DIR and --arch, such as sm_90a", file=sys.stderr)
        return 2
    for spec in _specs(args):
        manifest = obtain(spec, Arch(args.arch), args.cubins).manifest
        size = f"{manifest.cubin_size:>6} bytes  {manifest.registers:>3} registers"
        print(f"{manifest.arch}  {size}  {manifest.variant_id}")
    return 0


def _default_out(gpu: str, date: str) -> Path:
    return Path(__file__).resolve().parent / "results" / f"prepare-{gpu_slug(gpu)}-{date[:10]}.json"


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not numbers or min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise ValueError(text)
    return parts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the prepare kernel beside what it replaces.")
    parser.add_argument("--heads", type=_numbers, help=f"comma-separated, default {','.join(map(str, HEADS))}")
    parser.add_argument("--rope-heads", type=_numbers, help="the same for the table with rope, default 16,128")
    parser.add_argument("--tokens", type=_numbers, help=f"comma-separated, default {','.join(map(str, TOKENS))}")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"comma-separated, default {','.join(PARTS)}")
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), help="comma-separated names, as the record has them; all"
    )
    parser.add_argument("--quick", action="store_true", help="a few cells")
    parser.add_argument("--rounds", type=int, help=f"timings of each cell, default {ROUNDS}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no cell after this many seconds")
    parser.add_argument(
        "--compile-limit", type=float, metavar="S", default=COMPILE_LIMIT_S,
        help="seconds to spend in torch.compile, default %(default)s; cells beyond go without",
    )  # fmt: skip
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked SGLang wheel (default: .peers)")
    parser.add_argument("--flashinfer", type=Path, metavar="DIR", help="an unpacked FlashInfer wheel (default: .peers)")
    parser.add_argument("--out", type=Path, help="the JSON record (default: benchmarks/results/prepare-GPU-DATE.json)")
    parser.add_argument("--compile-only", action="store_true", help="fill --cubins for --arch and stop; needs no GPU")
    parser.add_argument("--arch", help="with --compile-only")
    args = parser.parse_args()
    args.heads = args.heads or (QUICK_HEADS if args.quick else HEADS)
    args.rope_heads = args.rope_heads or (QUICK_ROPE_HEADS if args.quick else ROPE_HEADS)
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.rounds = max(1, args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS))
    return args


if __name__ == "__main__":
    sys.exit(main())
