"""torch.compile of the unfused chain: what the compiler makes of five launches, given every shape and stride."""

import time
import types
from collections.abc import Callable
from typing import Any

import torch
from peers import PeerMissing
from torch import Tensor
from workload import RANK, Cell, Layer


class CompiledChain:
    """The chain compiled anew for each cell, until ``limit_s`` seconds have gone into compiling."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._spent_s = 0.0
        self._made: dict[Cell, tuple[Callable[..., Tensor], dict[str, Any]]] = {}

    def body(self, cell: Cell, layer: Layer) -> Callable[[Layer], Tensor]:
        """A body for the cell, compiled on ``layer`` at first use.

        Raises:
            PeerMissing: the seconds for compiling are spent.
        """
        run = self._compiled(cell, layer)[0]
        return lambda layer: run(*layer.inputs)

    def facts(self, cell: Cell) -> dict[str, Any]:
        return self._made[cell][1] if cell in self._made else {}

    def _compiled(self, cell: Cell, layer: Layer) -> tuple[Callable[..., Tensor], dict[str, Any]]:
        if cell not in self._made:
            if self._spent_s > self._limit_s:
                raise PeerMissing(f"not compiled: the {self._limit_s:g} s for compiling are spent")
            begun = time.monotonic()
            try:
                run, form = self._compile(layer)
            finally:
                self._spent_s += time.monotonic() - begun
            self._made[cell] = run, {"form": form, "compile_s": round(time.monotonic() - begun, 2)}
        return self._made[cell]

    def _compile(self, layer: Layer) -> tuple[Callable[..., Tensor], str]:
        reasons = []
        for chain in (_chain_of_bytes, _chain_of_codes):
            run = torch.compile(_anew(chain, f"chain_{len(self._made)}"), fullgraph=True, dynamic=False)
            try:
                run(*layer.inputs)
            except Exception as error:  # the next form may pass
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            return run, chain.__name__.removeprefix("_chain_of_")
        raise PeerMissing("; ".join(reasons)[:800])


def _chain_of_bytes(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, cache: Tensor, loc: Tensor
) -> Tensor:
    query = torch.cat((q_nope, q_rope), dim=-1).to(torch.float8_e4m3fn)
    row = torch.cat((k_nope, k_rope), dim=-1).to(torch.float8_e4m3fn)
    cache.index_put_((loc,), row.view(torch.uint8))
    return query


def _chain_of_codes(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, cache: Tensor, loc: Tensor
) -> Tensor:
    codes = cache.view(torch.float8_e4m3fn)
    query = torch.cat((q_nope, q_rope), dim=-1).to(torch.float8_e4m3fn)
    codes[:, :RANK].index_put_((loc,), k_nope.to(torch.float8_e4m3fn))
    codes[:, RANK:].index_put_((loc,), k_rope.to(torch.float8_e4m3fn))
    return query


def _anew(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """The function with a code object of its own: torch keeps what it compiled by code object, a few of each."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
