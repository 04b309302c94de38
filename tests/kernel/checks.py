"""What must come of a call, and the check that kernel and chain both do it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kernel import oracle
from kernel.calls import E4M3, NAMES, TENSORS, Call, moved
from kernel.devices import KernelDevice

from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.errors import SpecError

KINDS = {"e4m3": np.uint8, "bf16": np.uint16, "fp16": np.uint16}


@dataclass(frozen=True)
class Result:
    """Bytes on the CPU: the query and, where the call gave one, the whole buffer around it; the pool's whole buffer."""

    query: torch.Tensor | None
    out: torch.Tensor | None
    pool: torch.Tensor | None


def converted(
    call: Call, tensor: torch.Tensor, kind: str, scale: torch.Tensor | None, *, rotary: bool = False
) -> oracle.Array:
    """A source ``[T, ..., n]`` as the bytes of a result of that kind."""
    rotates = rotary and call.rope != "none"
    if kind != "e4m3" and not rotates and scale is None:
        return tensor.contiguous().view(torch.uint8).numpy()
    exact = tensor.double().numpy()
    if rotates:
        exact = oracle.rotated(exact, angles_of(call, tensor.dim()), call.rope)
    factor = None if scale is None else scale.double().numpy().reshape(-1, *[1] * (tensor.dim() - 1))
    return as_bytes(oracle.codes(oracle.scaled(exact, factor), kind).astype(KINDS[kind]))


def as_bytes(array: oracle.Array) -> oracle.Array:
    return np.ascontiguousarray(array).view(np.uint8)


def angles_of(call: Call, dim: int) -> oracle.Array:
    """Each token's row of the table, shaped to go with sources of ``dim`` dimensions."""
    assert call.positions is not None
    assert call.cos_sin_cache is not None
    last = len(call.cos_sin_cache) - 1
    rows = [min(max(position, 0), last) for position in call.positions.tolist()]
    table = call.cos_sin_cache.double().numpy()[rows]
    return table.reshape(len(rows), *[1] * (dim - 2), table.shape[1])


def latent_rows(call: Call) -> oracle.Array:
    """The bytes of each token's cache row, ``[T, bytes]``."""
    nope, rope = (part if part is None or part.dim() == 2 else part[:, 0] for part in (call.k_nope, call.k_rope))
    assert nope is not None
    if call.layout == "ds_mla":
        codes, scales = oracle.tiled(nope.double().numpy(), call.tile_scale or "raw")
        parts = [codes.astype(np.uint8), as_bytes(scales)]
        kind = NAMES[nope.dtype]
    else:
        kind = NAMES[nope.dtype] if call.layout == "same" else "e4m3"
        parts = [converted(call, nope, kind, call.kv_scale_inv)]
    if rope is not None:
        parts.append(converted(call, rope, kind, call.kv_scale_inv, rotary=True))
    return np.concatenate(parts, axis=-1)


def query_kind(call: Call) -> str:
    quantised = call.layout == "fp8" or (call.layout == "ds_mla" and call.query_dtype != "input")
    return "e4m3" if quantised else NAMES[call.lead.dtype]


def expected(call: Call) -> Result:
    """What the oracle says."""
    query = out = pool = None
    if call.q_nope is not None:
        kind = query_kind(call)
        parts = [converted(call, call.q_nope, kind, call.q_scale_inv)]
        if call.q_rope is not None:
            parts.append(converted(call, call.q_rope, kind, call.q_scale_inv, rotary=True))
        made = np.concatenate(parts, axis=-1)
        padding = (call.pad_heads_to or made.shape[1]) - made.shape[1]
        query = torch.from_numpy(np.pad(made, ((0, 0), (0, padding), (0, 0))))
        if call.out is not None:
            out, view = call.out.allocate(torch.device("cpu"))
            if query.numel():
                view.copy_(query.view(view.dtype))
    if call.pool is not None and call.loc is not None and call.k_nope is not None:
        pool, _ = call.pool.allocate(torch.device("cpu"))
        new = torch.from_numpy(latent_rows(call))
        rules = call.reserved_slot, call.dcp_world, call.dcp_rank, call.dcp_interleave
        for token, slot in enumerate(call.loc.tolist()):
            row = oracle.cache_row(slot, call.pool.rows, *rules)
            if row is not None:
                place = call.pool.row(pool, row)
                place.copy_(new[token].view(place.dtype))
    return Result(query, out, pool)


