"""Tiles: latent rows whose every 128 elements share a scale, as ``ds_mla`` stores them."""

from typing import TYPE_CHECKING, Final

from mlaprep.clients.rounding import E4M3_MAX, e4m3_codes
from mlaprep.templates.fields import TILE

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_RAW: Final = 2.0**-126
"""The smallest normal fp32, so that a tile of zeros stores zeros."""
_SMALLEST_POW2: Final = 1e-4


def tile_scales(values: "Tensor", kind: str) -> "Tensor":
    """fp32 ``[..., n]`` scales of fp32 tiles ``[..., n, 128]``: what brings the largest magnitude to 448.

    NaN has no magnitude. ``raw`` is amax / 448; ``pow2`` the next power of two from there on.
    """
    import torch

    amax = values.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(dim=-1)
    # Divided by a tensor: on a GPU torch divides by a number as a product with its reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    if kind == "raw":
        return scale.clamp_(min=_SMALLEST_RAW)
    # A carry out of the fraction raises the exponent; infinity stays.
    bits = scale.clamp_(min=_SMALLEST_POW2).view(torch.int32)
    return bits.add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def tiled_rows(latent: "Tensor", kind: str) -> "tuple[Tensor, Tensor]":
    """Codes ``[T, R]`` and the bytes of the scales ``[T, 4 R/128]``, both uint8, of bf16 or fp16 ``[T, R]``."""
    import torch

    tiles = latent.float().unflatten(-1, (-1, TILE))
    scales = tile_scales(tiles, kind)
    return e4m3_codes(tiles / scales.unsqueeze(-1)).flatten(-2), scales.view(torch.uint8)
