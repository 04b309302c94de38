"""The unfused chain: what the prepare kernel does, spelled in torch operations.

It is the fallback where no kernel covers a call, and the other half of every comparison: its bytes equal
the kernel's for every input, on CPU and GPU, whatever the torch version. It never waits for the device
and allocates by static shapes only, so it can be captured in a CUDA graph.
"""

from typing import TYPE_CHECKING, Final

from mlaprep.clients.operands import Operands, check_operands, check_slot_rules

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E4M3_MAX: Final = 448.0
_NAN_BYTE: Final = 0x7F
_CHUNK_ELEMENTS: Final = 2**26
"""Query elements rounded at a time: bounds the fp32 temporaries at about half a GiB."""


def prepare_chain(
    q_nope: "Tensor | None",
    q_rope: "Tensor | None",
    k_nope: "Tensor | None",
    k_rope: "Tensor | None",
    kv_cache: "Tensor | None",
    loc: "Tensor | None",
    *,
    q_scale_inv: "Tensor | None" = None,
    kv_scale_inv: "Tensor | None" = None,
    reserved_slot: int | None = None,
    dcp_world: int = 1,
    dcp_rank: int = 0,
    dcp_interleave: int = 1,
    out: "Tensor | None" = None,
    write_kv: bool = True,
    write_q: bool = True,
) -> "Tensor | None":
    """Write the latent rows into the cache and return the query, unfused.

    ``[k_nope | k_rope]`` goes to the cache rows that ``loc`` names, in place; ``[q_nope | q_rope]`` becomes
    the result. Both are rounded once from fp32 to e4m3fn, saturating, NaN as ``7f``. Shapes and dtypes are
    those of :class:`~mlaprep.clients.operands.Operands`; any strides will do.

    Args:
        q_scale_inv: one float32 on the device by which queries are multiplied before rounding.
        kv_scale_inv: the same for latent rows.
        reserved_slot: a value of ``loc`` that is never written; ``None`` reserves none, not even 0.
        dcp_world: ranks that share the cache; this rank writes only the slots it owns.
        dcp_rank: this rank, below ``dcp_world``.
        dcp_interleave: consecutive slots on one rank.
        out: the result's memory, ``[T, H, R + D]`` float8_e4m3fn.
        write_kv: ``False`` leaves the cache alone; its operands are then not looked at.
        write_q: ``False`` builds no query.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn, or ``None`` where ``write_q`` is false.

    Raises:
        TypeError: an argument of the wrong type or dtype, by name.
        ValueError: shapes, devices or slot rules that cannot be, by name.
    """
    import torch

    operands = check_operands(
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        kv_cache,
        loc,
        q_scale_inv=q_scale_inv,
        kv_scale_inv=kv_scale_inv,
        out=out,
        write_kv=write_kv,
        write_q=write_q,
    )
    check_slot_rules(reserved_slot, dcp_world, dcp_rank, dcp_interleave, operands.page)
    result = None
    if operands.q_nope is not None:
        shape = (operands.tokens, operands.heads, operands.rank + operands.rope_dim)
        result = out if out is not None else torch.empty(shape, dtype=torch.float8_e4m3fn, device=operands.device)
    # A pool made under inference_mode can be written only there; an ordinary one can be written there too.
    with torch.inference_mode():
        if operands.loc is not None:
            row, written = destination_rows(
                operands.loc, operands.rows, reserved_slot, dcp_world, dcp_rank, dcp_interleave
            )
            _write_cache(operands, row, written)
        if result is not None:
            _write_query(operands, result.detach())
    return result


def quantise(values: "Tensor", scale_inv: "Tensor | None" = None) -> "Tensor":
    """e4m3fn bytes (uint8, same shape) of bf16, fp16 or fp32 values.

    Only finite values within ±448 reach torch's cast, where every torch version rounds to nearest even;
    beyond that versions differ, and a NaN's sign survives in some.
    """
    import torch

    scaled = values.float()
    if scale_inv is not None:
        scaled = scaled * scale_inv.reshape(())
    nan = scaled.isnan()
    finite = scaled.masked_fill(nan, 0.0).clamp_(-E4M3_MAX, E4M3_MAX)
    return finite.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill_(nan, _NAN_BYTE)


