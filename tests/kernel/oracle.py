"""What the prepare kernel must write, computed a second way: no e4m3 cast of torch's, no vector slot arithmetic.

Rounding looks values up among the midpoints of e4m3fn in float64, where every bf16, fp16 and fp32 value and
every midpoint is exact; slots go through Python's integers one by one.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Final

import torch

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


@functools.cache
def _midpoints() -> torch.Tensor:
    """float64 ``[126]``: the value halfway between codes i and i + 1, from the definition of e4m3fn."""
    values = [(code / 8) * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(0x7F)]
    assert values[0x7E] == 448.0
    return torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(values)], dtype=torch.float64)


def e4m3(values: torch.Tensor, scale_inv: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3fn bytes (uint8) of bf16, fp16 or fp32 values on the CPU, after a multiplication in fp32."""
    exact = values.double()
    if scale_inv is not None:
        # A product of two fp32 values is exact in float64, so this rounds to fp32 once.
        exact = (exact * scale_inv.cpu().double().reshape(())).float().double()
    magnitude, midpoints = exact.abs(), _midpoints()
    code = torch.searchsorted(midpoints, magnitude.contiguous())  # midpoints strictly below
    tie = midpoints[code.clamp(max=len(midpoints) - 1)] == magnitude
    code += (tie & (code % 2 == 1)).long()
    code += torch.signbit(exact).long() * 0x80
    return torch.where(exact.isnan(), 0x7F, code).to(torch.uint8)


def cache_row(slot: int, rows: int, reserved_slot: int | None, world: int, rank: int, interleave: int) -> int | None:
    """The cache row that a slot is written to on a rank, if it is."""
    if slot < 0 or slot == reserved_slot or (slot // interleave) % world != rank:
        return None
    row = slot // (world * interleave) * interleave + slot % interleave
    return row if row < rows else None
