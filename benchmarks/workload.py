"""Workload: the tensors of a chain of layers, laid out as a model hands them over, and the bytes due from them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mlaprep.clients.reference import prepare_chain

RANK = 512
ROPE_DIM = 64
ROW = RANK + ROPE_DIM
CACHE_ROWS = 65536

# Widths of the projections that q_rope and the key halves are slices of (DeepSeek-V3's and Kimi's).
_Q_HEAD = 128 + ROPE_DIM
_Q_LORA = 1536
_FUSED = _Q_LORA + RANK + ROPE_DIM

_POISON_OUT = 0xA5
_POISON_CACHE = 0x3C
_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: H local heads, T tokens."""

    heads: int
    tokens: int

    @property
    def bytes(self) -> int:
        """What one layer must move: every bf16 input read once, every e4m3 output written once, and the slots."""
        return self.tokens * ((self.heads + 1) * ROW * 3 + 8)


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

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self[:6]


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
            )
        )
    return layers


def make_due(layers: list[Layer]) -> list[Due]:
    """What the unfused chain makes of each layer, starting from a poisoned cache."""
    due = []
    for layer in layers:
        cache = torch.full_like(layer.cache, _POISON_CACHE)
        query = prepare_chain(*layer._replace(cache=cache).inputs)
        assert query is not None
        due.append(Due(query.view(torch.uint8), cache))
    return due


def reference_holds_on_cpu(layer: Layer, due: Due) -> bool:
    """Whether the chain gives the same bytes on the CPU, where it takes another path through torch."""
    cache = torch.full_like(layer.cache, _POISON_CACHE, device="cpu")
    q_nope, q_rope, k_nope, k_rope = (tensor.cpu() for tensor in layer[:4])
    query = prepare_chain(q_nope, q_rope, k_nope, k_rope, cache, layer.loc.cpu())
    assert query is not None
    return bool(torch.equal(query.view(torch.uint8), due.query.cpu()) and torch.equal(cache, due.cache.cpu()))


def poison(layers: list[Layer], queries: list[Tensor]) -> None:
    """Overwrite every result, so that what a contender does not write shows."""
    for layer in layers:
        layer.cache.fill_(_POISON_CACHE)
    for query in queries:
        query.view(torch.uint8).fill_(_POISON_OUT)


@dataclass(frozen=True, slots=True)
class Check:
    """How a contender's bytes compare with those due, over all its layers."""

    query_bytes_wrong: int
    cache_bytes_wrong: int
    overflow_only: bool
    """Every wrong byte is a NaN where the due one is ±448: torch's own cast before 2.13."""

    @property
    def verdict(self) -> str:
        """``equal``, ``overflow`` (equal but for values e4m3 cannot hold) or ``WRONG``."""
        if not self.query_bytes_wrong and not self.cache_bytes_wrong:
            return "equal"
        return "overflow" if self.overflow_only else "WRONG"

    def to_dict(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "query_bytes_wrong": self.query_bytes_wrong,
            "cache_bytes_wrong": self.cache_bytes_wrong,
        }


def check(layers: list[Layer], queries: list[Tensor], due: list[Due]) -> Check:
    """Compare results with the bytes due: whole queries, and whole caches, rows that must stay untouched too."""
    wrong_query = wrong_cache = 0
    overflow_only = True
    for layer, query, wanted in zip(layers, queries, due, strict=True):
        wrong, overflow = _compare(query.view(torch.uint8), wanted.query)
        wrong_query += wrong
        overflow_only &= overflow
        wrong, overflow = _compare(layer.cache, wanted.cache)
        wrong_cache += wrong
        overflow_only &= overflow
    return Check(wrong_query, wrong_cache, overflow_only)


def _compare(found: Tensor, due: Tensor) -> tuple[int, bool]:
    if found.shape != due.shape:
        return due.numel(), False
    if torch.equal(found, due):
        return 0, True
    differs = found != due
    overflow = ((found & _NAN) == _NAN) & ((due & _NAN) == _NAN - 1)
    return int(differs.sum()), not bool((differs & ~overflow).any())
