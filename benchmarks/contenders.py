"""Contenders: the ways to prepare one layer that the table compares, each as a body for a captured chain."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from columns import (
    CHAIN,
    COMPILED,
    FLASHINFER_APPEND,
    FLASHINFER_SCATTER,
    FLOOR_NOPDL,
    FLOOR_PDL,
    GRID_PDL,
    OURS_GENERAL_PDL,
    OURS_NOPDL,
    OURS_PDL,
    SGLANG_NOPDL,
    SGLANG_PDL,
    TRITON_PDL,
    VLLM_PDL,
)
from kernels import FLOOR_ENTRY, compile_floor, obtain, spec_of
from peer_compile import CompiledChain
from peer_flashinfer import Flashinfer
from peer_sglang import Sglang
from peer_vllm import OneLaunch
from timing import Body
from torch import Tensor
from workload import RANK, ROW, Cell, Layer

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import CudaDriver, Launcher, cuda_driver
from mlaprep.clients.plan import LaunchConfig, RowShape, measured_buckets, plan_launch
from mlaprep.templates.arch import Arch

OURS, PEER, FLOOR = "ours", "peer", "floor"


@dataclass(frozen=True)
class Form:
    """One way in which a contender can run a cell."""

    body: Body
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """One column. ``forms`` may raise: the cell then carries the reason instead of a time."""

    name: str
    title: str
    kind: str
    """``ours``, ``peer``, or ``floor``, which writes nothing."""
    forms: Callable[[Cell, list[Layer]], list[Form]]
    """One form, or several of which the fastest counts."""


class Contenders:
    """Every column, over the kernels that they share."""

    def __init__(
        self,
        arch: Arch,
        sglang: Sglang,
        flashinfer: Flashinfer,
        kernels: Path | None,
        compile_limit_s: float,
    ) -> None:
        self._arch, self._kernels = arch, kernels
        self._sglang, self._flashinfer = sglang, flashinfer
        self._driver: CudaDriver = cuda_driver()
        self._device = torch.cuda.current_device()
        self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._compiled = CompiledChain(compile_limit_s)
        self._one_launch = OneLaunch(arch, self._driver, self._device)
        self._handles: dict[tuple[int, bool, bool, bool], KernelHandle] = {}
        self._empty: dict[bool, Launcher] = {}

    def plain(self) -> list[Contender]:
        """The columns of the table without rope, in order."""
        return [
            Contender(
                CHAIN, "five launches of torch: cat, cast, two casts into a row, scatter", PEER,
                lambda cell, layers: [Form(five_launches)],
            ),
            Contender(COMPILED, "torch.compile of the chain, compiled for each cell", PEER, self._compiled_forms),
            self._peer_sglang(SGLANG_PDL, "SGLang's fused kernel, PDL", pdl=True),
            self._peer_sglang(SGLANG_NOPDL, "SGLang's fused kernel, no PDL", pdl=False),
            Contender(
                VLLM_PDL, "the structure of vLLM's one launch, re-created, PDL", PEER,
                lambda cell, layers: [Form(self._one_launch.body(cell, pdl=True))],
            ),
            Contender(
                TRITON_PDL, "a Triton version, PDL, the fastest of its configurations", PEER,
                lambda cell, layers: _triton_forms(),
            ),
            self._ours(OURS_PDL, "ours, PDL, strides compiled in: what prepare() loads", pdl=True, fixed=True),
            self._ours(OURS_GENERAL_PDL, "ours, PDL, strides at launch", pdl=True, fixed=False),
            self._ours(OURS_NOPDL, "ours, no PDL, strides compiled in", pdl=False, fixed=True),
            *self._floors(),
        ]  # fmt: skip

    def rope(self) -> list[Contender]:
        """The columns of the table with interleaved rope, in order."""
        return [
            Contender(
                FLASHINFER_SCATTER, "FlashInfer's rope-quantise, then SGLang's scatter, both PDL", PEER,
                lambda cell, layers: [Form(self._flashinfer.quantise_then(self._sglang.scatter()))],
            ),
            Contender(
                FLASHINFER_APPEND, "FlashInfer's one-launch rope, quantise and append, PDL", PEER,
                lambda cell, layers: [Form(self._flashinfer.append(layers))],
            ),
            self._ours(OURS_PDL, "ours, PDL, strides compiled in: what prepare() loads", pdl=True, fixed=True),
            self._ours(OURS_GENERAL_PDL, "ours, PDL, strides at launch", pdl=True, fixed=False),
            self._ours(OURS_NOPDL, "ours, no PDL, strides compiled in", pdl=False, fixed=True),
            *self._floors(),
        ]  # fmt: skip

    def handle(self, cell: Cell, *, pdl: bool = True, fixed: bool = True) -> KernelHandle:
        key = (cell.heads, pdl, fixed, cell.rope)
        if key not in self._handles:
            spec = spec_of(cell.heads, pdl=pdl, fixed=fixed, rope=cell.rope)
            self._handles[key] = KernelHandle(obtain(spec, self._arch, self._kernels), self._driver).load()
        return self._handles[key]

    def plan(self, cell: Cell, handle: KernelHandle) -> LaunchConfig:
        """How the handle launches the cell here."""
        shape, buckets = (
            RowShape.from_launch(handle.artifact.manifest.launch),
            measured_buckets(self._arch.name, handle.spec.rope != "none"),
        )
        return plan_launch(shape, cell.tokens, self._multiprocessors, buckets)

    def _ours(self, name: str, title: str, *, pdl: bool, fixed: bool) -> Contender:
        def forms(cell: Cell, layers: list[Layer]) -> list[Form]:
            handle = self.handle(cell, pdl=pdl, fixed=fixed)
            manifest = handle.artifact.manifest
            facts = {
                "variant": manifest.variant_id,
                "registers": manifest.registers,
                "spill_bytes": manifest.spill_stores + manifest.spill_loads,
                "nvrtc": manifest.nvrtc_version,
                "cubin_sha256": manifest.cubin_sha256,
                **asdict(self.plan(cell, handle)),
            }
            return [Form(lambda layer: handle(*layer.inputs, **layer.rotation, out=layer.out), facts)]

        return Contender(name, title, OURS, forms)

    def _peer_sglang(self, name: str, title: str, *, pdl: bool) -> Contender:
        def forms(cell: Cell, layers: list[Layer]) -> list[Form]:
            launch = self._sglang.kernel(pdl)
            warps = self._sglang.warps(cell.tokens * (cell.heads + 1))

            def run(layer: Layer) -> Tensor:
                arguments = (layer.cache, layer.loc, layer.k_nope, layer.k_rope, layer.q_nope, layer.q_rope, layer.out)
                launch(*arguments, warps, 1, 0)
                return layer.out

            return [Form(run)]

        return Contender(name, title, PEER, forms)

    def _compiled_forms(self, cell: Cell, layers: list[Layer]) -> list[Form]:
        body = self._compiled.body(cell, layers[0])
        return [Form(body, self._compiled.facts(cell))]

    def _floors(self) -> list[Contender]:
        one = LaunchConfig((1, 1, 1), (72, 1, 1))

        def floor(name: str, title: str, pdl: bool, config: Callable[[Cell], LaunchConfig]) -> Contender:
            def forms(cell: Cell, layers: list[Layer]) -> list[Form]:
                launch, chosen = self._empty_kernel(pdl), config(cell)
                return [Form(lambda _: launch(chosen, self._driver.current_stream(self._device), [0]))]

            return Contender(name, title, FLOOR, forms)

        return [
            floor(FLOOR_PDL, "an empty kernel, one block, wait and release only", True, lambda cell: one),
            floor(FLOOR_NOPDL, "an empty kernel, one block, no PDL", False, lambda cell: one),
            floor(
                GRID_PDL,
                "an empty kernel, wait and release only, in as many blocks as ours",
                True,
                lambda cell: self.plan(cell, self.handle(cell)),
            ),
        ]

    def _empty_kernel(self, pdl: bool) -> Launcher:
        if pdl not in self._empty:
            cubin, _compiler = compile_floor(self._arch, pdl=pdl)
            loaded = self._driver.load(cubin, FLOOR_ENTRY, self._device)
            self._empty[pdl] = self._driver.prepare(loaded, [("unused", "u32")], pdl)
        return self._empty[pdl]


def _triton_forms() -> list[Form]:
    import peer_triton

    return [Form(body, facts) for facts, body in peer_triton.bodies()]


def five_launches(layer: Layer) -> Tensor:
    """The unfused chain as engines run it, with the cast and the indexed write that torch has."""
    query = torch.cat((layer.q_nope, layer.q_rope), dim=-1).to(torch.float8_e4m3fn)
    row = torch.empty((layer.k_nope.shape[0], ROW), dtype=torch.float8_e4m3fn, device=query.device)
    row[:, :RANK].copy_(layer.k_nope)
    row[:, RANK:].copy_(layer.k_rope)
    # As bytes: assigning e4m3 to a uint8 cache would convert the values.
    layer.cache.index_put_((layer.loc,), row.view(torch.uint8))
    return query
