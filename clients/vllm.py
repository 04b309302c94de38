"""The prepare step under the signatures of vLLM's MLA operations.

vLLM prepares a decode step with two of its operations: one writes latent rows to the cache, one concatenates
and quantises queries. :func:`concat_and_cache_mla` and :func:`decode_concat_quant_fp8` take their arguments, each as
one launch; :func:`concat_cache_and_quant_mla` does the work of both in one. Where no kernel covers a call the unfused
chain runs. ``docs/vllm.md`` has the lines that plug them in, and says where bytes differ from vLLM's.
"""

from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.dispatch import prepare
from mlaprep.clients.errors import NotCovered
from mlaprep.clients.inverse_scales import fix_scale, inverse_of
from mlaprep.clients.tensors import dense, kind_of, shape_error

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.client import KernelClient

__all__ = ["concat_and_cache_mla", "concat_cache_and_quant_mla", "decode_concat_quant_fp8", "fix_scale"]


def concat_and_cache_mla(
    kv_c: "Tensor",
    k_pe: "Tensor",
    kv_cache: "Tensor",
    slot_mapping: "Tensor",
    kv_cache_dtype: str,
    scale: "Tensor",
    *,
    client: "KernelClient | None" = None,
) -> None:
    """Write ``[kv_c | k_pe]`` to the cache rows that ``slot_mapping`` names: one launch where a kernel covers it.

    Args:
        kv_c: ``[N, R]`` bf16 or fp16, N at least T; rows beyond T, which pad a graph's batch, are not read.
        k_pe: ``[N, D]`` or ``[N, 1, D]``, as ``kv_c``.
        kv_cache: ``[blocks, block, W]``, written in place; one without elements takes nothing.
        slot_mapping: ``[T]`` int64 or int32; a negative slot writes nothing.
        kv_cache_dtype: ``auto`` keeps the input's elements (W = R + D of its dtype); ``fp8`` and ``fp8_e4m3`` divide
            by ``scale`` and round to e4m3fn (W = R + D bytes); ``fp8_ds_mla`` has a scale for every 128 latent
            elements (W = R + R/32 + 2 D bytes).
        scale: one float32 on the device, for ``fp8`` and ``fp8_e4m3``; else not looked at.
        client: by default one made from the environment.

    Raises:
        NotCovered: a ``kv_cache_dtype`` of vLLM's that is none of these; leave vLLM's own operation in place.
        TypeError, ValueError: arguments that nothing could take.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
    """
    layout = _layout(kv_cache_dtype)
    slots = _slots(slot_mapping)
    if not _holds_rows(kv_cache):
        return
    tokens = len(slots)
    options = {"kv_scale_inv": inverse_of(scale)} if layout == "fp8" else {}
    latent = (_first(kv_c, tokens), _first(k_pe, tokens), kv_cache, slots)
    _prepare(None, None, *latent, client=client, layout=layout, write_q=False, **options)


def decode_concat_quant_fp8(
    decode_ql_nope: "Tensor",
    decode_q_pe: "Tensor",
    scale: "Tensor",
    scale_ub: None = None,
    *,
    client: "KernelClient | None" = None,
) -> "Tensor":
    """``[decode_ql_nope | decode_q_pe] / scale`` as e4m3fn: one launch where a kernel covers it.

    Args:
        decode_ql_nope: ``[T, H, R]`` bf16 or fp16; any token and head strides, such as a transposed bmm result's.
        decode_q_pe: ``[T, H, D]``, same dtype.
        scale: one float32 on the device.
        scale_ub: None; a static scale has no upper bound.
        client: by default one made from the environment.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn, new.

    Raises:
        TypeError, ValueError: arguments that nothing could take.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
    """
    if scale_ub is not None:
        raise ValueError("scale_ub: given beside a static scale, which it cannot bound; leave it out")
    inverse = inverse_of(scale)
    nothing = (None, None, None, None)
    query = _prepare(decode_ql_nope, decode_q_pe, *nothing, client=client, write_kv=False, q_scale_inv=inverse)
    assert query is not None
    return query


