"""Buffers whose surroundings are compared too."""

from dataclasses import dataclass

import torch

CANARY = 4096
"""Bytes ahead of and behind every result; also keeps bases 16-byte aligned."""


@dataclass(frozen=True)
class Guarded:
    """A byte tensor with ``shape`` and ``stride`` inside a larger buffer filled with ``poison``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    poison: int = 0xA5
    offset: int = 0
    dtype: torch.dtype = torch.uint8
    """uint8, or a one-byte float."""

    @classmethod
    def packed(cls, *shape: int, **options: object) -> "Guarded":
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        return cls(shape, tuple(stride), **options)  # type: ignore[arg-type]

    @classmethod
    def pool(cls, rows: int, width: int, pitch: int | None = None, **options: object) -> "Guarded":
        return cls((rows, width), (pitch or width, 1), **options)  # type: ignore[arg-type]

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffer as flat uint8, and the tensor inside it, uint8 as well."""
        last = sum(max(size - 1, 0) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        whole = torch.full((2 * CANARY + self.offset + last + 1,), self.poison, dtype=torch.uint8, device=device)
        return whole, self.inside(whole)

    def inside(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.shape, self.stride, CANARY + self.offset)
