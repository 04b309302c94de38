"""Operands: the tensors of one prepare call, checked and brought to the shapes of the kernel's contract.

The chain and the handle read a call through the same check, so what one refuses the other refuses, in the
same words. A layout that is merely not covered by a kernel (an odd width, a last stride of 2) is no fault
here: that is for the handle to say.
"""

from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from mlaprep.clients.cache_layout import CacheLayout, CacheRows, cache_layout, cache_rows
from mlaprep.clients.tensors import dense, kind_of, overlaps, same_device, shape_error
from mlaprep.templates.fields import TILE, Rope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MAX_I64: Final = 2**63 - 1
_ROPES: Final = get_args(Rope)


class Operands(NamedTuple):
    """One call's tensors. Operands that the write mode leaves out are ``None``; so are the rope ones if D = 0.

    Tensors that require grad are detached, lazily negated ones are resolved; otherwise they are the caller's
    own memory, never a copy.
    """

    tokens: int
    """T."""
    heads: int
    """H; 0 where no query is written."""
    padded_heads: int
    """Heads of the result: ``heads``, or what it is padded to."""
    rank: int
    """R, ``kv_lora_rank``."""
    rope_dim: int
    """D."""
    rows: int
    """S; 0 where no cache is written."""
    page: int
    """Rows of a page where the cache came as ``[pages, page, width]``, else 1."""
    row_stride: int
    """Elements between two rows of the cache, of one page where it has pages; 0 where no cache is written."""
    page_stride: int
    """Elements between two pages of the cache; ``page * row_stride`` where all rows are evenly spaced."""
    layout: CacheLayout
    dtype: "torch.dtype"
    """Of query and key inputs: bfloat16 or float16."""
    result_dtype: "torch.dtype"
    """Of the query result: float8_e4m3fn, or as ``dtype``."""
    device: "torch.device"
    q_nope: "Tensor | None"
    """``[T, H, R]``."""
    q_rope: "Tensor | None"
    """``[T, H, D]``."""
    k_nope: "Tensor | None"
    """``[T, R]``."""
    k_rope: "Tensor | None"
    """``[T, D]``."""
    kv_cache: "Tensor | None"
    """The caller's pool: ``[S, width]`` where rows are evenly spaced, else ``[pages, page, width]``."""
    loc: "Tensor | None"
    """``[T]``, int32 or int64, any stride."""
    positions: "Tensor | None"
    """``[T]``, int32 or int64, any stride; None without rotation."""
    cos_sin_cache: "Tensor | None"
    """``[P, D]`` float32, any strides, P at least 1; None without rotation."""
    q_scale_inv: "Tensor | None"
    """float32: one element, or ``[T]`` of any stride."""
    kv_scale_inv: "Tensor | None"
    """One float32."""
    out: "Tensor | None"
    """``[T, padded_heads, R + D]`` of the result's dtype, if the caller gave one."""


