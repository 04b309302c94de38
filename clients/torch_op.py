"""The prepare step as operations of ``torch.library``, for graphs that ``torch.compile`` makes.

Importing this module registers them, once a process; it is the one module of this package that imports torch.

=====================  ==============================  =======================================
operation              writes                          returns
=====================  ==============================  =======================================
``mlaprep::prepare``   ``kv_cache``                    the query
``mlaprep::query``     nothing                         the query, as with ``write_kv=False``
``mlaprep::write``     ``kv_cache``                    nothing, as with ``write_q=False``
``mlaprep::into``      ``out``, and ``kv_cache``       nothing; the query is in ``out``
                       where there is one
=====================  ==============================  =======================================

:func:`prepare` takes the arguments of :func:`mlaprep.clients.prepare` and calls the one that fits.
"""

from collections.abc import Mapping
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor

from mlaprep.clients import dispatch
from mlaprep.clients.cache_layout import cache_layout
from mlaprep.clients.named_clients import forget_client, name_client, named_client
from mlaprep.clients.spelling import OWN, slots_come_second
from mlaprep.clients.tensors import kind_of, same_device

__all__ = ["forget_client", "name_client", "prepare"]


class OpOptions(TypedDict, total=False):
    """Keyword options of :func:`prepare`; those of :class:`mlaprep.clients.dispatch.PrepareOptions`."""

    positions: Tensor | None
    cos_sin_cache: Tensor | None
    q_scale_inv: Tensor | None
    kv_scale_inv: Tensor | None
    layout: str
    query_dtype: str | None
    tile_scale: str | None
    rope: str
    pad_heads_to: int | None
    reserved_slot: int | None
    dcp_world: int
    dcp_rank: int
    dcp_interleave: int


def prepare(
    q_nope: Tensor | None,
    q_rope: Tensor | None,
    k_nope: Tensor | None,
    k_rope: Tensor | None,
    kv_cache: Tensor | None,
    loc: Tensor | None,
    *,
    client: str | None = None,
    out: Tensor | None = None,
    write_kv: bool = True,
    write_q: bool = True,
    **options: Unpack[OpOptions],
) -> Tensor | None:
    """:func:`mlaprep.clients.prepare` as one operation in a graph: no graph break, under ``fullgraph=True`` too.

    Arguments, result and bytes are the same, but that ``client`` is the name that :func:`name_client` gave, or
    None for the default client. On CUDA one launch where a kernel covers the call, else the unfused chain.
    Gradients do not pass: the result needs none.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn or as ``q_nope``, contiguous; ``out`` where it is given; None with
        ``write_q=False``.

    Raises:
        TypeError, ValueError: arguments that nothing could take, when the operation runs; options that do not
            go together, while the graph is made.
        KernelNotReady: as for :func:`mlaprep.clients.prepare`.
    """
    if client is not None and type(client) is not str:
        raise TypeError(f"client is a {type(client).__name__}; give the name that name_client(name, client) returns")
    _check_call((q_nope, q_rope, k_nope, k_rope, kv_cache, loc), out, options)
    if not (write_q or write_kv):
        raise ValueError("write_q: false beside write_kv false, which leaves nothing to do; set one of them")
    if not write_q:
        if out is not None:
            raise ValueError("out: given beside write_q=False, which makes no query; leave it out")
        torch.ops.mlaprep.write(k_nope, k_rope, kv_cache, loc, client=client, **options)
        return None
    if not write_kv:
        k_nope = k_rope = kv_cache = loc = None
    if out is not None:
        torch.ops.mlaprep.into(q_nope, q_rope, k_nope, k_rope, kv_cache, loc, out, client=client, **options)
        return out
    query: Tensor
    if write_kv:
        query = torch.ops.mlaprep.prepare(q_nope, q_rope, k_nope, k_rope, kv_cache, loc, client=client, **options)
    else:
        query = torch.ops.mlaprep.query(q_nope, q_rope, client=client, **options)
    return query


