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
from pathlib import Path
from typing import Any

import bench_host
import report
import torch
from contenders import Contender, all_contenders
from kernels import obtain, spec_of
from machine import describe_machine, describe_versions, gpu_slug, machine_line, now
from peers import Sglang
from timing import Chain, copy_bandwidth, time_interleaved
from torch import Tensor
from workload import (
    CACHE_ROWS,
    RANK,
    ROPE_DIM,
    Cell,
    Due,
    Layer,
    cache_pools,
    check,
    make_due,
    make_layers,
    poison,
    reference_holds_on_cpu,
)

from mlaprep.clients.launch import cuda_driver
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import templates_fingerprint

LAYERS = 24
HEADS, QUICK_HEADS = (12, 16, 96, 128), (12, 128)
TOKENS, QUICK_TOKENS = (1, 4, 16, 64, 256, 1024), (1, 16, 256)
ROUNDS, QUICK_ROUNDS = 9, 7
_CPU_CHECK_ROWS = 2**14

METHOD = (
    f"CUDA-graph replay of a chain of {LAYERS} layers, device events around the replays, which are enqueued behind a "
    "device-side sleep; contenders timed in turns; median of the rounds. cold: each layer has buffers of its own, so "
    "inputs come from memory where the working set exceeds the L2. hot: all layers share one set. Before timing, every "
    "result and cache is poisoned, the graph replayed once, and every query and whole cache compared with the "
    "reference chain. bytes: inputs read once, outputs written once."
)


class DeviceLost(RuntimeError):
    """The device answers nothing any more; later cells would only repeat the fault."""


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
    sglang = Sglang(args.sglang, capability)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    contenders = all_contenders(arch, sglang, args.cubins)
    record: dict[str, Any] = {
        "benchmark": "prepare",
        "schema": 1,
        "complete": False,
        "date": date,
        "machine": machine,
        "versions": versions | {"sglang": sglang.facts(), "templates": templates_fingerprint()},
        "method": {
            "text": METHOD,
            "layers": LAYERS,
            "rounds": args.rounds,
            "seed": args.seed,
            "operands": f"bf16 to fp8, R {RANK}, D {ROPE_DIM}, int64 slots, {CACHE_ROWS} cache rows",
        },
        "copy_gb_per_s": {"median": round(bandwidth.median, 1), "samples": [round(v, 1) for v in bandwidth.values]},
        "contenders": {contender.name: contender.title for contender in contenders},
        "cells": [],
    }
    out = args.out or _default_out(machine["gpu"], date)
    print(machine_line(machine, versions, date))
    print(f"SGLang {record['versions']['sglang']}; device copy {bandwidth.median:.0f} GB/s", flush=True)

    status = _run(record, contenders, args, started, out)
    if status is None:
        try:
            record["host"] = bench_host.measure(arch, sglang, args.cubins)
        except Exception as error:
            record["host"] = report.failure(error)
    record["summary"] = report.summarise(record["cells"], bandwidth.median)
    record["complete"] = status is None
    record["stopped"] = status
    record["wall_s"] = round(time.monotonic() - started, 1)
    report.write(record, out)

    print(report.table(record["cells"], bandwidth.median))
    for reason in sorted(_failures(record["cells"])):
        print(f"failed: {reason}")
    if "us" in record.get("host", {}):
        print("\n" + bench_host.lines(record["host"]))
    print("\n" + report.summary_lines(record["summary"]))
    print(f"\n{machine_line(machine, versions, date)}\nwrote {out.name} after {record['wall_s']} s")
    wrong = report.wrong_of_ours(record["cells"])
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    if status is not None:
        print(f"stopped early: {status}", file=sys.stderr)
    return 1 if wrong or status is not None or not record["cells"] else 0


def _run(
    record: dict[str, Any], contenders: list[Contender], args: argparse.Namespace, started: float, out: Path
) -> str | None:
    """Fill ``record["cells"]``; returns why it stopped before the last one, or None."""
    pools = cache_pools(LAYERS)
    for tokens in args.tokens:
        for heads in args.heads:
            cell = Cell(heads, tokens)
            if args.time_limit and time.monotonic() - started > args.time_limit:
                return f"the time limit of {args.time_limit} s"
            try:
                record["cells"] += _measure(cell, contenders, pools, args)
            except DeviceLost as error:
                return report.failure(error)["error"]
            except Exception as error:
                record["cells"].append(_head(cell, "cold", 0) | report.failure(error) | {"results": {}, "ratios": {}})
            report.write(record, out)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"H {heads:>3} T {tokens:>4}  {time.monotonic() - started:6.1f} s", flush=True)
    return None


