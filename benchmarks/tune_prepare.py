"""Measure how many threads a block should have, and write what was found where launches are planned from.

    python benchmarks/tune_prepare.py                  clients/launch_plans.json, and a record of every time
    python benchmarks/tune_prepare.py --compile-only --cubins DIR --arch sm_90a
                                                       no GPU: fill DIR for a machine without a compiler

For each number of rows a token (query heads and the cache row) and of tokens, every block size that gives another
launch is timed as in ``bench_prepare.py``, cold and hot. The size that loses least over all of them is kept; the
documented default stays where nothing beats it by more than noise. A kernel of 8 elements a thread is timed beside
that of 16 in a few cells, to show what the choice of 16 rests on.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
from kernels import argument_values, obtain, spec_of
from machine import describe_machine, describe_versions, gpu_slug, machine_line, now
from timing import Chain, time_interleaved
from torch import Tensor
from verdict import check
from workload import Cell, Due, Layer, cache_pools, make_due, make_layers, poison

from mlaprep.clients.launch import cuda_driver
from mlaprep.clients.plan import MAX_TOKENS, Bucket, LaunchConfig, RowShape, plan_launch
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

LAYERS = 24
HEADS = (8, 12, 16, 32, 64, 96, 128)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROPE_HEADS, ROPE_TOKENS = (16, 64, 128), (1, 4, 16, 64, 256, 1024)
WIDE_HEADS, WIDE_TOKENS = (12, 128), (1, 16, 64, 256, 1024)
"""Where 8 elements a thread are tried as well."""
ROUNDS = 3
MAX_ROWS = 257
NOISE = 0.005
"""What a block size must win over the default before it is preferred."""
PLANS = Path(__file__).resolve().parent.parent / "clients/launch_plans.json"
_DEFAULT = 0
"""Stands for no bucket among the targets of a cell."""


def main() -> int:
    args = _arguments()
    if args.compile_only:
        return _compile_only(args)
    if not torch.cuda.is_available():
        print("tune_prepare needs an NVIDIA GPU and a CUDA build of torch; neither is here", file=sys.stderr)
        return 2
    driver, device = cuda_driver(), torch.cuda.current_device()
    arch = Arch.for_device(driver.capability(device))
    if arch is None:
        print("no kernel is built for this device", file=sys.stderr)
        return 2
    started = time.monotonic()
    machine, versions, date = describe_machine(), describe_versions(None), now()
    record: dict[str, Any] = {
        "benchmark": "tune",
        "schema": 1,
        "complete": False,
        "date": date,
        "machine": machine,
        "versions": versions,
        "method": {"text": __doc__, "layers": LAYERS, "rounds": args.rounds, "seed": args.seed},
        "trials": [],
    }
    out = args.out or Path(__file__).resolve().parent / f"results/tune-{gpu_slug(machine['gpu'])}-{date[:10]}.json"
    pools = cache_pools(LAYERS)
    for cell, elements in _kernels():
        if args.time_limit and time.monotonic() - started > args.time_limit:
            break
        try:
            record["trials"] += _measure(cell, elements, arch, args, pools, machine["multiprocessors"])
        except Exception as error:
            record["trials"].append({"heads": cell.heads, "tokens": cell.tokens} | report.failure(error))
        gc.collect()
        torch.cuda.empty_cache()
    else:
        record["complete"] = True
    record["buckets"] = [
        {"rotates": rotates} | bucket
        for rotates in (False, True)
        for bucket in buckets_of(choices(record["trials"], rotates))
    ]
    record["gain"] = gain(record["trials"])
    record["wall_s"] = round(time.monotonic() - started, 1)
    report.write(record, out)
    print(lines(record))
    if record["complete"]:
        write_plans(args.plans or PLANS, str(arch), machine, date, record["buckets"])
    print(f"\n{machine_line(machine, versions, date)}\nwrote {out.name} after {record['wall_s']} s")
    wrong = [trial for trial in record["trials"] if "error" in trial or trial["verdict"] != "equal"]
    return 1 if wrong or not record["complete"] else 0


def launches(shape: RowShape, tokens: int, multiprocessors: int) -> dict[int, LaunchConfig]:
    """Target to launch, one target for each distinct launch; the default's target is 0."""
    found = {_DEFAULT: plan_launch(shape, tokens, multiprocessors)}
    for target in range(shape.threads_per_row, shape.max_threads_per_block + 1, shape.threads_per_row):
        config = plan_launch(shape, tokens, multiprocessors, [Bucket(MAX_ROWS, MAX_TOKENS, target)])
        if config not in list(found.values())[1:]:
            found[target] = config
    return found