def _check_call(tensors: tuple[object, ...], out: object, options: Mapping[str, object]) -> None:
    """What torch's own check of a schema would refuse without a typed error, or take for something else."""
    _check_order(tensors)
    if unknown := sorted(options.keys() - OpOptions.__annotations__.keys()):
        raise TypeError(
            f"{', '.join(unknown)}: no such option; pass any of {', '.join(sorted(OpOptions.__annotations__))}"
        )
    for name, tensor in (*zip(OWN, tensors, strict=True), ("out", out)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: found a {kind_of(tensor)}; pass a torch.Tensor")
    for name, value in options.items():
        kind, word = next((pair for pair in _KINDS if name in pair[2]), _TENSOR)[:2]
        if isinstance(value, bool) or not ((value is None and name in _MAY_LACK) or isinstance(value, kind)):
            raise TypeError(f"{name}: found a {kind_of(value)}; pass {word}")


def _check_order(tensors: tuple[object, ...]) -> None:
    """The schema says which tensor is written, so it holds for one order of the arguments alone."""
    if slots_come_second(tensors):
        raise TypeError(f"q_rope: found slots in its place; an operation takes the order ({', '.join(OWN)}) alone")


_KINDS: Final = (
    (str, "a string", ("layout", "query_dtype", "tile_scale", "rope")),
    ((int, torch.SymInt), "an int", ("pad_heads_to", "reserved_slot", "dcp_world", "dcp_rank", "dcp_interleave")),
)
_TENSOR: Final = (Tensor, "a torch.Tensor", ())
_MAY_LACK: Final = OpOptions.__annotations__.keys() - {"layout", "rope", "dcp_world", "dcp_rank", "dcp_interleave"}

_OPTIONS: Final = (
    "*, Tensor? positions=None, Tensor? cos_sin_cache=None, Tensor? q_scale_inv=None, Tensor? kv_scale_inv=None, "
    "str layout='fp8', str? query_dtype=None, str? tile_scale=None, str rope='none', int? pad_heads_to=None, "
    "int? reserved_slot=None, int dcp_world=1, int dcp_rank=0, int dcp_interleave=1, str? client=None"
)
_QUERY: Final = "Tensor q_nope, Tensor? q_rope"
_LATENT: Final = "Tensor k_nope, Tensor? k_rope, Tensor(a!) kv_cache, Tensor loc"
_MAYBE_LATENT: Final = "Tensor? k_nope, Tensor? k_rope, Tensor(a!)? kv_cache, Tensor? loc"
_SCHEMAS: Final = {
    "prepare": f"({_QUERY}, {_LATENT}, {_OPTIONS}) -> Tensor",
    "query": f"({_QUERY}, {_OPTIONS}) -> Tensor",
    "write": f"({_LATENT}, {_OPTIONS}) -> ()",
    "into": f"({_QUERY}, {_MAYBE_LATENT}, Tensor(b!) out, {_OPTIONS}) -> ()",
}


def _prepare(
    q_nope: Tensor,
    q_rope: Tensor | None,
    k_nope: Tensor,
    k_rope: Tensor | None,
    kv_cache: Tensor,
    loc: Tensor,
    *,
    client: str | None = None,
    **options: Any,
) -> Tensor | None:
    operands = (q_nope, q_rope, k_nope, k_rope, kv_cache, loc)
    _check_order(operands)
    return dispatch.prepare(*operands, client=named_client(client), **options)


def _query(q_nope: Tensor, q_rope: Tensor | None, *, client: str | None = None, **options: Any) -> Tensor | None:
    asked = named_client(client)
    return dispatch.prepare(q_nope, q_rope, None, None, None, None, client=asked, write_kv=False, **options)


def _write(
    k_nope: Tensor,
    k_rope: Tensor | None,
    kv_cache: Tensor,
    loc: Tensor,
    *,
    client: str | None = None,
    **options: Any,
) -> None:
    asked = named_client(client)
    dispatch.prepare(None, None, k_nope, k_rope, kv_cache, loc, client=asked, write_q=False, **options)


def _into(
    q_nope: Tensor,
    q_rope: Tensor | None,
    k_nope: Tensor | None,
    k_rope: Tensor | None,
    kv_cache: Tensor | None,
    loc: Tensor | None,
    out: Tensor,
    *,
    client: str | None = None,
    **options: Any,
) -> None:
    operands = (q_nope, q_rope, k_nope, k_rope, kv_cache, loc)
    _check_order(operands)
    writes = kv_cache is not None
    dispatch.prepare(*operands, client=named_client(client), out=out, write_kv=writes, **options)


def _new_query(q_nope: Tensor, q_rope: Tensor | None, *latent: Tensor | None, **options: Any) -> Tensor:
    _check_devices((*OWN[: 2 + len(latent)],), (q_nope, q_rope, *latent), options)
    layout = cache_layout(options.get("layout", "fp8"), options.get("query_dtype"), options.get("tile_scale"))
    tokens, heads, width = q_nope.shape
    padded = options.get("pad_heads_to")
    if q_rope is not None:
        width = width + q_rope.shape[-1]
    shape = (tokens, heads if padded is None else padded, width)
    return q_nope.new_empty(shape, dtype=layout.result_dtype(q_nope.dtype))


def _nothing(*tensors: Tensor | None, **options: Any) -> None:
    names = OWN[2:] if len(tensors) < len(OWN) else (*OWN, "out")
    _check_devices(names, tensors, options)
    cache_layout(options.get("layout", "fp8"), options.get("query_dtype"), options.get("tile_scale"))


def _check_devices(names: tuple[str, ...], tensors: tuple[Tensor | None, ...], options: Mapping[str, Any]) -> None:
    """One tensor on ``meta`` makes torch run this in place of the operation, which would then write nothing."""
    given = [*zip(names, tensors, strict=True), *options.items()]
    found = [(name, tensor) for name, tensor in given if isinstance(tensor, Tensor)]
    for name, tensor in found[1:]:
        same_device(name, tensor, *found[0])


_IMPLEMENTATIONS: Final = {
    "prepare": (_prepare, _new_query),
    "query": (_query, _new_query),
    "write": (_write, _nothing),
    "into": (_into, _nothing),
}


def _register() -> None:
    # A graph's kernel covers the strides that the code was written with, not those of a copy the compiler made.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    for name, schema in _SCHEMAS.items():
        run, fake = _IMPLEMENTATIONS[name]
        _library.define(name + schema, tags=tags)
        for key in ("CPU", "CUDA"):
            _library.impl(name, run, key)
        # Inputs that need grad are taken as they are and the result needs none, as outside of a graph.
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"mlaprep::{name}", fake, lib=_library)


# Operations outlive this module: after a reload, or a second import, those of the first stand.
if not hasattr(torch.ops.mlaprep, "prepare"):
    _library = torch.library.Library("mlaprep", "FRAGMENT")
    _register()
