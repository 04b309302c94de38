"""Rotation: rotary embedding in fp32, two products and one sum, each rounded once."""

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor


class Rotation(NamedTuple):
    """The angles of T tokens, as ``[T, D/2]`` fp32 cosines and sines."""

    style: str
    """``interleaved`` turns columns 2i and 2i + 1 by angle i, ``neox`` columns i and i + D/2."""
    cosine: "Tensor"
    sine: "Tensor"

    @classmethod
    def at(cls, style: str, positions: "Tensor", cos_sin_cache: "Tensor") -> Self:
        """The angles at ``positions`` ``[T]``; one outside the table ``[P, D]`` reads its nearest row."""
        rows, width = cos_sin_cache.shape
        angles = cos_sin_cache.index_select(0, positions.long().clamp_(0, rows - 1))
        return cls(style, angles[:, : width // 2], angles[:, width // 2 :])

    def of_tokens(self, part: slice) -> Self:
        return self._replace(cosine=self.cosine[part], sine=self.sine[part])

    def turn(self, values: "Tensor") -> "Tensor":
        """fp32 ``[T, D]`` or ``[T, H, D]``, rotated into a new tensor.

        ``a * cos - b * sin`` and ``b * cos + a * sin``. Each operation is a torch operation of its own, so
        none is contracted into a fused multiply-add.
        """
        import torch

        cosine, sine = self.cosine, self.sine
        if values.dim() == 3:
            cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        if self.style == "neox":
            a, b = values.chunk(2, dim=-1)
            return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
        a, b = values[..., ::2], values[..., 1::2]
        return torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1).flatten(-2)