def choices(trials: list[dict[str, Any]], rotates: bool) -> dict[tuple[int, int], int]:
    """(rows a token, tokens) to the target that loses least over modes, for kernels that rotate or for the others;
    0 keeps the default."""
    groups: dict[tuple[int, int], list[dict[str, float]]] = {}
    for trial in trials:
        if "us" not in trial or trial["rope"] is not rotates:
            continue
        if trial["elements"] is None and trial["verdict"] == "equal":
            groups.setdefault((trial["heads"] + 1, trial["tokens"]), []).append(trial["us"])
    chosen = {}
    for key, timings in groups.items():
        targets = set.intersection(*(set(us) for us in timings))
        losses = {
            int(target): report.geometric_mean(us[target] / min(us.values()) for us in timings) for target in targets
        }
        best = min(losses, key=lambda target: (losses[target], target))
        chosen[key] = _DEFAULT if losses[_DEFAULT] <= losses[best] * (1 + NOISE) else best
    return chosen


def buckets_of(chosen: dict[tuple[int, int], int], default: tuple[int, int, int] | None = None) -> list[dict[str, int]]:
    """The choices as buckets, in the order to look in: fewest rows first, then fewest tokens.

    A bucket reaches from the measurement before it up to its own, and the last ones to every T and H. Where the
    default was kept, the bucket names the block size that the default has there.
    """
    small, large, multiprocessors = default or _defaults()
    by_rows: dict[int, list[tuple[int, int]]] = {}
    for (rows, tokens), target in sorted(chosen.items()):
        threads = target or (large if tokens > multiprocessors else small)
        steps = by_rows.setdefault(rows, [])
        if steps and steps[-1][1] == threads:
            steps.pop()
        steps.append((tokens, threads))
    for steps in by_rows.values():
        steps[-1] = MAX_TOKENS, steps[-1][1]
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for rows, steps in by_rows.items():
        if found and found[-1][1] == steps:
            found.pop()
        found.append((rows, steps))
    if found:
        found[-1] = MAX_ROWS, found[-1][1]
    return [
        {"rows_per_token_max": rows, "tokens_max": tokens, "threads_per_block": threads}
        for rows, steps in found
        for tokens, threads in steps
    ]


