"""Workload: the tensors of a chain of layers, laid out as a model hands them over, and the bytes due from them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlaprep.clients.reference import prepare_chain

RANK = 512
ROPE_DIM = 64
ROW = RANK + ROPE_DIM
CACHE_ROWS = 65536
POSITIONS = 8192
"""Rows of the rotation table."""

# Widths of the projections that q_rope and the key halves are slices of (DeepSeek-V3's and Kimi's).
_Q_HEAD = 128 + ROPE_DIM
_Q_LORA = 1536
_FUSED = _Q_LORA + RANK + ROPE_DIM

_POISON_OUT = 0xA5
_POISON_CACHE = 0x3C


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: H local heads, T tokens, and whether the rotary columns are rotated."""

    heads: int
    tokens: int
    rope: bool = False

    @property
    def bytes(self) -> int:
        """What one layer must move: every bf16 input read once, every e4m3 output written once, and the slots.

        With rope, each token's position and its fp32 row of the table as well.
        """
        return self.tokens * ((self.heads + 1) * ROW * 3 + 8 + self.rope * (8 + 4 * ROPE_DIM))


class Layer(NamedTuple):
    """One layer's operands. The first six are a prepare call's arguments, in order."""

    q_nope: Tensor
    """``[T, H, 512]`` bf16, a transposed ``[H, T, 512]`` product: token stride 512, head stride T * 512."""
    q_rope: Tensor
    """``[T, H, 64]`` bf16, a slice of ``[T, H, 192]``."""
    k_nope: Tensor
    """``[T, 512]`` bf16, a slice of one fused ``[T, 2112]`` projection."""
    k_rope: Tensor
    """``[T, 64]`` bf16, from the same projection."""
    cache: Tensor
    """``[65536, 576]`` uint8."""
    loc: Tensor
    """``[T]`` int64, distinct slots in random order."""
    out: Tensor
    """``[T, H, 576]`` float8_e4m3fn."""
    positions: Tensor | None = None
    """``[T]`` int64, for cells with rope."""
    cos_sin: Tensor | None = None
    """``[8192, 64]`` float32, rows ``[cos | sin]``, one table for all layers."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self[:6]  # type: ignore[return-value, unused-ignore]

    @property
    def rotation(self) -> dict[str, Tensor]:
        """What a call is given beside :attr:`inputs`."""
        if self.positions is None or self.cos_sin is None:
            return {}
        return {"positions": self.positions, "cos_sin_cache": self.cos_sin}


class Due(NamedTuple):
    """The bytes of one layer after one call: the query, and the whole cache."""

    query: Tensor
    cache: Tensor


def fixed_strides(heads: int) -> dict[str, int]:
    """The strides of :class:`Layer` that do not depend on T, as fields of a spec."""
    return {
        "q_nope_token_stride": RANK,
        "q_rope_token_stride": heads * _Q_HEAD,
        "q_rope_head_stride": _Q_HEAD,
        "k_nope_token_stride": _FUSED,
        "k_rope_token_stride": _FUSED,
        "cache_row_stride": ROW,
    }


def cache_pools(layers: int, device: str = "cuda") -> Tensor:
    """``[layers, 65536, 576]`` uint8: a pool for each layer, shared by all cells."""
    return torch.empty((layers, CACHE_ROWS, ROW), dtype=torch.uint8, device=device)


def make_layers(cell: Cell, pools: Tensor, seed: int) -> list[Layer]:
    """Layers of distinct memory with random data; never zeros, some of it far beyond what e4m3 can hold."""
    device = pools.device
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens, heads = cell.tokens, cell.heads

    def values(*shape: int) -> Tensor:
        data = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(3.0)
        spikes = torch.rand(shape, generator=generator, device=device) < 1 / 256
        data = torch.where(spikes, data * 400.0, data).to(torch.bfloat16)
        return data.masked_fill_(data == 0, 1.0)

    table = rotation_table(device) if cell.rope else None
    layers = []
    for pool in pools:
        product = values(heads, tokens, RANK)
        query = values(tokens, heads, _Q_HEAD)
        fused = values(tokens, _FUSED)
        slots = torch.randperm(CACHE_ROWS, generator=generator, device=device)[:tokens].clone()
        layers.append(
            Layer(
                product.transpose(0, 1),
                query[..., _Q_HEAD - ROPE_DIM :],
                fused[:, _Q_LORA : _Q_LORA + RANK],
                fused[:, _Q_LORA + RANK :],
                pool,
                slots,
                torch.empty((tokens, heads, ROW), dtype=torch.float8_e4m3fn, device=device),
                torch.randint(POSITIONS, (tokens,), generator=generator, device=device) if cell.rope else None,
                table,
            )
        )
    return layers


def rotation_table(device: torch.device) -> Tensor:
    """``[8192, 64]`` float32: cosines, then sines, of position times 10000^(-2i/64)."""
    frequencies = 10000.0 ** (-torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM)
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)


def make_due(layers: list[Layer]) -> list[Due]:
    """What the unfused chain makes of each layer, starting from a poisoned cache."""
    due = []
    for layer in layers:
        cache = torch.full_like(layer.cache, _POISON_CACHE)
        query = prepare_chain(*layer._replace(cache=cache).inputs, **_rotation_of(layer))
        assert query is not None
        due.append(Due(query.view(torch.uint8), cache))
    return due


def reference_holds_on_cpu(layer: Layer, due: Due) -> bool:
    """Whether the chain gives the same bytes on the CPU, where it takes another path through torch."""
    cache = torch.full_like(layer.cache, _POISON_CACHE, device="cpu")
    inputs = {name: value for name, value in layer._asdict().items() if value is not None and name != "cache"}
    moved = layer._replace(cache=cache, **{name: value.cpu() for name, value in inputs.items()})
    query = prepare_chain(*moved.inputs, **_rotation_of(moved))
    assert query is not None
    return bool(torch.equal(query.view(torch.uint8), due.query.cpu()) and torch.equal(cache, due.cache.cpu()))


def poison(layers: list[Layer], queries: list[Tensor]) -> None:
    """Overwrite every result, so that what a contender does not write shows."""
    for layer in layers:
        layer.cache.fill_(_POISON_CACHE)
    for query in queries:
        query.view(torch.uint8).fill_(_POISON_OUT)


def _rotation_of(layer: Layer) -> dict[str, Any]:
    return {"rope": "interleaved", **layer.rotation} if layer.rotation else {}
