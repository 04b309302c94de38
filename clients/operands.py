"""Operands: the tensors of one prepare call, checked and brought to the shapes of the kernel's contract.

The chain and the handle read a call through the same check, so what one refuses the other refuses, in the
same words. A layout that is merely not covered by a kernel (an odd width, a last stride of 2) is no fault
here: that is for the handle to say.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MAX_I64: Final = 2**63 - 1


class Operands(NamedTuple):
    """One call's tensors. Operands that the write mode leaves out are ``None``; so are the rope ones if D = 0.

    Tensors that require grad are detached, lazily negated ones are resolved; otherwise they are the caller's
    own memory, never a copy.
    """

    tokens: int
    """T."""
    heads: int
    """H; 0 where no query is written."""
    rank: int
    """R, ``kv_lora_rank``."""
    rope_dim: int
    """D."""
    rows: int
    """S; 0 where no cache is written."""
    page: int
    """Rows of a page where the cache came as ``[pages, page, W]``, else 1."""
    dtype: "torch.dtype"
    """Of query and key inputs: bfloat16 or float16."""
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
    """``[S, R + D]``, uint8 or float8_e4m3fn, a view of the caller's pool."""
    loc: "Tensor | None"
    """``[T]``, int32 or int64, any stride."""
    q_scale_inv: "Tensor | None"
    """One float32."""
    kv_scale_inv: "Tensor | None"
    """One float32."""
    out: "Tensor | None"
    """``[T, H, R + D]`` float8_e4m3fn, if the caller gave one."""


def check_operands(
    q_nope: object,
    q_rope: object,
    k_nope: object,
    k_rope: object,
    kv_cache: object,
    loc: object,
    *,
    q_scale_inv: object = None,
    kv_scale_inv: object = None,
    out: object = None,
    write_kv: bool = True,
    write_q: bool = True,
) -> Operands:
    """Check one call's tensors against the contract of ``docs/kernel.md``.

    Raises:
        TypeError: an argument is no dense torch tensor, or has the wrong dtype; the argument is named.
        ValueError: shapes or devices that do not fit together, or memory that overlaps itself; the
            argument is named.
    """
    import torch

    if not (write_q or write_kv):
        raise ValueError("write_q: false beside write_kv false, which leaves nothing to do; set one of them")
    inputs = (torch.bfloat16, torch.float16)
    fp8 = torch.float8_e4m3fn
    rank_dim = rope_dim = tokens = heads = rows = 0
    page = 1
    lead: Tensor | None = None
    query = query_rope = key = key_rope = cache = slots = q_scale = kv_scale = result = None

    if write_q:
        lead = query = _tensor("q_nope", q_nope, inputs, "[T, H, R]")
        if query.dim() != 3:
            raise _shape("q_nope", query, "[T, H, R]")
        tokens, heads, rank_dim = query.shape
        if q_rope is not None:
            query_rope = _tensor("q_rope", q_rope, (query.dtype,), "[T, H, D]")
            rope_dim = query_rope.shape[-1] if query_rope.dim() else 0
            if query_rope.shape != (tokens, heads, rope_dim):
                raise _shape("q_rope", query_rope, f"[{tokens}, {heads}, D] as q_nope has")
            _same_device("q_rope", query_rope, "q_nope", query)
        if out is not None:
            result = _tensor("out", out, (fp8,), "[T, H, R + D]")
            if result.shape != (tokens, heads, rank_dim + rope_dim):
                raise _shape("out", result, f"[{tokens}, {heads}, {rank_dim + rope_dim}]")
            _same_device("out", result, "q_nope", query)
            if _overlaps(result):
                raise ValueError("out: elements that share memory; pass a result whose elements are distinct")
        q_scale = _scale("q_scale_inv", q_scale_inv, query)
    elif out is not None:
        raise ValueError("out: given beside write_q=False, which makes no query; leave it out")

    if write_kv:
        key = _tensor("k_nope", k_nope, inputs if lead is None else (lead.dtype,), "[T, R] or [T, 1, R]")
        key = _key_rows("k_nope", key)
        if lead is None:
            tokens, rank_dim = key.shape
            lead = key
        else:
            if key.shape != (tokens, rank_dim):
                raise _shape("k_nope", key, f"[{tokens}, {rank_dim}] as q_nope has")
            _same_device("k_nope", key, "q_nope", lead)
        first = "q_nope" if write_q else "k_nope"
        if k_rope is not None:
            key_rope = _key_rows("k_rope", _tensor("k_rope", k_rope, (key.dtype,), "[T, D] or [T, 1, D]"))
            if not write_q:
                rope_dim = key_rope.shape[1]
            if key_rope.shape != (tokens, rope_dim):
                raise _shape("k_rope", key_rope, f"[{tokens}, {rope_dim}] as {'q_rope' if write_q else 'k_nope'} has")
            _same_device("k_rope", key_rope, first, lead)
        elif rope_dim:
            raise TypeError(f"k_rope: found None beside a q_rope of width {rope_dim}; pass [T, {rope_dim}]")
        cache, page = _cache_rows(_tensor("kv_cache", kv_cache, (torch.uint8, fp8), "[S, R + D]"), rank_dim + rope_dim)
        rows = cache.shape[0]
        _same_device("kv_cache", cache, first, lead)
        slots = _tensor("loc", loc, (torch.int64, torch.int32), "[T]")
        if slots.shape != (tokens,):
            raise _shape("loc", slots, f"[{tokens}], one slot a token")
        _same_device("loc", slots, first, lead)
        kv_scale = _scale("kv_scale_inv", kv_scale_inv, lead)

    if lead is None:  # pragma: no cover - one of the two branches has run
        raise AssertionError
    if rank_dim == 0:
        raise _shape("q_nope" if write_q else "k_nope", lead, "R of 1 or more")
    if rope_dim == 0:
        query_rope = key_rope = None
    return Operands(
        tokens, heads, rank_dim, rope_dim, rows, page, lead.dtype, lead.device,
        query, query_rope, key, key_rope, cache, slots, q_scale, kv_scale, result,
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
        raise TypeError(f"{name}: found a {_kind(value)}; pass an int")
    if not low <= value <= high:
        raise ValueError(f"{name}: found {value}; pass an int from {low} to {high}")
    return value


def _tensor(name: str, value: object, dtypes: "tuple[torch.dtype, ...]", shape: str) -> "Tensor":
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: found a {_kind(value)}; pass a torch.Tensor {shape} of {_names(dtypes)}")
    tensor: Tensor = value
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name}: found a {found} tensor; pass a dense one, {shape}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: found dtype {_names((tensor.dtype,))}; pass {_names(dtypes)}")
    if tensor.is_meta:
        raise ValueError(f"{name}: found a meta tensor, which has no memory; pass one on the GPU or the CPU")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