def _measure(cell: Cell, contenders: list[Contender], pools: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    layers = make_layers(cell, pools, args.seed + 4096 * cell.heads + cell.tokens)
    due = make_due(layers)
    on_cpu = reference_holds_on_cpu(layers[0], due[0]) if cell.heads * cell.tokens <= _CPU_CHECK_ROWS else None
    measured = []
    for mode in ("cold", "hot"):
        chain_layers = layers if mode == "cold" else [layers[0]] * len(layers)
        results: dict[str, dict[str, Any]] = {}
        chains: dict[str, Chain] = {}
        for contender in contenders:
            try:
                chain = Chain(contender.body(cell), chain_layers, keep=mode == "cold")
                results[contender.name] = _verify(contender, cell, chain, due)
                chains[contender.name] = chain
            except Exception as error:
                results[contender.name] = report.failure(error)
                _insist_on_device(error)
        try:
            samples = time_interleaved(chains, args.rounds)
        except Exception as error:
            _insist_on_device(error)
            raise
        for name, found in samples.items():
            results[name] |= found.to_dict() | {"replays": chains[name].replays}
        for name in (contender.name for contender in contenders if contender.writes and contender.name in samples):
            results[name]["gb_per_s"] = round(cell.bytes / samples[name].median / 1000, 1)
        sets = len(layers) if mode == "cold" else 1
        measured.append(
            _head(cell, mode, sets)
            | {"reference_equal_on_cpu": on_cpu, "results": results, "ratios": report.ratios(results)}
        )
    return measured


def _verify(contender: Contender, cell: Cell, chain: Chain, due: list[Due]) -> dict[str, Any]:
    """Poison, replay once, compare; and what the captured graph holds."""
    result: dict[str, Any] = {}
    if contender.writes:
        layers: list[Layer] = chain.layers if len(chain.queries) > 1 else chain.layers[:1]
        queries = [query for query in chain.queries if query is not None]
        poison(layers, queries)
        chain.replay()
        torch.cuda.synchronize()
        result["check"] = check(layers, queries, due[: len(layers)]).to_dict()
    if chain.content is not None:
        result["launches_a_layer"] = round(chain.content.nodes / len(chain.layers), 3)
        result["programmatic_edges"] = chain.content.programmatic_edges
    facts = contender.facts(cell)
    return result | ({"kernel": facts} if facts else {})


def _head(cell: Cell, mode: str, sets: int) -> dict[str, Any]:
    return {
        "heads": cell.heads,
        "tokens": cell.tokens,
        "mode": mode,
        "bytes_a_layer": cell.bytes,
        "working_set_bytes": cell.bytes * sets,
    }


def _insist_on_device(cause: Exception) -> None:
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").sum().item()
    except Exception as error:
        raise DeviceLost(f"the device stopped answering after {type(cause).__name__}: {cause}") from error


def _failures(cells: list[dict[str, Any]]) -> set[str]:
    found = {f"the cell: {cell['error']}" for cell in cells if "error" in cell}
    for cell in cells:
        found |= {f"{name}: {result['error']}" for name, result in cell["results"].items() if "error" in result}
    return found


def _kernel_nvrtc(args: argparse.Namespace, arch: Arch) -> str | None:
    """The compiler of our kernels; where there is none to be had, the cells will say why."""
    try:
        return obtain(spec_of(args.heads[0], pdl=True, fixed=False), arch, args.cubins).manifest.nvrtc_version
    except Exception:
        return None


def _compile_only(args: argparse.Namespace) -> int:
    if args.cubins is None or args.arch is None:
        print("--compile-only needs --cubins DIR and --arch, such as sm_90a", file=sys.stderr)
        return 2
    arch = Arch(args.arch)
    for heads in sorted({*args.heads, 16}):  # 16 is the shape of the host's figures
        for pdl, fixed in ((True, False), (True, True), (False, False)):
            manifest = obtain(spec_of(heads, pdl=pdl, fixed=fixed), arch, args.cubins).manifest
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the prepare kernel beside what it replaces.")
    parser.add_argument("--heads", type=_numbers, help="comma-separated, default 12,16,96,128")
    parser.add_argument("--tokens", type=_numbers, help="comma-separated, default 1,4,16,64,256,1024")
    parser.add_argument("--quick", action="store_true", help="a few cells")
    parser.add_argument("--rounds", type=int, help=f"timings of each cell, default {ROUNDS}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no cell after this many seconds")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked SGLang wheel (default: .peers)")
    parser.add_argument("--out", type=Path, help="the JSON record (default: benchmarks/results/prepare-GPU-DATE.json)")
    parser.add_argument("--compile-only", action="store_true", help="fill --cubins for --arch and stop; needs no GPU")
    parser.add_argument("--arch", help="with --compile-only")
    args = parser.parse_args()
    args.heads = args.heads or (QUICK_HEADS if args.quick else HEADS)
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.rounds = max(1, args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS))
    return args


if __name__ == "__main__":
    sys.exit(main())