def gain(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The chosen block size's time over the default's: geometric mean and extremes over cells and modes."""
    chosen = {rotates: choices(trials, rotates) for rotates in (False, True)}
    found, wide = [], []
    for trial in trials:
        if "us" not in trial:
            continue
        us = trial["us"]
        if trial["elements"] is None:
            target = chosen[trial["rope"]].get((trial["heads"] + 1, trial["tokens"]), _DEFAULT)
            found.append(us[str(target)] / us[str(_DEFAULT)])
        else:
            plain = next((other for other in trials if _same_cell(other, trial)), None)
            if plain is not None:
                wide.append(min(us.values()) / min(plain["us"].values()))
    return {
        "chosen/default": {
            "geometric_mean": report.geometric_mean(found),
            "best": round(min(found), 4) if found else None,
            "worst": round(max(found), 4) if found else None,
        },
        "8 elements/16 elements, each at its best": report.geometric_mean(wide),
    }


def write_plans(path: Path, arch: str, machine: dict[str, Any], date: str, buckets: list[dict[str, int]]) -> None:
    """Put an architecture's buckets into the file of plans, and leave the others' there."""
    document: dict[str, Any] = {"schema": 1, "archs": {}}
    if path.exists():
        document = json.loads(path.read_text("utf-8"))
    document["archs"][arch] = {
        "gpu": machine["gpu"],
        "multiprocessors": machine["multiprocessors"],
        "date": date,
        "driver": machine["driver"],
        "buckets": buckets,
    }
    document["archs"] = dict(sorted(document["archs"].items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def lines(record: dict[str, Any]) -> str:
    shown = ["block sizes: µs at the default, at the best, and which that is (0: the default)"]
    for trial in record["trials"]:
        kind = f"{'rope' if trial.get('rope') else ''}{' 8 elements' if trial.get('elements') else ''}"
        line = f"H {trial['heads']:>3} T {trial['tokens']:>4} {trial.get('mode', ''):<5}{kind:<12}"
        if "us" not in trial:
            shown.append(f"{line} failed: {trial['error']}")
            continue
        us = trial["us"]
        best = min(us, key=lambda target: us[target])
        shown.append(f"{line}{us[str(_DEFAULT)]:>9.3f}{us[best]:>9.3f}{best:>6}  {trial['verdict']}")
    shown += [f"{bucket}" for bucket in record["buckets"]] + [f"{record['gain']}"]
    return "\n".join(shown)


def _measure(
    cell: Cell, elements: int | None, arch: Arch, args: argparse.Namespace, pools: Tensor, multiprocessors: int
) -> list[dict[str, Any]]:
    driver, device = cuda_driver(), torch.cuda.current_device()
    artifact = obtain(spec_of(cell.heads, pdl=True, fixed=True, rope=cell.rope, elements=elements), arch, args.cubins)
    manifest = artifact.manifest
    parameters = [(name, kind) for name, kind in manifest.launch["parameters"]]
    launch = driver.prepare(driver.load(artifact.cubin, manifest.entry, device), parameters, True)
    configs = launches(RowShape.from_launch(manifest.launch), cell.tokens, multiprocessors)
    layers = make_layers(cell, pools, args.seed + 4096 * cell.heads + cell.tokens)
    due = make_due(layers[:1])
    arguments = {id(layer): [argument_values(layer)[name] for name, _ in parameters] for layer in layers}

    def body(config: LaunchConfig) -> Any:
        def run(layer: Layer) -> Tensor:
            launch(config, driver.current_stream(device), arguments[id(layer)])
            return layer.out

        return run

    found = []
    for mode in ("cold", "hot"):
        chain_layers = layers if mode == "cold" else [layers[0]] * len(layers)
        chains = {str(target): Chain(body(config), chain_layers, keep=False) for target, config in configs.items()}
        verdicts = {_verdict(chain, layers[:1], due) for chain in chains.values()}
        samples = time_interleaved(chains, args.rounds)
        found.append(
            {
                "heads": cell.heads,
                "tokens": cell.tokens,
                "rope": cell.rope,
                "elements": elements,
                "mode": mode,
                "verdict": verdicts.pop() if len(verdicts) == 1 else "WRONG",
                "us": {target: round(found.median, 4) for target, found in samples.items()},
                "launches": {str(target): [*config.grid, *config.block] for target, config in configs.items()},
            }
        )
    return found


def _verdict(chain: Chain, layers: list[Layer], due: list[Due]) -> str:
    poison(layers, [layers[0].out])
    chain.replay()
    torch.cuda.synchronize()
    return check(layers, [layers[0].out], due).verdict


def _kernels() -> Iterator[tuple[Cell, int | None]]:
    """Cells, and the elements a thread of the kernel there; None is the spec's own default."""
    yield from ((Cell(heads, tokens), None) for heads in HEADS for tokens in TOKENS)
    yield from ((Cell(heads, tokens, True), None) for heads in ROPE_HEADS for tokens in ROPE_TOKENS)
    yield from ((Cell(heads, tokens), 8) for heads in WIDE_HEADS for tokens in WIDE_TOKENS)


def _defaults() -> tuple[int, int, int]:
    """The default block sizes, for few tokens and for many, and the multiprocessors that part them."""
    from mlaprep.clients import plan

    return plan._SMALL_BLOCK, plan._LARGE_BLOCK, torch.cuda.get_device_properties(0).multi_processor_count


def _same_cell(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("heads", "tokens", "rope", "mode")
    return "us" in one and one["elements"] is None and all(one[name] == other[name] for name in names)


def _compile_only(args: argparse.Namespace) -> int:
    if args.cubins is None or args.arch is None:
        print("--compile-only needs --cubins DIR and --arch, such as sm_90a", file=sys.stderr)
        return 2
    specs: set[KernelSpec] = {
        spec_of(cell.heads, pdl=True, fixed=True, rope=cell.rope, elements=elements) for cell, elements in _kernels()
    }
    for spec in sorted(specs, key=lambda spec: spec.variant_id):
        print(obtain(spec, Arch(args.arch), args.cubins).manifest.variant_id)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure block sizes and write the plans of launches.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no cell after this many seconds")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--plans", type=Path, help="the file of plans (default: clients/launch_plans.json)")
    parser.add_argument("--out", type=Path, help="the JSON record (default: benchmarks/results/tune-GPU-DATE.json)")
    parser.add_argument("--compile-only", action="store_true", help="fill --cubins for --arch and stop; needs no GPU")
    parser.add_argument("--arch", help="with --compile-only")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
