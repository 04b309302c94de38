"""Call: one prepare call as values, what must come of it, and the check that kernel and chain both do it."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kernel import oracle
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.spec import KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Call:
    """Operands on the CPU, results as guarded buffers that every run fills with poison first."""

    q_nope: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_nope: torch.Tensor | None
    k_rope: torch.Tensor | None
    loc: torch.Tensor | None
    pool: Guarded | None
    out: Guarded | None = None
    cache_dtype: torch.dtype = E4M3
    page: int = 0
    """0 hands the pool over as ``[S, W]``, n as ``[S/n, n, W]``."""
    q_scale_inv: torch.Tensor | None = None
    kv_scale_inv: torch.Tensor | None = None
    reserved_slot: int | None = None
    dcp_world: int = 1
    dcp_rank: int = 0
    dcp_interleave: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    """Spec fields beside those that follow from the operands."""

    @property
    def spec(self) -> KernelSpec:
        lead = self.q_nope if self.q_nope is not None else self.k_nope
        rope = self.q_rope if self.q_nope is not None else self.k_rope
        assert lead is not None
        return KernelSpec(
            **{
                "num_heads": 1 if self.q_nope is None else self.q_nope.shape[1],
                "kv_lora_rank": lead.shape[-1],
                "rope_dim": 0 if rope is None else rope.shape[-1],
                "dtype": NAMES[lead.dtype],
                "loc_dtype": "i64" if self.loc is None else f"i{8 * self.loc.element_size()}",
                "q_scale": "none" if self.q_scale_inv is None else "scalar",
                "kv_scale": "none" if self.kv_scale_inv is None else "scalar",
                "reserved_slot": self.reserved_slot is not None,
                "dcp_world": self.dcp_world,
                "dcp_interleave": self.dcp_interleave,
                "write_q": self.q_nope is not None,
                "write_kv": self.k_nope is not None,
                "elements_per_thread": None if self._on_16_bytes else 8,
                **self.fields,
            }
        )

    @property
    def _on_16_bytes(self) -> bool:
        """Whether 16-byte stores fit the pool and the result."""
        results = [buffer for buffer in (self.pool, self.out) if buffer is not None]
        return all(
            step % 16 == 0
            for buffer in results
            for step in (
                buffer.offset,
                *(st for st, size in zip(buffer.stride[:-1], buffer.shape[:-1], strict=True) if size > 1),
            )
        )

    def with_fields(self, **fields: Any) -> "Call":
        return replace(self, fields=self.fields | fields)

    def with_rank(self, rank: int) -> "Call":
        return replace(self, dcp_rank=rank)


@dataclass(frozen=True)
class Result:
    """Bytes on the CPU: the query and, where the call gave one, the whole buffer around it; the pool's whole buffer."""

    query: torch.Tensor | None
    out: torch.Tensor | None
    pool: torch.Tensor | None


def expected(call: Call) -> Result:
    """What the oracle says."""
    query = out = pool = None
    if call.q_nope is not None:
        parts = [part for part in (call.q_nope, call.q_rope) if part is not None]
        query = torch.cat([oracle.e4m3(part, call.q_scale_inv) for part in parts], dim=-1)
        if call.out is not None:
            out, view = call.out.allocate(torch.device("cpu"))
            view.copy_(query)
    if call.pool is not None and call.loc is not None and call.k_nope is not None:
        pool, rows = call.pool.allocate(torch.device("cpu"))
        parts = [part for part in (call.k_nope, call.k_rope) if part is not None]
        new = torch.cat([oracle.e4m3(part, call.kv_scale_inv) for part in parts], dim=-1)
        new = new.reshape(len(call.loc), rows.shape[1])
        for token, slot in enumerate(call.loc.tolist()):
            row = oracle.cache_row(
                slot, rows.shape[0], call.reserved_slot, call.dcp_world, call.dcp_rank, call.dcp_interleave
            )
            if row is not None:
                rows[row] = new[token]
    return Result(query, out, pool)


