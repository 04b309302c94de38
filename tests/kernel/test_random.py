"""Random variants on random layouts: kernels and operands drawn together."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel.calls import E4M3, Call, angles, cache_width, values
from kernel.checks import check
from kernel.devices import Emulation
from kernel.memory import Guarded

SCALES = (1.0, 0.37, -2.0, 1e-40, float("nan"), float("inf"))


@dataclass(frozen=True)
class Shape:
    """What operands and result have in common."""

    tokens: int
    heads: int
    rank: int
    rope_dim: int
    dtype: str
    layout: str
    query_dtype: str | None
    elements: int
    """That one thread moves."""

    @property
    def quantised(self) -> bool:
        return self.layout == "fp8" or (self.layout == "ds_mla" and self.query_dtype != "input")

    def step(self, itemsize: int) -> int:
        """Elements that strides and offsets are multiples of: results of one byte, or all else."""
        return self.elements if itemsize == 1 else min(self.elements, 8)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    layout = draw(st.sampled_from(["fp8", "fp8-q16", "same", "ds_mla"]))
    tiles = layout == "ds_mla"
    rope_dim = draw(st.sampled_from([0, 4, 8, 16, 24, 64] if tiles else [0, 2, 6, 8, 12, 32, 64]))
    widths = [width for width in (16, 8, 4, 2) if rope_dim % width == 0 and (width > 2 or not tiles)]
    return Shape(
        tokens=draw(st.integers(0, 9)),
        heads=draw(st.sampled_from([1, 2, 3, 5, 12])),
        rank=draw(st.sampled_from([128, 256] if tiles else [16, 32, 48, 128])),
        rope_dim=rope_dim,
        dtype=draw(st.sampled_from(["bf16", "fp16"])),
        layout=layout,
        query_dtype=draw(st.sampled_from([None, "e4m3", "input"])) if tiles else None,
        elements=draw(st.sampled_from(widths)),
    )


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, step: int) -> torch.Tensor:
    """A covered layout of this shape: dimensions in any order, gaps, stride 0, an offset."""
    *outer, width = shape
    order = draw(st.permutations(range(len(outer))))
    strides, extent = [0] * len(outer), width
    for dim in order:
        if outer[dim] > 1 and draw(st.integers(0, 5)) == 0:
            continue  # expanded
        gap = step * draw(st.integers(0, 3))
        strides[dim] = -(-extent // step) * step + gap
        extent = strides[dim] * max(outer[dim], 1)
    offset = step * draw(st.integers(0, 2))
    flat = values(offset + extent + step, dtype=dtype, seed=draw(st.integers(0, 2**16)))
    return flat.as_strided(shape, (*strides, 1), offset)


@st.composite
def sources(draw: st.DrawFn, shape: Shape, fields: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Query and key inputs, some of whose strides become constants of the kernel."""
    lead = {"q": (shape.tokens, shape.heads), "k": (shape.tokens,)}
    drawn: dict[str, torch.Tensor | None] = {}
    for side, part in (("q", "nope"), ("q", "rope"), ("k", "nope"), ("k", "rope")):
        width = shape.rank if part == "nope" else shape.rope_dim
        tensor = draw(strided((*lead[side], width), shape.dtype, shape.step(2))) if width else None
        drawn[f"{side}_{part}"] = tensor
        for dim, name in enumerate(("token", "head")[: len(lead[side])]):
            if tensor is not None and draw(st.integers(0, 3)) == 0:
                fields[f"{side}_{part}_{name}_stride"] = tensor.stride(dim)
    return drawn


@st.composite
def slots(draw: st.DrawFn, tokens: int, rows: int, world: int, interleave: int) -> torch.Tensor:
    """Distinct slots in and around the pool, negative ones and huge ones."""
    narrow = draw(st.booleans())
    top = rows * world + 2 * world * interleave + tokens
    inside = draw(st.lists(st.integers(0, top), min_size=tokens, max_size=tokens, unique=True))
    odd = st.sampled_from([-1, -7, 2**31 - 1, *([] if narrow else [2**31, 2**40 + 17, -(2**63), 2**63 - 1])])
    chosen = [draw(odd) if draw(st.integers(0, 4)) == 0 else slot for slot in inside]
    return torch.tensor(chosen, dtype=torch.int32 if narrow else torch.int64)


