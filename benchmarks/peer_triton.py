"""A Triton version of the prepare kernel, written for this comparison: one launch, with PDL.

A program takes ``ROWS`` query rows of a token, or the token's row of the cache, each as one piece of 512 columns
and one of 64. Rows a program and warps are tried in each cell, and the fastest counts.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from workload import RANK, ROPE_DIM, Layer

CONFIGURATIONS = ((1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8))
"""(rows a program, warps)."""


@triton.jit(do_not_specialize=["heads"])
def prepare_rows(
    out, cache, q_nope, q_rope, k_nope, k_rope, loc, heads,
    q_nope_token, q_nope_head, q_rope_token, q_rope_head, k_nope_token, k_rope_token, cache_row, out_token, out_head,
    ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token = tl.program_id(1).to(tl.int64)
    nope, rope = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    if PDL:
        gdc_wait()
    if tl.program_id(0) * ROWS < heads:
        inside = head < heads
        left = tl.load(q_nope + token * q_nope_token + head * q_nope_head + nope, mask=inside)
        right = tl.load(q_rope + token * q_rope_token + head * q_rope_head + rope, mask=inside)
        if PDL:
            gdc_launch_dependents()
        row = out + token * out_token + head * out_head
        tl.store(row + nope, left.to(tl.float32).to(tl.float8e4nv), mask=inside)
        tl.store(row + RANK + rope, right.to(tl.float32).to(tl.float8e4nv), mask=inside)
    else:
        # Names of their own: Triton wants one type for a name in both branches.
        slot = tl.load(loc + token).to(tl.int64)
        latent = tl.load(k_nope + token * k_nope_token + nope)
        rotary = tl.load(k_rope + token * k_rope_token + rope)
        if PDL:
            gdc_launch_dependents()
        written = slot >= 0
        target = cache + slot * cache_row
        tl.store(target + nope, latent.to(tl.float32).to(tl.float8e4nv), mask=written)
        tl.store(target + RANK + rope, rotary.to(tl.float32).to(tl.float8e4nv), mask=written)


def bodies(pdl: bool = True) -> list[tuple[dict[str, Any], Callable[[Layer], Tensor]]]:
    """Every configuration, as a name and a body."""
    return [({"rows": rows, "warps": warps}, _body(rows, warps, pdl)) for rows, warps in CONFIGURATIONS]


def _body(rows: int, warps: int, pdl: bool) -> Callable[[Layer], Tensor]:
    options = {"launch_pdl": True} if pdl else {}

    def run(layer: Layer) -> Tensor:
        tokens, heads = layer.q_nope.shape[:2]
        prepare_rows[triton.cdiv(heads, rows) + 1, tokens](
            layer.out, layer.cache.view(torch.float8_e4m3fn),
            layer.q_nope, layer.q_rope, layer.k_nope, layer.k_rope, layer.loc, heads,
            layer.q_nope.stride(0), layer.q_nope.stride(1), layer.q_rope.stride(0), layer.q_rope.stride(1),
            layer.k_nope.stride(0), layer.k_rope.stride(0), layer.cache.stride(0),
            layer.out.stride(0), layer.out.stride(1),
            ROWS=rows, RANK=RANK, ROPE=ROPE_DIM, PDL=pdl, num_warps=warps, **options,
        )  # fmt: skip
        return layer.out

    return run
