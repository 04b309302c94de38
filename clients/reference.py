"""The unfused chain: what the prepare kernel does, spelled in torch operations.

It is the fallback where no kernel covers a call, and the other half of every comparison: its bytes equal
the kernel's for every input, on CPU and GPU, whatever the torch version. It never waits for the device
and allocates by static shapes only, so it can be captured in a CUDA graph.
"""

from typing import TYPE_CHECKING, Final

from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.rotation import Rotation
from mlaprep.clients.rounding import e4m3_codes, element_bits
from mlaprep.clients.tiles import tiled_rows
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    positions: "Tensor | None" = None,
    cos_sin_cache: "Tensor | None" = None,
    q_scale_inv: "Tensor | None" = None,
    kv_scale_inv: "Tensor | None" = None,
    reserved_slot: int | None = None,
    dcp_world: int = 1,
    dcp_rank: int = 0,
    dcp_interleave: int = 1,
    out: "Tensor | None" = None,
    layout: str = "fp8",
    query_dtype: str | None = None,
    tile_scale: str | None = None,
    rope: str = "none",
    pad_heads_to: int | None = None,
    write_kv: bool = True,
    write_q: bool = True,
) -> "Tensor | None":
    """Write the latent rows into the cache and return the query, unfused.

    ``[k_nope | k_rope]`` goes to the cache rows that ``loc`` names, in place; ``[q_nope | q_rope]`` becomes
    the result. Rotary columns are rotated first where ``rope`` says so, then scaled, both in fp32, and every
    value is rounded once: to e4m3fn, saturating, NaN as ``7f``; or to the input dtype, NaN as ``7fff``. Values
    that are neither converted nor computed keep their bits. Shapes and dtypes are those of
    :class:`~mlaprep.clients.operands.Operands`; any strides will do.

    Args:
        positions: the row of ``cos_sin_cache`` for each token; one outside it reads the nearest.
        cos_sin_cache: ``[P, D]`` float32, rows ``[cos(D/2) | sin(D/2)]``.
        q_scale_inv: float32 on the device by which queries are multiplied before rounding: one element, or
            ``[T]``.
        kv_scale_inv: one float32 by which latent rows are multiplied; for layouts ``fp8`` and ``fp8-q16``.
        reserved_slot: a value of ``loc`` that is never written; ``None`` reserves none, not even 0.
        dcp_world: ranks that share the cache; this rank writes only the slots it owns.
        dcp_rank: this rank, below ``dcp_world``.
        dcp_interleave: consecutive slots on one rank.
        out: the result's memory, ``[T, pad_heads_to, R + D]`` of the result's dtype.
        layout: what a cache row holds: ``fp8``, ``fp8-q16``, ``same`` or ``ds_mla``.
        query_dtype: ``e4m3`` or ``input``; only ``ds_mla`` has the choice.
        tile_scale: ``raw`` or ``pow2``, for ``ds_mla``.
        rope: ``none``, ``interleaved`` or ``neox``.
        pad_heads_to: heads of the result; those beyond ``q_nope``'s are zeroed.
        write_kv: ``False`` leaves the cache alone; its operands are then not looked at.
        write_q: ``False`` builds no query.

    Returns:
        ``[T, pad_heads_to, R + D]`` float8_e4m3fn or of the input dtype, or ``None`` where ``write_q`` is false.

    Raises:
        TypeError: an argument of the wrong type or dtype, by name.
        ValueError: shapes, devices, options or slot rules that cannot be, by name.
    """
    import torch

    operands = check_operands(
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        kv_cache,
        loc,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        q_scale_inv=q_scale_inv,
        kv_scale_inv=kv_scale_inv,
        out=out,
        layout=layout,
        query_dtype=query_dtype,
        tile_scale=tile_scale,
        rope=rope,
        pad_heads_to=pad_heads_to,
        write_kv=write_kv,
        write_q=write_q,
    )
    check_slot_rules(reserved_slot, dcp_world, dcp_rank, dcp_interleave, operands.page)
    result = None
    if operands.q_nope is not None:
        shape = (operands.tokens, operands.padded_heads, operands.rank + operands.rope_dim)
        result = out if out is not None else torch.empty(shape, dtype=operands.result_dtype, device=operands.device)
    # A pool made under inference_mode can be written only there; an ordinary one can be written there too.
    with torch.inference_mode():
        rotation = None
        if operands.positions is not None and operands.cos_sin_cache is not None:
            rotation = Rotation.at(rope, operands.positions, operands.cos_sin_cache)
        if operands.loc is not None and operands.kv_cache is not None and operands.tokens and operands.rows:
            row, written = destination_rows(
                operands.loc, operands.rows, reserved_slot, dcp_world, dcp_rank, dcp_interleave
            )
            _write_cache(operands.kv_cache, row, written, _latent_rows(operands, rotation))
        if result is not None:
            _write_query(operands, rotation, result.detach())
    return result