def destination_rows(
    loc: "Tensor", rows: int, reserved_slot: int | None, dcp_world: int, dcp_rank: int, dcp_interleave: int
) -> "tuple[Tensor, Tensor]":
    """The cache row of each slot on this rank (int64), and whether it is written (bool), both ``[T]``.

    Rows of slots that are not written are meaningless.
    """
    slot = loc.long()
    written = slot >= 0
    if reserved_slot is not None:
        written &= slot != reserved_slot
    # Skipped before dividing: -1 // 4 is -1 here and 0 in C, and its remainder is 3 or -1.
    row = slot.clamp(min=0)
    if dcp_world > 1:
        turn = row // dcp_interleave
        written &= turn % dcp_world == dcp_rank
        row = turn // dcp_world * dcp_interleave + row % dcp_interleave
    written &= row < rows
    return row, written


def write_rows(cache: "Tensor", row: "Tensor", written: "Tensor", new: "Tensor") -> None:
    """``cache[row[i]] = new[i]`` where ``written[i]``, without a device synchronisation.

    ``cache`` is ``[S, W]`` uint8 with any row stride, ``new`` ``[T, W]`` uint8. Tokens that are not written
    would need a data-dependent shape to be left out, so they take part as operations that change nothing:
    each destination is lowered to the smallest value, then raised to the new one, and a skipped token
    lowers to the largest and raises to the smallest. On a GPU both are atomic, so a row that another
    stream writes meanwhile keeps that write. Of two tokens with one slot, each word comes from either.
    """
    import torch

    word = _word(cache, new)
    target, source = cache.view(word), new.view(word)
    limits = torch.iinfo(word)
    index = (row * written).unsqueeze(1).expand_as(source)
    keep = ~written.unsqueeze(1)
    target.scatter_reduce_(0, index, torch.full_like(source, limits.min).masked_fill_(keep, limits.max), "amin")
    target.scatter_reduce_(0, index, source.masked_fill(keep, limits.min), "amax")


def _write_cache(operands: Operands, row: "Tensor", written: "Tensor") -> None:
    import torch

    if operands.kv_cache is None or operands.k_nope is None or not operands.tokens or not operands.rows:
        return
    # uint8, since assigning e4m3 to a uint8 pool converts values: 1.5 would be stored as 01.
    cache = operands.kv_cache.view(torch.uint8)
    parts = [quantise(operands.k_nope, operands.kv_scale_inv)]
    if operands.k_rope is not None:
        parts.append(quantise(operands.k_rope, operands.kv_scale_inv))
    new = torch.cat(parts, dim=1)
    if cache.is_cuda:
        write_rows(cache, row, written, new)
    else:
        cache[row[written]] = new[written]


def _write_query(operands: Operands, result: "Tensor") -> None:
    import torch

    if operands.q_nope is None or not result.numel():
        return
    target = result.view(torch.uint8)
    sources = [(operands.q_nope, target[..., : operands.rank])]
    if operands.q_rope is not None:
        sources.append((operands.q_rope, target[..., operands.rank :]))
    chunk = max(1, _CHUNK_ELEMENTS // (operands.heads * operands.rank))
    for source, destination in sources:
        for start in range(0, operands.tokens, chunk):
            part = slice(start, start + chunk)
            destination[part].copy_(quantise(source[part], operands.q_scale_inv))


def _word(cache: "Tensor", new: "Tensor") -> "torch.dtype":
    """int64 where every row of both can be read as such, else uint8."""
    import torch

    whole = new.shape[1] % 8 == 0 and cache.stride(0) % 8 == 0 and cache.storage_offset() % 8 == 0
    return torch.int64 if whole and cache.stride(1) == 1 and cache.data_ptr() % 8 == 0 else torch.uint8
