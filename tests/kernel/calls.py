"""Call: one prepare call as values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kernel.memory import Guarded

from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
E4M3 = torch.float8_e4m3fn

TENSORS = (
    "q_nope",
    "q_rope",
    "k_nope",
    "k_rope",
    "loc",
    "positions",
    "cos_sin_cache",
    "q_scale_inv",
    "kv_scale_inv",
)
"""Operands that are read."""


@dataclass(frozen=True)
class Call:
    """Operands on the CPU, results as guarded buffers that every run fills with poison first."""

    q_nope: torch.Tensor | None
    q_rope: torch.Tensor | None
    k_nope: torch.Tensor | None
    k_rope: torch.Tensor | None
    loc: torch.Tensor | None
    pool: Guarded | None
    """``[S, width]`` or ``[pages, page, width]``."""
    out: Guarded | None = None
    cache_dtype: torch.dtype = E4M3
    """E4M3 or uint8; pools of ``same`` have the input dtype."""
    page: int = 0
    """0 hands the pool over as it is, n a pool ``[S, width]`` as ``[S/n, n, width]``."""
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    q_scale_inv: torch.Tensor | None = None
    """One element, or one a token where it has a dimension."""
    kv_scale_inv: torch.Tensor | None = None
    layout: str = "fp8"
    query_dtype: str | None = None
    tile_scale: str | None = None
    rope: str = "none"
    pad_heads_to: int | None = None
    reserved_slot: int | None = None
    dcp_world: int = 1
    dcp_rank: int = 0
    dcp_interleave: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    """Spec fields beside those that follow from the operands."""

    @property
    def lead(self) -> torch.Tensor:
        lead = self.q_nope if self.q_nope is not None else self.k_nope
        assert lead is not None
        return lead

    @property
    def spec(self) -> KernelSpec:
        """The kernel for this call with the widest accesses that its pool and result allow; sources are not asked."""
        if "elements_per_thread" in self.fields:
            return self.spec_of(self.fields["elements_per_thread"])
        for elements in (16, 8, 4, 2):
            try:
                spec = self.spec_of(elements)
            except SpecError:
                continue
            pool = self.pool is None or not any(step % spec.stride_unit("cache_row_stride") for step in self.pool.steps)
            out = self.out is None or not any(step % spec.stride_unit("out_token_stride") for step in self.out.steps)
            if pool and out:
                return spec
        return self.spec_of(None)

    def spec_of(self, elements: int | None) -> KernelSpec:
        """The kernel for this call that moves ``elements`` a thread."""
        rope = self.q_rope if self.q_nope is not None else self.k_rope
        paged = self.pool is not None and len(self.pool.shape) == 3
        scale = self.q_scale_inv
        return KernelSpec(
            **{
                "num_heads": 1 if self.q_nope is None else self.q_nope.shape[1],
                "kv_lora_rank": self.lead.shape[-1],
                "rope_dim": 0 if rope is None else rope.shape[-1],
                "dtype": NAMES[self.lead.dtype],
                "layout": self.layout,
                "query_dtype": self.query_dtype,
                "tile_scale": self.tile_scale,
                "rope": self.rope,
                "loc_dtype": index_name(self.loc),
                "position_dtype": index_name(self.positions),
                "q_scale": "none" if scale is None else "token" if scale.dim() else "scalar",
                "kv_scale": "none" if self.kv_scale_inv is None else "scalar",
                "reserved_slot": self.reserved_slot is not None,
                "dcp_world": self.dcp_world,
                "dcp_interleave": self.dcp_interleave,
                "pad_heads_to": self.pad_heads_to,
                "page_size": self.pool.shape[1] if paged and self.pool is not None else 1,
                "write_q": self.q_nope is not None,
                "write_kv": self.k_nope is not None,
                **self.fields,
                "elements_per_thread": elements,
            }
        )

    def with_fields(self, **fields: Any) -> "Call":
        return replace(self, fields=self.fields | fields)

    def with_rank(self, rank: int) -> "Call":
        return replace(self, dcp_rank=rank)


def index_name(indices: torch.Tensor | None) -> str:
    return "i64" if indices is None else f"i{8 * indices.element_size()}"


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


def angles(rows: int, rope_dim: int, seed: int = 0) -> torch.Tensor:
    """A table ``[rows, rope_dim]`` of cosines and sines, full fp32 mantissas."""
    generator = torch.Generator().manual_seed(seed)
    angle = (torch.rand(rows, rope_dim // 2, generator=generator, dtype=torch.float64) - 0.5) * 2e4
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def make(
    tokens: int,
    heads: int = 3,
    rank: int = 32,
    rope_dim: int = 16,
    *,
    rows: int = 16,
    loc: Sequence[int] | None = None,
    loc_dtype: torch.dtype = torch.int64,
    dtype: str = "bf16",
    pitch: int | None = None,
    seed: int = 0,
    layout: str = "fp8",
    rope: str = "none",
    **options: Any,
) -> Call:
    """A call with packed sources; ``loc`` counts down from the last row and positions are 0 … T-1 where not given."""
    slots = [rows - 1 - token for token in range(tokens)] if loc is None else loc
    assert len(slots) == tokens
    call = {
        "q_nope": values(tokens, heads, rank, dtype=dtype, seed=seed),
        "q_rope": values(tokens, heads, rope_dim, dtype=dtype, seed=seed + 1) if rope_dim else None,
        "k_nope": values(tokens, rank, dtype=dtype, seed=seed + 2),
        "k_rope": values(tokens, rope_dim, dtype=dtype, seed=seed + 3) if rope_dim else None,
        "loc": torch.tensor(slots, dtype=loc_dtype),
        "pool": pool_of(layout, rows, rank, rope_dim, pitch),
        "layout": layout,
        "rope": rope,
    }
    if rope != "none":
        call |= {"positions": torch.arange(tokens), "cos_sin_cache": angles(tokens + 3, rope_dim, seed + 4)}
    return Call(**(call | options))  # type: ignore[arg-type]


def cache_width(layout: str, rank: int, rope_dim: int) -> int:
    """Elements of a cache row."""
    return rank + rope_dim if layout != "ds_mla" else rank + rank // 128 * 4 + rope_dim * 2


def pool_of(layout: str, rows: int, rank: int, rope_dim: int, pitch: int | None = None) -> Guarded:
    return Guarded.pool(rows, cache_width(layout, rank, rope_dim), pitch, itemsize=2 if layout == "same" else 1)


def paged_pool(layout: str, pages: int, page: int, rank: int, rope_dim: int, *, pad: int = 0, gap: int) -> Guarded:
    """Pages that lie ``gap`` elements apart, rows ``pad``."""
    width, itemsize = cache_width(layout, rank, rope_dim), 2 if layout == "same" else 1
    return Guarded.paged(pages, page, width, width + pad, gap, itemsize=itemsize)
