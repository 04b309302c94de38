"""Spelling: one prepare call, whichever of two ways it was written.

This package's order is ``(q_nope, q_rope, k_nope, k_rope, kv_cache, loc)``. SGLang 0.5.23 calls its fused
functions as ``(kv_buffer, loc, cache_k_nope, cache_k_rope, q_nope, q_rope, num_warps=0, dcp_world_size=1,
dcp_rank=0)``. The second positional argument tells them apart: slots, one-dimensional integers, or columns of
the query.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from mlaprep.clients.tensors import kind_of

OWN: Final = ("q_nope", "q_rope", "k_nope", "k_rope", "kv_cache", "loc")
SGLANG: Final = (
    "kv_buffer",
    "loc",
    "cache_k_nope",
    "cache_k_rope",
    "q_nope",
    "q_rope",
    "num_warps",
    "dcp_world_size",
    "dcp_rank",
)

_MEANS: Final = {
    "kv_buffer": "kv_cache",
    "cache_k_nope": "k_nope",
    "cache_k_rope": "k_rope",
    "dcp_world_size": "dcp_world",
}
_FEWEST: Final = 6
_SIXTEEN_BITS: Final = 2
_REQUIRED: Final = {"own": OWN, "sglang": SGLANG[:_FEWEST]}
_SGLANG_ONLY: Final = frozenset({*_MEANS, "num_warps"})
_OWN_ONLY: Final = frozenset(_MEANS.values())
_ORDERS: Final = {"own": f"({', '.join(OWN)})", "sglang": f"({', '.join(SGLANG)})"}


def slots_come_second(positional: Sequence[Any]) -> bool:
    """Whether these positional arguments are in SGLang's order."""
    second = positional[1] if len(positional) > 1 else None
    try:
        return second is not None and not second.is_floating_point() and second.dim() == 1
    except AttributeError:  # no tensor: the check of a call names it
        return False


def slot_names(positional: Sequence[Any], keywords: Collection[str]) -> tuple[str, ...]:
    """This package's name of each argument of a call that :func:`canonical` takes, positional ones first."""
    order = SGLANG if slots_come_second(positional) else OWN
    return tuple(_MEANS.get(name, name) for name in (*order[: len(positional)], *keywords))


def canonical(
    positional: Sequence[Any], keywords: Mapping[str, Any], options: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The six tensors in this package's order, and the options by this package's names.

    SGLang's ``num_warps`` is accepted and has no effect, since launches are sized by measured plans. A pool of
    16-bit floats in its spelling means the layout ``same``, as it does there, unless ``layout`` says otherwise.

    Args:
        positional: what was passed by position, in either order.
        keywords: what was passed by name. Options other than the ones SGLang has may stand beside either order.
        options: names of this package's options.

    Raises:
        TypeError: an argument that is missing, given twice, unknown, or written one way among others written the
            other way; it is named.
    """
    theirs = slots_come_second(positional)
    if theirs and not keywords and _FEWEST <= len(positional) <= len(SGLANG):  # a drop-in's usual call
        return _from_sglang(*positional)
    aliases = sorted(_SGLANG_ONLY & keywords.keys())
    way = "sglang" if theirs or (aliases and len(positional) < 2) else "own"
    names = OWN if way == "own" else SGLANG
    if way == "own" and aliases:
        raise TypeError(f"{aliases[0]}: a name of the order {_ORDERS['sglang']} beside arguments of {_mixture('own')}")
    if way == "sglang" and (foreign := sorted(_OWN_ONLY & keywords.keys())):
        raise TypeError(f"{foreign[0]}: a name of the order {_ORDERS['own']} beside arguments of {_mixture('sglang')}")
    if len(positional) > len(names):
        raise TypeError(f"found {len(positional)} positional arguments; pass at most {_ORDERS[way]}, options by name")
    given = dict(zip(names, positional, strict=False))
    if twice := sorted(given.keys() & keywords.keys()):
        raise TypeError(f"{twice[0]}: given by position and by name; pass it once")
    given |= keywords
    if unknown := sorted(given.keys() - {*names, *options}):
        raise TypeError(f"{', '.join(unknown)}: no such option; pass any of {', '.join(sorted(options))}")
    if missing := [name for name in _REQUIRED[way] if name not in given]:
        raise TypeError(f"{', '.join(missing)}: missing; pass {_ORDERS[way]}, None where there is none")
    if way == "own":
        return tuple(given.pop(name) for name in OWN), given
    tensors, settled = _from_sglang(**{name: given.pop(name) for name in SGLANG if name in given})
    return tensors, settled | given


def _from_sglang(
    kv_buffer: Any,
    loc: Any,
    cache_k_nope: Any,
    cache_k_rope: Any,
    q_nope: Any,
    q_rope: Any,
    num_warps: object = 0,
    dcp_world_size: object = 1,
    dcp_rank: object = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(num_warps) is not int:
        raise TypeError(f"num_warps: found a {kind_of(num_warps)}; pass an int, which has no effect here")
    options = {"dcp_world": dcp_world_size, "dcp_rank": dcp_rank}
    try:
        if kv_buffer.is_floating_point() and kv_buffer.element_size() == _SIXTEEN_BITS:
            options["layout"] = "same"
    except AttributeError:  # no tensor: the check of a call names it
        pass
    return (q_nope, q_rope, cache_k_nope, cache_k_rope, kv_buffer, loc), options


def _mixture(way: str) -> str:
    return f"the order {_ORDERS[way]}; write the whole call in one of them"