def spec_chain(
    spec: KernelSpec,
    operands: Operands,
    dcp_rank: int = 0,
    reserved_slot: int | None = None,
    *,
    write_kv: bool = True,
    write_q: bool = True,
    everywhere: bool = False,
) -> "Tensor | None":
    """The chain in place of a spec's kernel, for operands that the kernel covers.

    Args:
        write_kv, write_q: False leaves out a side that the spec has.
        everywhere: write every slot, whatever the spec's slot rules say.
    """
    write_q = write_q and spec.write_q
    world = 1 if everywhere else spec.dcp_world
    return prepare_chain(
        operands.q_nope,
        operands.q_rope,
        operands.k_nope,
        operands.k_rope,
        operands.kv_cache,
        operands.loc,
        positions=operands.positions,
        cos_sin_cache=operands.cos_sin_cache,
        q_scale_inv=operands.q_scale_inv,
        kv_scale_inv=operands.kv_scale_inv,
        reserved_slot=None if everywhere else reserved_slot,
        dcp_world=world,
        dcp_rank=0 if everywhere else dcp_rank,
        dcp_interleave=spec.dcp_interleave if world > 1 else 1,
        out=operands.out,
        layout=spec.layout,
        query_dtype=spec.query_dtype,
        tile_scale=None if spec.tile_scale == "none" else spec.tile_scale,
        rope=spec.rope,
        pad_heads_to=operands.padded_heads if write_q else None,
        write_kv=write_kv and spec.write_kv,
        write_q=write_q,
    )


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
    """Write ``new[i]`` to row ``row[i]`` of the cache where ``written[i]``, without a device synchronisation.

    ``cache`` is ``[S, width]`` or ``[pages, page, width]`` with any strides, ``new`` ``[T, width]``, both uint8
    or both int16. Tokens that are not written would need a data-dependent shape to be left out, so they take
    part as operations that change nothing: each destination is lowered to the smallest value, then raised to
    the new one, and a skipped token lowers to the largest and raises to the smallest. On a GPU both are
    atomic, so a row that another stream writes meanwhile keeps that write. Of two tokens with one slot, each
    word comes from either.
    """
    import torch

    word = _word(cache, new)
    target, source = cache.view(word), new.view(word)
    # One dimension from the first to the last word of the pool, gaps included, since scatters follow one only.
    span = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    columns = torch.arange(source.shape[1], device=source.device) * target.stride(-1)
    start = sum(part * stride for part, stride in zip(places(cache, row * written), target.stride(), strict=False))
    index = start.unsqueeze(1) + columns
    limits = torch.iinfo(word)
    keep = ~written.unsqueeze(1)
    flat = target.as_strided((span,), (1,))
    lowered = torch.full_like(source, limits.min).masked_fill_(keep, limits.max)
    flat.scatter_reduce_(0, index.flatten(), lowered.flatten(), "amin")
    flat.scatter_reduce_(0, index.flatten(), source.masked_fill(keep, limits.min).flatten(), "amax")


