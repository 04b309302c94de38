"""What one eager call costs the host, in microseconds: ours, its parts, SGLang's, and the unfused chain.

    python benchmarks/bench_host.py [--heads 16] [--tokens 4] [--cubins DIR] [--sglang DIR] [--out FILE]

Calls are enqueued back to back and the device keeps up, so wall-clock time a call is the host's share.
``bench_prepare.py`` puts the same figures into its record.
"""

import argparse
import gc
import operator
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from contenders import five_launches
from kernels import argument_values, obtain, spec_of
from machine import describe_machine, describe_versions, machine_line, now
from peer_sglang import Sglang
from timing import Samples
from torch import Tensor
from verdict import check
from workload import ROW, Cell, Layer, cache_pools, make_due, make_layers, poison

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import cuda_driver
from mlaprep.clients.plan import RowShape, measured_buckets, plan_launch
from mlaprep.clients.reference import prepare_chain
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.arch import Arch

ROUNDS = 9
CALLS = 1000
OURS, SGLANG = "ours: handle(...)", "SGLang: covered, then call"

Call = Callable[[], Tensor | None]


def measure(arch: Arch, sglang: Sglang, kernels: Path | None, heads: int = 16, tokens: int = 4) -> dict[str, Any]:
    """Figures for one shape. What cannot run is in the record with its reason."""
    cell = Cell(heads, tokens)
    layers = make_layers(cell, cache_pools(1), seed=1)
    due = make_due(layers)
    layer = layers[0]
    record: dict[str, Any] = {"heads": heads, "tokens": tokens, "rounds": ROUNDS, "calls": CALLS, "us": {}}
    ready: dict[str, Call] = {}
    for name, make in _calls(arch, sglang, kernels, cell, layer).items():
        record["us"][name] = {}
        try:
            call, whole = make()
            if whole:
                poison(layers, [layer.out])
                query = call()
                assert query is not None
                record["us"][name]["check"] = check(layers, [query], due).to_dict()
            ready[name] = call
        except Exception as error:
            record["us"][name] = report.failure(error)
    for name, samples in _time(ready).items():
        record["us"][name] |= samples.to_dict()
    ours, peer = (record["us"][name].get("samples_us", ()) for name in (OURS, SGLANG))
    # Contenders take turns, and a host is slower at one moment than at the next: each round has a ratio of its own.
    record["ours/sglang"] = round(statistics.median(map(operator.truediv, ours, peer)), 4) if ours and peer else None
    return record


def lines(record: dict[str, Any]) -> str:
    shown = [f"host, µs a call, eager, H {record['heads']}, T {record['tokens']} (median, min to max):"]
    for name, entry in record["us"].items():
        if "us" in entry:
            verdict = entry.get("check", {}).get("verdict", "")
            shown.append(
                f"  {name:<42}{entry['us']:>8.2f}  ({entry['us_min']:.2f} to {entry['us_max']:.2f})  {verdict}"
            )
        else:
            shown.append(f"  {name:<42}  failed  {entry['error']}")
    return "\n".join([*shown, f"  ours/SGLang {record['ours/sglang']}"])


