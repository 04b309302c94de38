"""A speculative verify step of 24 layers: the unfused chain against one launch a layer, at Kimi-K3's shapes.

    python benchmarks/bench_verify_step.py [--cubins DIR] [--out FILE]

A step verifies a few draft tokens for each request. Each layer prepares its attention; the step is timed with the
prepares alone, and with the matrix product that makes each layer's query in front of its prepare, as in a model.
Bytes are compared as in ``bench_prepare.py``, launches counted in the captured graph.
"""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from columns import CHAIN, OURS_PDL, SGLANG_PDL
from contenders import Contenders
from machine import describe_machine, describe_versions, gpu_slug, machine_line, now
from peer_flashinfer import Flashinfer
from peer_sglang import Sglang
from timing import Body, Chain, time_interleaved
from torch import Tensor
from verdict import check
from workload import RANK, Cell, Layer, cache_pools, make_due, make_layers, poison

from mlaprep.clients.launch import cuda_driver
from mlaprep.templates.arch import Arch

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS = 24
HEADS = (12, 96)
"""Kimi-K3's 96 heads on eight ranks and on one."""
DRAFTS = (2, 4, 8)
"""Tokens a request."""
REQUESTS = (1, 8, 32)
ROUNDS = 7
STEPS = (CHAIN, SGLANG_PDL, OURS_PDL)
_ABSORBED = 128
"""Inner width of the product that makes q_nope: the head's own width before absorption."""


def main() -> int:
    args = _arguments()
    if not torch.cuda.is_available():
        print("bench_verify_step needs an NVIDIA GPU and a CUDA build of torch; neither is here", file=sys.stderr)
        return 2
    capability = cuda_driver().capability(torch.cuda.current_device())
    arch = Arch.for_device(capability)
    if arch is None:
        print(f"no kernel is built for compute capability {capability[0]}.{capability[1]}", file=sys.stderr)
        return 2
    started = time.monotonic()
    machine, versions, date = describe_machine(), describe_versions(None), now()
    contenders = Contenders(arch, Sglang(args.sglang, capability), Flashinfer(None, capability), args.cubins, 0.0)
    record: dict[str, Any] = {
        "benchmark": "verify-step",
        "schema": 1,
        "date": date,
        "machine": machine,
        "versions": versions,
        "method": {"text": __doc__, "layers": LAYERS, "rounds": args.rounds, "seed": args.seed},
        "steps": [],
    }
    pools = cache_pools(LAYERS)
    for heads in args.heads:
        for drafts in DRAFTS:
            for requests in REQUESTS:
                shape = {"heads": heads, "tokens_a_request": drafts, "requests": requests, "tokens": drafts * requests}
                try:
                    found = measure(Cell(heads, drafts * requests), contenders, pools, args.rounds, args.seed)
                except Exception as error:
                    found = report.failure(error)
                record["steps"].append(shape | found)
                gc.collect()
                torch.cuda.empty_cache()
    record["wall_s"] = round(time.monotonic() - started, 1)
    out = (
        args.out or Path(__file__).resolve().parent / f"results/verify-step-{gpu_slug(machine['gpu'])}-{date[:10]}.json"
    )
    report.write(record, out)
    print(lines(record["steps"]))
    print(f"\n{machine_line(machine, versions, date)}\nwrote {out.name} after {record['wall_s']} s")
    return 0 if all(_sound(step) for step in record["steps"]) else 1


def measure(cell: Cell, contenders: Contenders, pools: Tensor, rounds: int, seed: int) -> dict[str, Any]:
    """One shape: ``alone`` and ``in_model``, each with a result for every step, and what fusing saves."""
    layers = make_layers(cell, pools, seed + 4096 * cell.heads + cell.tokens)
    products = Products(layers, seed)
    found: dict[str, Any] = {}
    for where in ("alone", "in_model"):
        results: dict[str, dict[str, Any]] = {}
        chains: dict[str, Chain] = {}
        for contender in contenders.plain():
            if contender.name not in STEPS:
                continue
            try:
                body = contender.forms(cell, layers)[0].body
                chain = Chain(products.ahead_of(body) if where == "in_model" else body, layers, keep=True)
                results[contender.name] = verified(chain)
                chains[contender.name] = chain
            except Exception as error:
                results[contender.name] = report.failure(error)
        for name, samples in time_interleaved(chains, rounds).items():
            results[name] |= {"us_a_step": round(samples.median * len(layers), 2)} | samples.to_dict()
        found[where] = {"results": results, "saved_us_a_step": _saved(results)}
    return found