@st.composite
def pools(draw: st.DrawFn, shape: Shape, interleave: int, fields: dict[str, Any]) -> tuple[Guarded, int]:
    """A pool of rows, of pages that lie apart, or of pages whose rows alternate; and the page to view it by."""
    itemsize = 2 if shape.layout == "same" else 1
    width, step = cache_width(shape.layout, shape.rank, shape.rope_dim), shape.step(itemsize)
    pitch = -(-width // step) * step + step * draw(st.integers(0, 2))
    offset = step * draw(st.integers(0, 1))
    page = draw(st.sampled_from([1, 3])) * interleave
    pages = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["rows", "viewed", "apart", "alternating"] if page > 1 else ["rows", "viewed"]))
    if kind in ("rows", "viewed"):
        if draw(st.booleans()):
            fields["cache_row_stride"] = pitch
        rows = pages * page + (draw(st.integers(0, 2)) if kind == "rows" else 0)
        return Guarded((rows, width), (pitch, 1), offset=offset, itemsize=itemsize), page if kind == "viewed" else 0
    strides = (page * pitch + step * draw(st.integers(0, 3)), pitch)
    if kind == "alternating" and pages:
        strides = (pitch, pages * pitch)
    if draw(st.booleans()):
        fields |= {"cache_page_stride": strides[0], "cache_row_stride": strides[1]}
    return Guarded((pages, page, width), (*strides, 1), offset=offset, itemsize=itemsize), 0


@st.composite
def results(draw: st.DrawFn, shape: Shape, heads: int, fields: dict[str, Any]) -> Guarded | None:
    """A caller's result, with constant strides or dynamic ones, or none."""
    if draw(st.booleans()):
        return None
    itemsize, width = 1 if shape.quantised else 2, shape.rank + shape.rope_dim
    step = shape.step(itemsize)
    head = width + step * draw(st.integers(0, 2))
    token = head * heads + step * draw(st.integers(0, 2))
    constant = draw(st.booleans())
    fields |= {"out_token_stride": token if constant else "dynamic", "out_head_stride": head if constant else "dynamic"}
    offset = step * draw(st.integers(0, 1))
    return Guarded((shape.tokens, heads, width), (token, head, 1), offset=offset, itemsize=itemsize)


@st.composite
def rotations(draw: st.DrawFn, shape: Shape) -> dict[str, Any]:
    style = draw(st.sampled_from(["none", "interleaved", "neox"])) if shape.rope_dim else "none"
    if style == "none":
        return {}
    rows = draw(st.integers(1, 5))
    wide = draw(st.booleans())
    far = [2**31, -(2**40), 2**63 - 1] if wide else [2**31 - 1, -(2**31)]
    position = st.integers(-2, rows + 2) | st.sampled_from(far)
    chosen = draw(st.lists(position, min_size=shape.tokens, max_size=shape.tokens))
    return {
        "rope": style,
        "positions": torch.tensor(chosen, dtype=torch.int64 if wide else torch.int32),
        "cos_sin_cache": angles(rows, shape.rope_dim, draw(st.integers(0, 99))),
    }


@st.composite
def calls(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    sides = draw(st.sampled_from(["both", "both", "both", "query", "cache"]))
    fields: dict[str, Any] = {"pdl": draw(st.booleans()), "elements_per_thread": shape.elements}
    options: dict[str, Any] = draw(sources(shape, fields)) | draw(rotations(shape))
    options |= {"layout": shape.layout, "query_dtype": shape.query_dtype, "fields": fields, "loc": None, "pool": None}
    if sides == "cache":
        options |= dict.fromkeys(("q_nope", "q_rope"))
        if shape.layout != "ds_mla":
            options["query_dtype"] = None
    else:
        heads = shape.heads + draw(st.sampled_from([0, 0, 1, 4]))
        options["pad_heads_to"] = heads if heads > shape.heads else None
        options["out"] = draw(results(shape, heads, fields))
        kind = draw(st.sampled_from(["none", "scalar", "token"]))
        if kind == "scalar":
            options["q_scale_inv"] = torch.tensor(draw(st.sampled_from(SCALES)))
        if kind == "token":
            scales = draw(st.lists(st.sampled_from(SCALES), min_size=shape.tokens, max_size=shape.tokens))
            options["q_scale_inv"] = torch.tensor(scales, dtype=torch.float32)
    if sides == "query":
        return Call(**options | dict.fromkeys(("k_nope", "k_rope")))
    world = draw(st.sampled_from([1, 1, 2, 3, 8]))
    interleave = draw(st.sampled_from([1, 2, 64])) if world > 1 else 1
    pool, page = draw(pools(shape, interleave, fields))
    if shape.layout in ("fp8", "fp8-q16") and draw(st.booleans()):
        options["kv_scale_inv"] = torch.tensor(draw(st.sampled_from(SCALES)))
    if shape.layout == "ds_mla":
        options["tile_scale"] = draw(st.sampled_from([None, "raw", "pow2"]))
    rules = {
        "loc": draw(slots(shape.tokens, pool.rows, world, interleave)),
        "pool": pool,
        "page": page,
        "cache_dtype": draw(st.sampled_from([torch.uint8, E4M3])),
        "reserved_slot": draw(st.sampled_from([None, None, 0, 2, -1])),
        "dcp_world": world,
        "dcp_rank": draw(st.integers(0, world - 1)),
        "dcp_interleave": interleave,
    }
    return Call(**options | rules)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(call=calls())
def test_random_kernels_on_random_layouts(emulation: Emulation, call: Call) -> None:
    check(call, emulation, call.fields["elements_per_thread"])