def check_operands(
    q_nope: object,
    q_rope: object,
    k_nope: object,
    k_rope: object,
    kv_cache: object,
    loc: object,
    *,
    positions: object = None,
    cos_sin_cache: object = None,
    q_scale_inv: object = None,
    kv_scale_inv: object = None,
    out: object = None,
    layout: object = "fp8",
    query_dtype: object = None,
    tile_scale: object = None,
    rope: object = "none",
    pad_heads_to: object = None,
    write_kv: bool = True,
    write_q: bool = True,
) -> Operands:
    """Check one call's tensors against the contract of ``docs/kernel.md``.

    Raises:
        TypeError: an argument is no dense torch tensor, or has the wrong dtype; the argument is named.
        ValueError: shapes or devices that do not fit together, memory that overlaps itself, or options at
            odds with each other; the argument is named.
    """
    import torch

    for name, flag in (("write_q", write_q), ("write_kv", write_kv)):
        if type(flag) is not bool:
            raise TypeError(f"{name}: found a {kind_of(flag)}; pass True or False")
    if pad_heads_to is not None and type(pad_heads_to) is not int:
        raise TypeError(f"pad_heads_to: found a {kind_of(pad_heads_to)}; pass an int, or leave it out")
    if not (write_q or write_kv):
        raise ValueError("write_q: false beside write_kv false, which leaves nothing to do; set one of them")
    kind = cache_layout(layout, query_dtype, tile_scale)
    inputs = (torch.bfloat16, torch.float16)
    rank_dim = rope_dim = tokens = heads = padded = 0
    pool: CacheRows | None = None
    lead: Tensor | None = None
    query = query_rope = key = key_rope = slots = q_scale = kv_scale = result = None

    if write_q:
        lead = query = dense("q_nope", q_nope, inputs, "[T, H, R]")
        if query.dim() != 3:
            raise shape_error("q_nope", query, "[T, H, R]")
        tokens, heads, rank_dim = query.shape
        if q_rope is not None:
            query_rope = dense("q_rope", q_rope, (query.dtype,), "[T, H, D]")
            rope_dim = query_rope.shape[-1] if query_rope.dim() else 0
            if query_rope.shape != (tokens, heads, rope_dim):
                raise shape_error("q_rope", query_rope, f"[{tokens}, {heads}, D] as q_nope has")
            same_device("q_rope", query_rope, "q_nope", query)
        padded = heads if pad_heads_to is None else _integer("pad_heads_to", pad_heads_to, heads, _MAX_I64)
        if out is not None:
            result = _result(out, kind.result_dtype(query.dtype), (tokens, padded, rank_dim + rope_dim), query)
        q_scale = _scale("q_scale_inv", q_scale_inv, query, tokens)
    elif out is not None:
        raise ValueError("out: given beside write_q=False, which makes no query; leave it out")

    if write_kv:
        key = dense("k_nope", k_nope, inputs if lead is None else (lead.dtype,), "[T, R] or [T, 1, R]")
        key = _key_rows("k_nope", key)
        if lead is None:
            tokens, rank_dim = key.shape
            lead = key
        else:
            if key.shape != (tokens, rank_dim):
                raise shape_error("k_nope", key, f"[{tokens}, {rank_dim}] as q_nope has")
            same_device("k_nope", key, "q_nope", lead)
        first = "q_nope" if write_q else "k_nope"
        if k_rope is not None:
            key_rope = _key_rows("k_rope", dense("k_rope", k_rope, (key.dtype,), "[T, D] or [T, 1, D]"))
            if not write_q:
                rope_dim = key_rope.shape[1]
            elif q_rope is None and key_rope.shape[1]:
                found = f"found shape {list(key_rope.shape)} beside no q_rope"
                raise ValueError(f"k_rope: {found}; pass both, or None for both")
            if key_rope.shape != (tokens, rope_dim):
                wanted = f"[{tokens}, {rope_dim}] as {'q_rope' if write_q else 'k_nope'} has"
                raise shape_error("k_rope", key_rope, wanted)
            same_device("k_rope", key_rope, first, lead)
        elif rope_dim:
            raise TypeError(f"k_rope: found None beside a q_rope of width {rope_dim}; pass [T, {rope_dim}]")
        if kind.name == "ds_mla" and rank_dim % TILE:
            raise shape_error("k_nope", key, f"R of a multiple of {TILE}, the elements that share a ds_mla scale")
        pool = cache_rows(kv_cache, kind, key.dtype, rank_dim, rope_dim)
        same_device("kv_cache", pool.cache, first, lead)
        slots = _token_indices("loc", loc, tokens, first, lead)
        kv_scale = _scale("kv_scale_inv", kv_scale_inv, lead)
        if kv_scale is not None and kind.name in ("same", "ds_mla"):
            raise ValueError(f"kv_scale_inv: given with layout {kind.name}, which has no scale of that kind; omit it")

    if lead is None:  # pragma: no cover - one of the two branches has run
        raise AssertionError
    if rank_dim == 0:
        raise shape_error("q_nope" if write_q else "k_nope", lead, "R of 1 or more")
    if rope_dim == 0:
        query_rope = key_rope = None
    turn = angles = None
    if rope != "none" or positions is not None or cos_sin_cache is not None:
        first = "q_nope" if write_q else "k_nope"
        turn, angles = _rotation(rope, positions, cos_sin_cache, tokens, rope_dim, first, lead)
    return Operands(
        tokens, heads, padded, rank_dim, rope_dim,
        *((0, 1, 0, 0) if pool is None else (pool.rows, pool.page, pool.row_stride, pool.page_stride)),
        kind, lead.dtype, kind.result_dtype(lead.dtype), lead.device,
        query, query_rope, key, key_rope, None if pool is None else pool.cache, slots, turn, angles,
        q_scale, kv_scale, result,
    )  # fmt: skip


