"""Rounding: fp32 values to the bits of a result, the same under every torch version."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E4M3_MAX: Final = 448.0
_NAN_CODE: Final = 0x7F
_NAN_ELEMENT: Final = 0x7FFF


def e4m3_codes(values: "Tensor") -> "Tensor":
    """e4m3fn bytes (uint8, same shape) of fp32 values: to nearest even, saturating, NaN as ``7f``.

    Only finite values within ±448 reach torch's cast, where every torch version rounds to nearest even;
    beyond that versions differ, and a NaN's sign survives in some.
    """
    import torch

    nan = values.isnan()
    finite = values.masked_fill(nan, 0.0).clamp_(-E4M3_MAX, E4M3_MAX)
    return finite.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill_(nan, _NAN_CODE)


def element_bits(values: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Bits (int16, same shape) of fp32 values as bfloat16 or float16: to nearest even, NaN as ``7fff``."""
    import torch

    return values.to(dtype).view(torch.int16).masked_fill_(values.isnan(), _NAN_ELEMENT)