def run(call: Call, device: KernelDevice, *, fused: bool) -> Result:
    """The call on a device, through the handle or the chain, on buffers of its own."""
    place = device.device
    names = ("q_nope", "q_rope", "k_nope", "k_rope", "loc", "q_scale_inv", "kv_scale_inv")
    tensors = {name: moved(getattr(call, name), place) for name in names}
    whole_pool = whole_out = cache = out = None
    if call.pool is not None:
        whole_pool, view = call.pool.allocate(place)
        cache = view.view(call.cache_dtype)
        cache = cache if not call.page else cache.unflatten(0, (-1, call.page))
    if call.out is not None:
        whole_out, view = call.out.allocate(place)
        out = view.view(E4M3)
    positional = (tensors["q_nope"], tensors["q_rope"], tensors["k_nope"], tensors["k_rope"], cache, tensors["loc"])
    options = {
        "q_scale_inv": tensors["q_scale_inv"],
        "kv_scale_inv": tensors["kv_scale_inv"],
        "reserved_slot": call.reserved_slot,
        "dcp_rank": call.dcp_rank,
        "out": out,
    }
    if fused:
        with device.memory(list(tensors.values()), [cache, out]):
            query = device.handle(call.spec)(*positional, **options)
    else:
        query = prepare_chain(
            *positional,
            **options,
            dcp_world=call.dcp_world,
            dcp_interleave=call.dcp_interleave,
            write_q=call.q_nope is not None,
            write_kv=call.k_nope is not None,
        )
    if query is not None:
        assert query.dtype == E4M3
        assert query.device == place
        assert out is None or query.data_ptr() == out.data_ptr()
    return Result(
        None if query is None else query.view(torch.uint8).cpu(),
        None if whole_out is None else whole_out.cpu(),
        None if whole_pool is None else whole_pool.cpu(),
    )


def check(call: Call, device: KernelDevice) -> Result:
    """Kernels of either width a thread and the chain all give the oracle's bytes, and leave every other byte alone."""
    wanted = expected(call)
    compare(run(call, device, fused=False), wanted, "chain")
    for elements in sorted({call.spec.elements_per_thread, 8}):
        found = run(call.with_fields(elements_per_thread=elements), device, fused=True)
        compare(found, wanted, f"kernel of {elements} elements a thread")
    return wanted


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


def moved(tensor: torch.Tensor | None, place: torch.device) -> torch.Tensor | None:
    """The tensor on another device, strides, offset and all."""
    if tensor is None or tensor.device == place:
        return tensor
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(place)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def values(*shape: int, dtype: str = "bf16", seed: int = 0) -> torch.Tensor:
    """Inputs of all kinds: every bit pattern may come, half of them in e4m3's range."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(DTYPES[dtype])
    exponent = torch.randint(-12, 11, shape, generator=generator)
    tame = (torch.randn(shape, generator=generator) * 2.0**exponent).to(DTYPES[dtype])
    return torch.where(torch.rand(shape, generator=generator) < 0.5, bits, tame)


def make(
    tokens: int,
    heads: int = 3,
    rank: int = 32,
    rope_dim: int = 16,
    *,
    rows: int = 16,
    loc: list[int] | None = None,
    loc_dtype: torch.dtype = torch.int64,
    dtype: str = "bf16",
    pitch: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call with packed sources; ``loc`` counts down from the last row where it is not given."""
    slots = [rows - 1 - token for token in range(tokens)] if loc is None else loc
    assert len(slots) == tokens
    call = {
        "q_nope": values(tokens, heads, rank, dtype=dtype, seed=seed),
        "q_rope": values(tokens, heads, rope_dim, dtype=dtype, seed=seed + 1) if rope_dim else None,
        "k_nope": values(tokens, rank, dtype=dtype, seed=seed + 2),
        "k_rope": values(tokens, rope_dim, dtype=dtype, seed=seed + 3) if rope_dim else None,
        "loc": torch.tensor(slots, dtype=loc_dtype),
        "pool": Guarded.pool(rows, rank + rope_dim, pitch),
    }
    return Call(**(call | options))  # type: ignore[arg-type]
