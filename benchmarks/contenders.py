"""Contenders: the ways to prepare one layer that the table compares, each as a body for a captured chain."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from kernels import FLOOR_ENTRY, compile_floor, obtain, spec_of
from peers import Sglang
from timing import Body
from torch import Tensor
from workload import RANK, ROW, Cell, Layer

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import cuda_driver
from mlaprep.clients.plan import LaunchConfig, RowShape, plan_launch
from mlaprep.templates.arch import Arch


@dataclass(frozen=True)
class Contender:
    """One column. ``body(cell)`` may raise: the cell then carries the reason instead of a time."""

    name: str
    title: str
    body: Callable[[Cell], Body]
    writes: bool = True
    """Whether there are bytes to check; the floor has none."""
    facts: Callable[[Cell], dict[str, Any]] = field(default=lambda _: {})
    """What is worth recording of its kernel in a cell."""


CHAIN, SGLANG_PDL, SGLANG_NOPDL = "chain", "sglang_pdl", "sglang_nopdl"
OURS_PDL, OURS_FIXED_PDL, OURS_NOPDL = "ours_pdl", "ours_fixed_pdl", "ours_nopdl"
FLOOR_PDL, FLOOR_NOPDL = "floor_pdl", "floor_nopdl"


def all_contenders(arch: Arch, sglang: Sglang, kernels: Path | None) -> list[Contender]:
    """Every column of the table, in order."""
    driver = cuda_driver()
    device = torch.cuda.current_device()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    handles: dict[tuple[int, bool, bool], KernelHandle] = {}

    def handle_of(heads: int, pdl: bool, fixed: bool) -> KernelHandle:
        key = (heads, pdl, fixed)
        if key not in handles:
            handles[key] = KernelHandle(obtain(spec_of(heads, pdl=pdl, fixed=fixed), arch, kernels), driver).load()
        return handles[key]

    def ours(name: str, title: str, *, pdl: bool, fixed: bool) -> Contender:
        def body(cell: Cell) -> Body:
            handle = handle_of(cell.heads, pdl, fixed)
            return lambda layer: handle(*layer.inputs, out=layer.out)

        def facts(cell: Cell) -> dict[str, Any]:
            manifest = handle_of(cell.heads, pdl, fixed).artifact.manifest
            plan = plan_launch(RowShape.from_launch(manifest.launch), cell.tokens, multiprocessors)
            return {
                "variant": manifest.variant_id,
                "registers": manifest.registers,
                "spill_bytes": manifest.spill_stores + manifest.spill_loads,
                "nvrtc": manifest.nvrtc_version,
                "cubin_sha256": manifest.cubin_sha256,
                **asdict(plan),
            }

        return Contender(name, title, body, facts=facts)

    def peer(name: str, title: str, *, pdl: bool) -> Contender:
        def body(cell: Cell) -> Body:
            launch = sglang.kernel(pdl)
            warps = sglang.warps(cell.tokens * (cell.heads + 1))

            def run(layer: Layer) -> Tensor:
                arguments = (layer.cache, layer.loc, layer.k_nope, layer.k_rope, layer.q_nope, layer.q_rope, layer.out)
                launch(*arguments, warps, 1, 0)
                return layer.out

            return run

        return Contender(name, title, body)

    def floor(name: str, title: str, *, pdl: bool) -> Contender:
        made: list[Body] = []

        def body(_: Cell) -> Body:
            if not made:
                cubin, _compiler = compile_floor(arch, pdl=pdl)
                launch = driver.prepare(driver.load(cubin, FLOOR_ENTRY, device), [("unused", "u32")], pdl)
                config = LaunchConfig((1, 1, 1), (72, 1, 1))
                made.append(lambda _layer: launch(config, driver.current_stream(device), [0]))
            return made[0]

        return Contender(name, title, body, writes=False)

    return [
        Contender(CHAIN, "five launches of torch: cat, cast, two casts into a row, scatter", lambda _: five_launches),
        peer(SGLANG_PDL, "SGLang's fused kernel, PDL", pdl=True),
        peer(SGLANG_NOPDL, "SGLang's fused kernel, no PDL", pdl=False),
        ours(OURS_PDL, "ours, PDL, strides at launch: what prepare() loads", pdl=True, fixed=False),
        ours(OURS_FIXED_PDL, "ours, PDL, strides compiled in", pdl=True, fixed=True),
        ours(OURS_NOPDL, "ours, no PDL, strides at launch", pdl=False, fixed=False),
        floor(FLOOR_PDL, "an empty kernel, one block, wait and release only", pdl=True),
        floor(FLOOR_NOPDL, "an empty kernel, one block, no PDL", pdl=False),
    ]


def five_launches(layer: Layer) -> Tensor:
    """The unfused chain as engines run it, with the cast and the indexed write that torch has."""
    query = torch.cat((layer.q_nope, layer.q_rope), dim=-1).to(torch.float8_e4m3fn)
    row = torch.empty((layer.k_nope.shape[0], ROW), dtype=torch.float8_e4m3fn, device=query.device)
    row[:, :RANK].copy_(layer.k_nope)
    row[:, RANK:].copy_(layer.k_rope)
    # As bytes: assigning e4m3 to a uint8 cache would convert the values.
    layer.cache.index_put_((layer.loc,), row.view(torch.uint8))
    return query
