"""PreparedLaunch: all of a call that its layout decides, made once for a layout and reused.

Coverage, strides, grid and stream's device follow from shapes, strides, dtypes, devices and alignment; what
is left for a call is the addresses.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.launch import Launcher
from mlaprep.clients.plan import LaunchConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TENSORS: Final = (
    "q_nope",
    "q_rope",
    "k_nope",
    "k_rope",
    "kv_cache",
    "loc",
    "positions",
    "cos_sin_cache",
    "q_scale_inv",
    "kv_scale_inv",
    "out",
)
"""The tensors of a call, in the order that a launch takes them."""

OUT: Final = TENSORS.index("out")


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """One layout's launch on one device.

    ``pointers`` says for each pointer argument which of :data:`TENSORS` it is; the result is under ``OUT``.
    """

    pid: int
    launch: Launcher | None
    """None where there are no tokens."""
    config: LaunchConfig | None
    stream: Callable[[int], int] | None
    """Gives the device's current stream; None where there are no tokens."""
    device: "torch.device"
    pointers: tuple[int, ...]
    scalars: tuple[int, ...]
    result_shape: tuple[int, int, int] | None
    """None where no query is written."""
    result_dtype: "torch.dtype"
    like: "Tensor | None"
    """A tensor of the result's shape, dtype and device without memory, which results are made like; None where no
    query is made."""

    @property
    def ordinal(self) -> int:
        return self.device.index or 0

    @property
    def native(self) -> tuple[object, ...] | None:
        """The launch as the table in C makes it; None where only :meth:`run` can.

        The launcher's addresses and whether it is programmatic, then grid, block, pointers, scalars, the tensor
        that results are made like, and what raises for a refused launch.
        """
        calls = None if self.launch is None else self.launch.native()
        if calls is None or self.launch is None or self.config is None:
            return None
        shape = (self.config.grid, self.config.block, self.pointers, self.scalars)
        return (*calls, *shape, self.like, self.launch.refuse)

    def of_this_process(self) -> bool:
        return self.pid == os.getpid()

    def nothing(self) -> "Tensor":
        """An empty result, for a kernel that writes no query."""
        import torch

        return torch.empty(0, dtype=self.result_dtype, device=self.device)

    def run(self, tensors: Sequence[Any]) -> "Tensor | None":
        """Launch for tensors of this layout, on the current stream. Returns the query, None if none is written.

        Raises:
            DriverError: the driver refused the launch.
        """
        import torch

        query: Tensor | None = tensors[OUT]
        if self.like is not None:
            query = torch.empty_like(self.like)
        elif query is None and self.result_shape is not None:
            query = torch.empty(self.result_shape, dtype=self.result_dtype, device=self.device)
        if self.launch is not None and self.config is not None and self.stream is not None:
            addresses = [tensors[index].data_ptr() if index != OUT else _address(query) for index in self.pointers]
            self.launch(self.config, self.stream(self.ordinal), (*addresses, *self.scalars))
        return query


def _address(query: "Tensor | None") -> int:
    assert query is not None  # a kernel with this argument writes a query
    address: int = query.data_ptr()
    return address