def places(cache: "Tensor", row: "Tensor") -> "tuple[Tensor, ...]":
    """Row numbers as indices of the cache's leading dimensions: row, or page and row within it."""
    if cache.dim() == 2:
        return (row,)
    page = cache.shape[1]
    return row // page, row % page


def _word(cache: "Tensor", new: "Tensor") -> "torch.dtype":
    """int64 where every row of both can be read as such, else their own type."""
    import torch

    whole = 8 // new.element_size()
    starts = (new.shape[1], cache.storage_offset(), *cache.stride()[:-1])
    aligned = cache.stride(-1) == 1 and cache.data_ptr() % 8 == 0 and not any(start % whole for start in starts)
    return torch.int64 if aligned else new.dtype


def _write_cache(cache: "Tensor", row: "Tensor", written: "Tensor", new: "Tensor") -> None:
    # Integers of the same size, since assigning e4m3 to a uint8 pool converts values: 1.5 would be stored as 01.
    cache = cache.view(new.dtype)
    if cache.is_cuda:
        write_rows(cache, row, written, new)
    else:
        cache[places(cache, row[written])] = new[written]


def _latent_rows(operands: Operands, rotation: Rotation | None) -> "Tensor":
    """The rows to be cached: ``[T, W]`` int16 for ``same``, else ``[T, width]`` uint8."""
    import torch

    layout, nope, rope = operands.layout.name, operands.k_nope, operands.k_rope
    assert nope is not None
    if layout == "ds_mla":
        parts = list(tiled_rows(nope, operands.layout.tile_scale))
        if rope is not None:
            parts.append(_bits(rope, operands.dtype, rotation).contiguous().view(torch.uint8))
    else:
        dtype = operands.dtype if layout == "same" else torch.float8_e4m3fn
        parts = [_bits(nope, dtype, None, operands.kv_scale_inv)]
        if rope is not None:
            parts.append(_bits(rope, dtype, rotation, operands.kv_scale_inv))
    return torch.cat(parts, dim=1)


def _write_query(operands: Operands, rotation: Rotation | None, result: "Tensor") -> None:
    import torch

    if operands.q_nope is None or not result.numel():
        return
    target = result.view(torch.uint8 if result.element_size() == 1 else torch.int16)
    heads, rank, scale = operands.heads, operands.rank, operands.q_scale_inv
    target[:, heads:].zero_()
    sources: list[tuple[Tensor, Rotation | None, Tensor]] = [(operands.q_nope, None, target[:, :heads, :rank])]
    if operands.q_rope is not None:
        sources.append((operands.q_rope, rotation, target[:, :heads, rank:]))
    a_token = scale is not None and scale.numel() > 1
    chunk = max(1, _CHUNK_ELEMENTS // max(1, heads * rank))
    for source, turns, destination in sources:
        for start in range(0, operands.tokens, chunk):
            part = slice(start, start + chunk)
            factor = scale[part] if scale is not None and a_token else scale
            angles = turns.of_tokens(part) if turns is not None else None
            destination[part].copy_(_bits(source[part], result.dtype, angles, factor))


def _bits(values: "Tensor", dtype: "torch.dtype", rotation: Rotation | None, scale: "Tensor | None" = None) -> "Tensor":
    """Inputs as the bits of ``dtype``, rotated, multiplied by one scale or one a token, and rounded once."""
    import torch

    if dtype == values.dtype and rotation is None and scale is None:
        return values.view(torch.int16)
    computed = values.float()
    if rotation is not None:
        computed = rotation.turn(computed)
    if scale is not None:
        computed = computed * scale.reshape(-1, *[1] * (values.dim() - 1))
    return e4m3_codes(computed) if dtype == torch.float8_e4m3fn else element_bits(computed, dtype)