def check_slot_rules(
    reserved_slot: object, dcp_world: object, dcp_rank: object, dcp_interleave: object, page: int = 1
) -> None:
    """Check the scalars that say which slots are written, and where.

    Raises:
        TypeError: not an int (a bool is none).
        ValueError: out of range, or an interleave that breaks a page of the cache.
    """
    world = _integer("dcp_world", dcp_world, 1, _MAX_I64)
    _integer("dcp_rank", dcp_rank, 0, world - 1)
    interleave = _integer("dcp_interleave", dcp_interleave, 1, _MAX_I64 // world)
    if world > 1 and page % interleave and page > 1:
        raise ValueError(
            f"dcp_interleave: found {interleave}, which does not divide the cache's page of {page} rows; "
            f"pass a divisor of {page}"
        )
    if reserved_slot is not None:
        _integer("reserved_slot", reserved_slot, -_MAX_I64 - 1, _MAX_I64)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{name}: found a {kind_of(value)}; pass an int")
    if not low <= value <= high:
        raise ValueError(f"{name}: found {value}; pass an int from {low} to {high}")
    return value


def _result(value: object, dtype: "torch.dtype", shape: tuple[int, int, int], query: "Tensor") -> "Tensor":
    result = dense("out", value, (dtype,), "[T, H, R + D]", written=True)
    if tuple(result.shape) != shape:
        raise shape_error("out", result, str(list(shape)))
    same_device("out", result, "q_nope", query)
    if overlaps(result):
        raise ValueError("out: elements that share memory; pass a result whose elements are distinct")
    return result


def _key_rows(name: str, tensor: "Tensor") -> "Tensor":
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        return tensor.select(1, 0)
    if tensor.dim() != 2:
        raise shape_error(name, tensor, "[T, width] or [T, 1, width]")
    return tensor


def _token_indices(name: str, value: object, tokens: int, first_name: str, first: "Tensor") -> "Tensor":
    import torch

    indices = dense(name, value, (torch.int64, torch.int32), "[T]")
    if tuple(indices.shape) != (tokens,):
        raise shape_error(name, indices, f"[{tokens}], one for each token")
    same_device(name, indices, first_name, first)
    return indices


def _rotation(
    rope: object, positions: object, cos_sin_cache: object, tokens: int, rope_dim: int, first_name: str, first: "Tensor"
) -> "tuple[Tensor, Tensor]":
    import torch

    if type(rope) is not str:
        raise TypeError(f"rope: found a {kind_of(rope)}; pass a string, one of {', '.join(_ROPES)}")
    if rope not in _ROPES:
        raise ValueError(f"rope: found a style of none; pass one of {', '.join(_ROPES)}")
    if rope == "none":
        name = "positions" if positions is not None else "cos_sin_cache"
        raise ValueError(f"{name}: given with rope none, which turns nothing; pass a rope style or leave it out")
    if rope_dim == 0 or rope_dim % 2:
        raise ValueError(f"rope: found {rope} with D = {rope_dim}; pass rotary columns in pairs, or rope none")
    turn = _token_indices("positions", positions, tokens, first_name, first)
    angles = dense("cos_sin_cache", cos_sin_cache, (torch.float32,), "[P, D]")
    if angles.dim() != 2 or angles.shape[0] == 0 or angles.shape[1] != rope_dim:
        raise shape_error("cos_sin_cache", angles, f"[P, {rope_dim}] of one row or more, each [cos | sin]")
    same_device("cos_sin_cache", angles, first_name, first)
    return turn, angles


def _scale(name: str, value: object, first: "Tensor", tokens: int | None = None) -> "Tensor | None":
    """A scale of one element or, where ``tokens`` is given, of one for each token."""
    import torch

    if value is None:
        return None
    shape = "of one element" if tokens is None else "of one element, or [T]"
    scale = dense(name, value, (torch.float32,), shape)
    if scale.numel() != 1 and (tokens is None or tuple(scale.shape) != (tokens,)):
        raise shape_error(name, scale, "a scalar" if tokens is None else f"a scalar, or [{tokens}]")
    if scale.device != first.device:
        raise ValueError(f"{name}: found on {scale.device}; pass it on {first.device}, where the kernel reads it")
    return scale
