"""Random layouts: kernels and operands drawn together."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel.calls import E4M3, Call, values
from kernel.checks import check
from kernel.devices import Emulation
from kernel.memory import Guarded

STEP = 8
"""Elements: strides and offsets of covered sources are multiples of 16 bytes."""


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A covered layout of this shape: dimensions in any order, gaps, stride 0, an offset."""
    *outer, width = shape
    order = draw(st.permutations(range(len(outer))))
    strides, extent = [0] * len(outer), width
    for dim in order:
        if outer[dim] > 1 and draw(st.integers(0, 5)) == 0:
            continue  # expanded
        gap = STEP * draw(st.integers(0, 3))
        strides[dim] = -(-extent // STEP) * STEP + gap
        extent = strides[dim] * max(outer[dim], 1)
    offset = STEP * draw(st.integers(0, 2))
    flat = values(offset + extent + STEP, dtype=dtype, seed=draw(st.integers(0, 2**16)))
    return flat.as_strided(shape, (*strides, 1), offset)


@st.composite
def slots(draw: st.DrawFn, tokens: int, rows: int, world: int, interleave: int, narrow: bool) -> torch.Tensor:
    """Distinct slots in and around the pool, negative ones and huge ones."""
    top = rows * world + 2 * world * interleave + tokens
    inside = draw(st.lists(st.integers(0, top), min_size=tokens, max_size=tokens, unique=True))
    odd = st.sampled_from([-1, -7, 2**31 - 1, *([] if narrow else [2**31, 2**40 + 17, -(2**63), 2**63 - 1])])
    chosen = [draw(odd) if draw(st.integers(0, 4)) == 0 else slot for slot in inside]
    return torch.tensor(chosen, dtype=torch.int32 if narrow else torch.int64)


@st.composite
def result_buffers(draw: st.DrawFn, tokens: int, heads: int, width: int) -> tuple[Guarded, dict[str, Any]]:
    """A caller's result and the spec fields for it: constant strides or dynamic ones."""
    head = width + STEP * draw(st.integers(0, 2))
    token = head * heads + STEP * draw(st.integers(0, 2))
    fields: dict[str, Any] = {"out_token_stride": "dynamic", "out_head_stride": "dynamic"}
    if draw(st.booleans()):
        fields = {"out_token_stride": token, "out_head_stride": head}
    return Guarded((tokens, heads, width), (token, head, 1), offset=STEP * draw(st.integers(0, 1))), fields


@st.composite
def calls(draw: st.DrawFn) -> Call:
    tokens, heads = draw(st.integers(0, 9)), draw(st.sampled_from([1, 2, 3, 5, 12]))
    rank, rope_dim = draw(st.sampled_from([16, 32, 48, 128])), draw(st.sampled_from([0, 8, 24, 64]))
    width = rank + rope_dim
    dtype, narrow = draw(st.sampled_from(["bf16", "fp16"])), draw(st.booleans())
    world = draw(st.sampled_from([1, 1, 2, 3, 8]))
    interleave = draw(st.sampled_from([1, 2, 64])) if world > 1 else 1
    page = draw(st.sampled_from([0, 1] if world > 1 else [0, 1, 3]))
    rows = draw(st.integers(0, 5)) * (page or 1)
    fields: dict[str, Any] = {"pdl": draw(st.booleans())}
    sources = {
        "q_nope": draw(strided((tokens, heads, rank), dtype)),
        "q_rope": draw(strided((tokens, heads, rope_dim), dtype)) if rope_dim else None,
        "k_nope": draw(strided((tokens, rank), dtype)),
        "k_rope": draw(strided((tokens, rope_dim), dtype)) if rope_dim else None,
    }
    for name, tensor in sources.items():
        for dim, stride in enumerate(("token", "head")[: 0 if tensor is None else tensor.dim() - 1]):
            if draw(st.integers(0, 3)) == 0 and tensor is not None:
                fields[f"{name}_{stride}_stride"] = tensor.stride(dim)
    out = None
    if draw(st.booleans()):
        out, out_fields = draw(result_buffers(tokens, heads, width))
        fields |= out_fields
    pitch = width + STEP * draw(st.integers(0, 3))
    if draw(st.booleans()):
        fields["cache_row_stride"] = pitch
    scale = st.sampled_from([None, 1.0, 0.37, -2.0, 1e-40, float("nan"), float("inf")])
    scales = {name: draw(scale) for name in ("q_scale_inv", "kv_scale_inv")}
    return Call(
        **sources,
        **{name: None if value is None else torch.tensor(value) for name, value in scales.items()},
        loc=draw(slots(tokens, rows, world, interleave, narrow)),
        pool=Guarded((rows, width), (pitch, 1), offset=STEP * draw(st.integers(0, 1))),
        out=out,
        cache_dtype=draw(st.sampled_from([torch.uint8, E4M3])),
        page=page if rows else 0,
        reserved_slot=draw(st.sampled_from([None, None, 0, 2, -1])),
        dcp_world=world,
        dcp_rank=draw(st.integers(0, world - 1)),
        dcp_interleave=interleave,
        fields=fields,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(call=calls())
def test_random_kernels_on_random_layouts(emulation: Emulation, call: Call) -> None:
    check(call, emulation)