class Products:
    """The product that makes each layer's ``q_nope``: ``[H, T, 128] x [H, 128, 512]``, as absorption has it."""

    def __init__(self, layers: list[Layer], seed: int) -> None:
        tokens, heads, _ = layers[0].q_nope.shape
        device, dtype = layers[0].q_nope.device, layers[0].q_nope.dtype
        generator = torch.Generator(device=device).manual_seed(seed)
        self._weights = torch.randn((heads, _ABSORBED, RANK), generator=generator, device=device).to(dtype)
        self._queries = torch.randn((heads, tokens, _ABSORBED), generator=generator, device=device).to(dtype)

    def __call__(self, layer: Layer) -> None:
        torch.bmm(self._queries, self._weights, out=layer.q_nope.transpose(0, 1))

    def ahead_of(self, body: Body) -> Body:
        """The product, then the body."""

        def run(layer: Layer) -> Tensor | None:
            self(layer)
            return body(layer)

        return run


def verified(chain: Chain) -> dict[str, Any]:
    """Poison, replay once, compare; and the launches of a layer in the captured graph.

    What is due is made of the inputs as the replay left them: a captured product need not round as an eager one.
    """
    queries = [query for query in chain.queries if query is not None]
    poison(chain.layers, queries)
    chain.replay()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"check": check(chain.layers, queries, make_due(chain.layers)).to_dict()}
    if chain.content is not None:
        found["launches_a_layer"] = round(chain.content.nodes / len(chain.layers), 3)
    return found


def lines(steps: list[dict[str, Any]]) -> str:
    """The table: a line for each shape."""
    shown = [
        f"a verify step of {LAYERS} layers, µs; launches a layer in brackets; saved: chain less ours",
        f"{'H':>4}{'drafts':>8}{'requests':>10}{'T':>5}"
        + "".join(f"{head:>16}" for head in ("chain", "SGLang", "ours"))
        + f"{'saved':>9}{'ratio':>7}   |  behind the product that makes the query:"
        + "".join(f"{head:>16}" for head in ("chain", "ours"))
        + f"{'saved':>9}",
    ]
    for step in steps:
        line = f"{step['heads']:>4}{step['tokens_a_request']:>8}{step['requests']:>10}{step['tokens']:>5}"
        if "error" in step:
            shown.append(f"{line}  failed: {step['error']}")
            continue
        alone, in_model = step["alone"], step["in_model"]
        line += "".join(f"{_time(alone, name):>16}" for name in STEPS) + f"{_number(alone['saved_us_a_step']):>9}"
        times = [alone["results"].get(name, {}).get("us") for name in (CHAIN, OURS_PDL)]
        line += f"{times[0] / times[1]:>7.1f}" if all(times) else f"{'-':>7}"
        line += " " * 44 + "".join(f"{_time(in_model, name):>16}" for name in (CHAIN, OURS_PDL))
        shown.append(f"{line}{_number(in_model['saved_us_a_step']):>9}")
    return "\n".join(shown)


def _saved(results: dict[str, dict[str, Any]]) -> float | None:
    times = [results.get(name, {}).get("us_a_step") for name in (CHAIN, OURS_PDL)]
    sound = all(report.counted(results, name) for name in (CHAIN, OURS_PDL))
    return round(times[0] - times[1], 2) if sound and None not in times else None


def _time(found: dict[str, Any], name: str) -> str:
    result = found["results"].get(name, {})
    if "us_a_step" not in result:
        return "failed"
    mark = report.shown(result)[-1]
    return f"{result['us_a_step']:.1f}{mark} ({result.get('launches_a_layer', 0):g})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _sound(step: dict[str, Any]) -> bool:
    return "error" not in step and all(
        report.counted(step[where]["results"], OURS_PDL) is not None for where in ("alone", "in_model")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a verify step, unfused and fused.")
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked SGLang wheel (default: .peers)")
    parser.add_argument("--out", type=Path, help="the JSON record (default: results/verify-step-GPU-DATE.json)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