def _calls(
    arch: Arch, sglang: Sglang, kernels: Path | None, cell: Cell, layer: Layer
) -> dict[str, Callable[[], tuple[Call, bool]]]:
    """What to time: makers of (call, whether it does the whole job)."""
    made: list[KernelHandle] = []

    def handle() -> KernelHandle:
        if not made:
            artifact = obtain(spec_of(cell.heads, pdl=True, fixed=True), arch, kernels)
            made.append(KernelHandle(artifact, cuda_driver()).load())
        return made[0]

    def whole() -> tuple[Call, bool]:
        run, inputs = handle(), layer.inputs
        return lambda: run(*inputs), True

    def given_out() -> tuple[Call, bool]:
        run, inputs, out = handle(), layer.inputs, layer.out
        return lambda: run(*inputs, out=out), True

    def entry() -> tuple[Call, bool]:
        from mlaprep.clients.dispatch import fused_prepare, prepare

        client, inputs = _client_with(handle().artifact), layer.inputs
        if fused_prepare(*inputs, client=client) is None:
            raise RuntimeError("prepare() takes the unfused chain here")
        return lambda: prepare(*inputs, client=client), True

    def covers() -> tuple[Call, bool]:
        run, inputs = handle(), layer.inputs
        return lambda: run.covers(*inputs), False  # type: ignore[return-value, unused-ignore]

    def launch() -> tuple[Call, bool]:
        artifact, driver, device = handle().artifact, cuda_driver(), torch.cuda.current_device()
        manifest = artifact.manifest
        parameters = [(name, kind) for name, kind in manifest.launch["parameters"]]
        loaded = driver.load(artifact.cubin, manifest.entry, device)
        launcher = driver.prepare(loaded, parameters, manifest.launch["pdl"])
        values = argument_values(layer)
        packed = [values[name] for name, _ in parameters]
        shape, buckets = RowShape.from_launch(manifest.launch), measured_buckets(manifest.arch, False)
        plan = plan_launch(shape, cell.tokens, loaded.multiprocessors, buckets)
        stream = driver.current_stream(device)

        def run() -> Tensor:
            launcher(plan, stream, packed)
            return layer.out

        return run, True

    def allocate() -> tuple[Call, bool]:
        shape, dtype, device = (cell.tokens, cell.heads, ROW), torch.float8_e4m3fn, layer.out.device
        return lambda: torch.empty(shape, dtype=dtype, device=device), False

    def pointers() -> tuple[Call, bool]:
        tensors = layer[:7]
        return lambda: [tensor.data_ptr() for tensor in tensors], False  # type: ignore[return-value, unused-ignore]

    def stream() -> tuple[Call, bool]:
        driver, device = cuda_driver(), torch.cuda.current_device()
        return lambda: driver.current_stream(device), False  # type: ignore[return-value, unused-ignore]

    def peer(covered: bool, call: bool) -> Callable[[], tuple[Call, bool]]:
        def make() -> tuple[Call, bool]:
            module = sglang.wrapper(True)
            arguments = (layer.cache, layer.loc, layer.k_nope, layer.k_rope, layer.q_nope, layer.q_rope)
            if not module.covered_fp8(*arguments):
                raise RuntimeError("SGLang does not cover this call")
            if not call:
                return lambda: module.covered_fp8(*arguments), False
            if not covered:
                return lambda: module.set_mla_kv_concat_q_fp8(*arguments), True

            def both() -> Any:
                return module.set_mla_kv_concat_q_fp8(*arguments) if module.covered_fp8(*arguments) else None

            return both, True

        return make

    return {
        OURS: whole,
        "ours: handle(..., out=out)": given_out,
        "ours: prepare(...)": entry,
        "  part: handle.covers(...)": covers,
        "  part: launch, arguments given": launch,
        "  part: torch.empty of the result": allocate,
        "  part: seven data_ptr()": pointers,
        "  part: the current stream": stream,
        SGLANG: peer(covered=True, call=True),
        "  part: its coverage test": peer(covered=True, call=False),
        "  part: its call": peer(covered=False, call=True),
        "five launches of torch": lambda: (lambda: five_launches(layer), True),
        "our fallback chain": lambda: (lambda: prepare_chain(*layer.inputs), True),
    }


def _client_with(artifact: KernelArtifact) -> Any:
    from mlaprep.clients.client import KernelClient
    from mlaprep.kernels_cache.key import request_key
    from mlaprep.kernels_cache.store import MemoryStore
    from mlaprep.templates.render import templates_fingerprint

    store, manifest = MemoryStore(), artifact.manifest
    store.publish(artifact)
    store.link(
        request_key(arch=manifest.arch, spec=manifest.spec, generator=templates_fingerprint()),
        artifact.key,
    )
    return KernelClient(store=store, offline=True, on_miss="error")


def _time(calls: dict[str, Call]) -> dict[str, Samples]:
    """Samples of each call; they take turns, so that what slows the host for a while slows all of them."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                for _ in range(CALLS // 10):
                    call()
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                values[name].append((time.perf_counter_ns() - start) / CALLS / 1000)
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return {name: Samples(tuple(found)) for name, found in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Host time of one eager prepare call.")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="a kernel cache to take our kernels from")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked SGLang wheel (default: .peers)")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_host needs an NVIDIA GPU and a CUDA build of torch; neither is here", file=sys.stderr)
        return 2
    capability = cuda_driver().capability(torch.cuda.current_device())
    arch = Arch.for_device(capability)
    if arch is None:
        print(f"no kernel is built for compute capability {capability[0]}.{capability[1]}", file=sys.stderr)
        return 2
    machine, versions, date = describe_machine(), describe_versions(None), now()
    print(machine_line(machine, versions, date))
    record = measure(arch, Sglang(args.sglang, capability), args.cubins, args.heads, args.tokens)
    print(lines(record))
    if args.out:
        report.write({"benchmark": "host", "date": date, "machine": machine, "versions": versions} | record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