def run(call: Call, device: KernelDevice, *, fused: bool) -> Result:
    """The call on a device, through the handle or the chain, on buffers of its own."""
    place = device.device
    tensors = {name: moved(getattr(call, name), place) for name in TENSORS}
    result_dtype = E4M3 if query_kind(call) == "e4m3" else call.lead.dtype
    whole_pool = whole_out = cache = out = None
    if call.pool is not None:
        whole_pool, view = call.pool.allocate(place)
        cache = view.view(call.cache_dtype if call.pool.itemsize == 1 else call.lead.dtype)
        cache = cache if not call.page else cache.unflatten(0, (-1, call.page))
    if call.out is not None:
        whole_out, view = call.out.allocate(place)
        out = view.view(result_dtype)
    positional = (tensors["q_nope"], tensors["q_rope"], tensors["k_nope"], tensors["k_rope"], cache, tensors["loc"])
    options = {name: tensors[name] for name in ("positions", "cos_sin_cache", "q_scale_inv", "kv_scale_inv")}
    options |= {"reserved_slot": call.reserved_slot, "dcp_rank": call.dcp_rank, "out": out}  # type: ignore[dict-item]
    if fused:
        with device.memory(list(tensors.values()), [cache, out]):
            query = device.handle(call.spec)(*positional, **options)  # type: ignore[arg-type]
    else:
        query = prepare_chain(*positional, **options, **chain_options(call))  # type: ignore[arg-type]
    if query is not None:
        assert query.dtype == result_dtype
        assert query.device == place
        assert out is None or query.data_ptr() == out.data_ptr()
    return Result(
        None if query is None else query.view(torch.uint8).cpu(),
        None if whole_out is None else whole_out.cpu(),
        None if whole_pool is None else whole_pool.cpu(),
    )


def chain_options(call: Call) -> dict[str, Any]:
    """What a handle's spec says and the chain must be told."""
    names = ("layout", "query_dtype", "tile_scale", "rope", "pad_heads_to", "dcp_world", "dcp_interleave")
    sides = {"write_q": call.q_nope is not None, "write_kv": call.k_nope is not None}
    return {name: getattr(call, name) for name in names} | sides


def check(call: Call, device: KernelDevice, *elements: int) -> Result:
    """Kernels and the chain all give the oracle's bytes, and leave every other byte alone.

    ``elements`` are widths a thread to try; by default the widest that pool and result allow, and 8.
    """
    wanted = expected(call)
    compare(run(call, device, fused=False), wanted, "chain")
    for width in elements or widths(call):
        found = run(call.with_fields(elements_per_thread=width), device, fused=True)
        compare(found, wanted, f"kernel of {width} elements a thread")
    return wanted


def widths(call: Call) -> list[int]:
    """The widest thread that pool and result allow, and the next best known."""
    every = every_width(call)
    return sorted({every[0], 8} & set(every))


def every_width(call: Call) -> list[int]:
    """All numbers of elements a thread that a kernel for this call may have, the widest first."""
    widest = call.spec.elements_per_thread
    return [width for width in (16, 8, 4, 2) if width <= widest and is_spec(call, width)]


def is_spec(call: Call, width: int) -> bool:
    try:
        call.spec_of(width)
    except SpecError:
        return False
    return True


def compare(found: Result, wanted: Result, who: str) -> None:
    for what in ("query", "out", "pool"):
        mine, oracles = getattr(found, what), getattr(wanted, what)
        assert (mine is None) == (oracles is None), f"{who}: {what}"
        if mine is not None and not torch.equal(mine, oracles):
            assert mine.shape == oracles.shape, f"{who}: {what} of shape {list(mine.shape)}"
            where = (mine != oracles).nonzero()
            first = tuple(where[0].tolist())
            raise AssertionError(
                f"{who}: {len(where)} bytes of {what} differ, the first at {first}: "
                f"{int(mine[first]):02x} instead of {int(oracles[first]):02x}"
            )
