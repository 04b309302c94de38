"""What the prepare kernel must write, computed a second way: no cast of torch's, no vector slot arithmetic.

Rounding looks values up among the midpoints of a format in float64, where every bf16, fp16 and fp32 value
and every midpoint is exact. A product, sum or quotient of two fp32 values that is computed in float64 and
then rounded to fp32 is the correctly rounded one, since 53 bits are more than twice 24 and two. Slots go
through Python's integers one by one.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

LITERAL: Final[Mapping[float, int]] = {
    # From the CUDA headers' host conversion, saturating. Positive half; the negative one has the sign bit set.
    448.0: 0x7E,
    456.0: 0x7E,
    464.0: 0x7E,
    465.0: 0x7E,
    466.0: 0x7E,
    480.0: 0x7E,
    1000.0: 0x7E,
    3.3895313892515355e38: 0x7E,  # the largest bf16
    float("inf"): 0x7E,
    2.0**-9: 0x01,
    1.5 * 2.0**-9: 0x02,
    2.0**-10: 0x00,
    2.0**-10 * (1 + 2.0**-7): 0x01,
    2.0**-6: 0x08,
    17.0: 0x58,
    18.0: 0x59,
    19.0: 0x5A,
    1.0: 0x38,
    1.5: 0x3C,
    0.0: 0x00,
}

_FORMATS: Final[Mapping[str, tuple[int, int, int]]] = {
    # fraction bits, exponent bias, the last magnitude that rounding may give
    "e4m3": (3, 7, 0x7E),  # saturating
    "fp16": (10, 15, 0x7C00),  # infinity, where one step beyond the largest finite value would be
    "bf16": (7, 127, 0x7F80),
}
_NAN: Final = {"e4m3": 0x7F, "fp16": 0x7FFF, "bf16": 0x7FFF}


@functools.cache
def midpoints(kind: str) -> Array:
    """float64: the value halfway between codes i and i + 1, from the definition of the format."""
    fraction, bias, last = _FORMATS[kind]
    codes = np.arange(last + 1)
    exponent, rest = codes >> fraction, codes & ((1 << fraction) - 1)
    significand = np.where(exponent == 0, rest, rest + (1 << fraction)).astype(np.float64)
    values = np.ldexp(significand, np.maximum(exponent, 1) - bias - fraction)
    return (values[:-1] + values[1:]) / 2


def codes(values: Array, kind: str) -> Array:
    """int64 codes of float64 values, to nearest even, NaN without its sign."""
    magnitude, middle = np.abs(values), midpoints(kind)
    code = np.searchsorted(middle, magnitude)  # midpoints strictly below
    tie = middle[np.minimum(code, len(middle) - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    code = code + np.signbit(values) * (0x80 if kind == "e4m3" else 0x8000)
    return np.where(np.isnan(values), _NAN[kind], code)


def to_fp32(values: Array) -> Array:
    """float64 values rounded to fp32 once, as float64."""
    with np.errstate(all="ignore"):
        return values.astype(np.float32).astype(np.float64)


def e4m3(values: torch.Tensor, scale_inv: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3fn bytes (uint8) of bf16, fp16 or fp32 values on the CPU, after a multiplication in fp32."""
    scale = None if scale_inv is None else scale_inv.cpu().double().reshape(()).numpy()
    return torch.from_numpy(codes(scaled(values.double().numpy(), scale), "e4m3").astype(np.uint8))


def scaled(values: Array, scale: Array | None) -> Array:
    with np.errstate(all="ignore"):
        return values if scale is None else to_fp32(values * scale)


def rotated(values: Array, cos_sin: Array, style: str) -> Array:
    """float64 ``[..., D]`` rotated by rows ``[cos(D/2) | sin(D/2)]``: two products and a sum, each rounded to fp32."""
    half = values.shape[-1] // 2
    cosine, sine = cos_sin[..., :half], cos_sin[..., half:]
    first = np.arange(half) * 2 if style == "interleaved" else np.arange(half)
    second = first + (1 if style == "interleaved" else half)
    a, b, turned = values[..., first], values[..., second], np.empty_like(values)
    with np.errstate(all="ignore"):
        turned[..., first] = to_fp32(to_fp32(a * cosine) - to_fp32(b * sine))
        turned[..., second] = to_fp32(to_fp32(b * cosine) + to_fp32(a * sine))
    return turned


def tile_scales(values: Array, kind: str) -> Array:
    """float64 ``[..., R/128]``: what a tile of 128 elements is divided by."""
    tiles = np.abs(values).reshape(*values.shape[:-1], values.shape[-1] // 128, 128)
    with np.errstate(all="ignore"):
        scale = to_fp32(np.fmax.reduce(np.fmax(tiles, 0.0), axis=-1) / 448.0)
    if kind == "raw":
        return np.maximum(scale, 2.0**-126)
    significand, exponent = np.frexp(np.maximum(scale, float(np.float32(1e-4))))
    power = np.ldexp(1.0, exponent - (significand == 0.5))
    return np.where(np.isinf(scale), np.inf, power)


def tiled(values: Array, kind: str) -> tuple[Array, Array]:
    """Codes of float64 ``[..., R]`` under their tiles' scales, and those scales as fp32."""
    scales = tile_scales(values, kind)
    with np.errstate(all="ignore"):
        quotients = to_fp32(values / np.repeat(scales, 128, axis=-1))
    return codes(quotients, "e4m3"), scales.astype(np.float32)


def cache_row(slot: int, rows: int, reserved_slot: int | None, world: int, rank: int, interleave: int) -> int | None:
    """The cache row that a slot is written to on a rank, if it is."""
    if slot < 0 or slot == reserved_slot or (slot // interleave) % world != rank:
        return None
    row = slot // (world * interleave) * interleave + slot % interleave
    return row if row < rows else None