def _same_device(name: str, tensor: "Tensor", first_name: str, first: "Tensor") -> None:
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: found on {tensor.device}; {first_name} is on {first.device}; pass both on one device"
        )


def _key_rows(name: str, tensor: "Tensor") -> "Tensor":
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        return tensor.select(1, 0)
    if tensor.dim() != 2:
        raise _shape(name, tensor, "[T, width] or [T, 1, width]")
    return tensor


def _cache_rows(cache: "Tensor", width: int) -> "tuple[Tensor, int]":
    """The pool as ``[S, W]``, and the rows of one page."""
    page = 1
    if cache.dim() == 3:
        pages, page, _ = cache.shape
        if page == 1:
            cache = cache.select(1, 0)
        elif pages == 1:
            cache = cache.select(0, 0)
        elif pages and page and cache.stride(0) != page * cache.stride(1):
            raise ValueError(
                f"kv_cache: found pages {cache.stride(0)} elements apart that hold {page} rows of stride "
                f"{cache.stride(1)}; pass a pool whose rows are evenly spaced"
            )
        else:
            cache = cache.flatten(0, 1)
    elif cache.dim() != 2:
        raise _shape("kv_cache", cache, "[S, W], [S, 1, W] or [pages, page, W]")
    if cache.shape[1] != width:
        wider = f" (pool[..., :{width}] where the rest of a row is padding)" if cache.shape[1] > width else ""
        raise _shape("kv_cache", cache, f"rows of R + D = {width} elements{wider}")
    if _overlaps(cache):
        raise ValueError("kv_cache: rows that share memory; pass a pool whose rows are distinct")
    return cache, page


def _scale(name: str, value: object, first: "Tensor") -> "Tensor | None":
    import torch

    if value is None:
        return None
    scale = _tensor(name, value, (torch.float32,), "of one element")
    if scale.numel() != 1:
        raise _shape(name, scale, "a scalar")
    if scale.device != first.device:
        raise ValueError(f"{name}: found on {scale.device}; pass it on {first.device}, where the kernel reads it")
    return scale


def _overlaps(tensor: "Tensor") -> bool:
    """Whether two elements may share memory, told from sizes and strides."""
    if tensor.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def _shape(name: str, tensor: "Tensor", wanted: str) -> ValueError:
    return ValueError(f"{name}: found shape {list(tensor.shape)}; pass {wanted}")


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _names(dtypes: "tuple[torch.dtype, ...]") -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