def concat_cache_and_quant_mla(
    decode_ql_nope: "Tensor",
    decode_q_pe: "Tensor",
    kv_c: "Tensor",
    k_pe: "Tensor",
    kv_cache: "Tensor",
    slot_mapping: "Tensor",
    kv_cache_dtype: str,
    q_scale: "Tensor",
    k_scale: "Tensor",
    *,
    quantize_query: bool | None = None,
    client: "KernelClient | None" = None,
) -> "Tensor":
    """Write latent rows and make the query: both operations above in one launch where a kernel covers it.

    Arguments as there, with N latent rows of which the first T are the queries' tokens. Slots beyond T (the
    prefill part of a mixed batch, which comes last) are written by a second launch.

    Args:
        q_scale: the queries' scale; looked at where they are quantised.
        k_scale: the cache's scale, as ``scale`` above.
        quantize_query: make e4m3fn queries; by default where the cache is ``fp8`` or ``fp8_e4m3``. ``auto`` has none.
            False only concatenates.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn, or as ``decode_ql_nope`` where it is not quantised.

    Raises:
        NotCovered, TypeError, ValueError, KernelNotReady: as above.
    """
    layout = _layout(kv_cache_dtype)
    if quantize_query is not None and type(quantize_query) is not bool:
        raise TypeError(f"quantize_query: found a {kind_of(quantize_query)}; pass True, False or None")
    quantizes = layout == "fp8" if quantize_query is None else quantize_query
    if quantizes and layout == "same":
        raise ValueError("quantize_query: true beside kv_cache_dtype auto; pass False, or make the cache fp8")
    slots = _slots(slot_mapping)
    if not isinstance(getattr(decode_ql_nope, "shape", None), tuple) or not len(decode_ql_nope.shape):
        raise TypeError(f"decode_ql_nope: found a {kind_of(decode_ql_nope)}; pass a torch.Tensor [T, H, R]")
    tokens = decode_ql_nope.shape[0]
    if len(slots) < tokens:
        raise shape_error("slot_mapping", slots, f"[{tokens}] or more, one for each query; -1 writes nothing")
    options: dict[str, Any] = {"layout": layout}
    if layout == "fp8" and not quantizes:
        options["layout"] = "fp8-q16"
    elif layout == "ds_mla":
        options["query_dtype"] = "e4m3" if quantizes else "input"
    if quantizes:
        options["q_scale_inv"] = inverse_of(q_scale, "q_scale")
    latent: tuple[Any, ...] = (_first(kv_c, tokens), _first(k_pe, tokens), kv_cache, slots[:tokens])
    writes = _holds_rows(kv_cache)
    if not writes:
        latent = (None, None, None, None)
    elif layout == "fp8":
        options["kv_scale_inv"] = inverse_of(k_scale, "k_scale")
    query = _prepare(decode_ql_nope, decode_q_pe, *latent, client=client, write_kv=writes, **options)
    assert query is not None
    rest = slice(tokens, len(slots))
    if writes and len(slots) > tokens:
        concat_and_cache_mla(kv_c[rest], k_pe[rest], kv_cache, slots[rest], kv_cache_dtype, k_scale, client=client)
    return query


_LAYOUTS: Final = {"auto": "same", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "ds_mla"}
_NAMES: Final = (
    "the names are mlaprep's: q_nope, q_rope, k_nope, k_rope, loc and q_scale_inv, kv_scale_inv are vLLM's "
    "decode_ql_nope, decode_q_pe, kv_c, k_pe, slot_mapping and the inverses of its scales"
)


def _prepare(*operands: Any, **options: Any) -> "Tensor | None":
    try:
        return prepare(*operands, **options)
    except (TypeError, ValueError) as error:
        error.add_note(_NAMES)
        raise


def _layout(kv_cache_dtype: object) -> str:
    if type(kv_cache_dtype) is not str:
        raise TypeError(f"kv_cache_dtype: found a {kind_of(kv_cache_dtype)}; pass one of {', '.join(_LAYOUTS)}")
    layout = _LAYOUTS.get(kv_cache_dtype)
    if layout is None:
        found = "fp8_e5m2, which no kernel writes" if kv_cache_dtype == "fp8_e5m2" else "another"
        raise NotCovered(
            f"kv_cache_dtype: asked for one of {', '.join(_LAYOUTS)}, found {found}; "
            "start vLLM with --kv-cache-dtype fp8_e4m3, or leave its own operation in place"
        )
    return layout


def _slots(slot_mapping: object) -> "Tensor":
    import torch

    slots = dense("slot_mapping", slot_mapping, (torch.int64, torch.int32), "[T]")
    return slots if slots.dim() == 1 else slots.flatten()


def _holds_rows(kv_cache: object) -> bool:
    import torch

    return not isinstance(kv_cache, torch.Tensor) or kv_cache.numel() > 0


def _first(rows: "Tensor", tokens: int) -> "Tensor":
    """The first rows; all of them, and whatever is no tensor, as it is."""
    import torch

    return rows[:tokens] if isinstance(rows, torch.Tensor) and rows.dim() and len(rows) > tokens else rows
