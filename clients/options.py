"""PrepareOptions: the keyword options of a prepare call, with their types."""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class SharedOptions(TypedDict, total=False):
    """Options by the same name whichever way the tensors are spelled."""

    positions: "Tensor | None"
    """``[T]`` int32 or int64, with ``rope``; a position outside the table reads its nearest row."""
    cos_sin_cache: "Tensor | None"
    """``[P, D]`` float32, rows ``[cos | sin]``, with ``rope``."""
    q_scale_inv: "Tensor | None"
    """float32 multiplier of queries before rounding: one element, or ``[T]``."""
    kv_scale_inv: "Tensor | None"
    """float32 multiplier of latent rows before rounding: one element."""
    layout: str
    """What a cache row holds: ``fp8`` (default), ``fp8-q16``, ``same`` or ``ds_mla``."""
    query_dtype: str | None
    """``e4m3`` or ``input``, where the layout leaves a choice."""
    tile_scale: str | None
    """``raw`` or ``pow2``, for ``ds_mla``."""
    rope: str
    """``none`` (default), ``interleaved`` or ``neox``."""
    pad_heads_to: int | None
    """Heads of the result; those added are zero."""
    reserved_slot: int | None
    """A slot that is never written."""
    dcp_interleave: int
    out: "Tensor | None"
    """``[T, H, R + D]`` to write the query to."""
    write_kv: bool
    """False leaves the cache alone; its operands are not looked at."""
    write_q: bool
    """False builds no query."""


class PrepareOptions(SharedOptions, total=False):
    """Keyword options of :func:`prepare` and :func:`fused_prepare`; those of the chain, by the same names."""

    dcp_world: int
    dcp_rank: int
