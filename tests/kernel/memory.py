"""Buffers whose surroundings are compared too."""

from dataclasses import dataclass

import torch

CANARY = 4096
"""Bytes ahead of and behind every result; also keeps bases 16-byte aligned."""


@dataclass(frozen=True)
class Guarded:
    """Elements of one or two bytes with ``shape`` and ``stride`` inside a larger buffer filled with ``poison``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    poison: int = 0xA5
    """Every byte of the buffer."""
    offset: int = 0
    """Elements ahead of the first one, beside the canary."""
    itemsize: int = 1

    @classmethod
    def packed(cls, *shape: int, **options: int) -> "Guarded":
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        return cls(shape, tuple(stride), **options)

    @classmethod
    def pool(cls, rows: int, width: int, pitch: int | None = None, **options: int) -> "Guarded":
        return cls((rows, width), (pitch or width, 1), **options)

    @classmethod
    def paged(cls, pages: int, page: int, width: int, pitch: int, gap: int, **options: int) -> "Guarded":
        """Pages of ``page`` rows, ``gap`` elements between the end of one and the start of the next."""
        return cls((pages, page, width), (page * pitch + gap, pitch, 1), **options)

    @property
    def rows(self) -> int:
        """Rows of a pool, whatever its shape."""
        return torch.Size(self.shape[:-1]).numel()

    @property
    def steps(self) -> tuple[int, ...]:
        """Offset and the strides that matter, in elements: what an access must be aligned with."""
        sizes = zip(self.stride[:-1], self.shape[:-1], strict=True)
        return self.offset, *(step for step, size in sizes if size > 1 and 0 not in self.shape)

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffer as flat uint8, and the elements inside it, uint8 or int16."""
        last = sum(max(size - 1, 0) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        size = 2 * CANARY + (self.offset + last + 1) * self.itemsize
        whole = torch.full((size,), self.poison, dtype=torch.uint8, device=device)
        return whole, self.inside(whole)

    def inside(self, whole: torch.Tensor) -> torch.Tensor:
        elements = whole if self.itemsize == 1 else whole.view(torch.int16)
        return elements.as_strided(self.shape, self.stride, CANARY // self.itemsize + self.offset)

    def row(self, whole: torch.Tensor, row: int) -> torch.Tensor:
        """One row of a pool, in row order over its pages."""
        view = self.inside(whole)
        return view[row] if len(self.shape) == 2 else view[row // self.shape[1], row % self.shape[1]]
