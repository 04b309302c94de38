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
"""The tensors of a call, in the order that a key and a launch take them."""

OUT: Final = TENSORS.index("out")
MAX_LAYOUTS: Final = 4096
"""Layouts remembered by one handle or client before it starts over: far more than a process captures."""

_ALIGNMENT: Final = 31
"""Low address bits that coverage may look at: the widest load is 32 bytes."""


def layout_key(tensors: Sequence[Any]) -> tuple[object, ...] | None:
    """What coverage of these tensors depends on; None where one is no plain tensor with memory of its own.

    Types are part of it, so an object that only resembles a tensor is never taken for one that was checked.
    """
    key: list[object] = []
    try:
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                continue
            address = tensor.data_ptr()
            # A lazily negated tensor is read through a copy; a wrapper or a freed storage has no address.
            if tensor.is_neg() or (not address and tensor.numel()):
                return None
            key.append((type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address & _ALIGNMENT))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return tuple(key)


def option_key(*options: object) -> tuple[object, ...]:
    """Options with their types, so that ``True`` is not taken for a remembered 1."""
    return (*options, *[type(option) for option in options])


def recall(plans: "dict[tuple[object, ...], PreparedLaunch]", key: tuple[object, ...]) -> "PreparedLaunch | None":
    """The plan kept under a key; None also where an option cannot be hashed, which the check of a call names."""
    try:
        return plans.get(key)
    except TypeError:
        return None


def remember(
    plans: "dict[tuple[object, ...], PreparedLaunch]", key: tuple[object, ...], plan: "PreparedLaunch"
) -> None:
    """Keep a plan, starting over where there are too many."""
    if len(plans) >= MAX_LAYOUTS:
        plans.clear()
    plans[key] = plan


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """One layout's launch on one device.

    ``pointers`` says for each pointer argument which of :data:`TENSORS` it is; the result is under ``OUT``.
    """

    pid: int
    launch: Launcher | None
    """None where there are no tokens."""
    config: LaunchConfig | None
    stream: Callable[[int], int]
    device: "torch.device"
    pointers: tuple[int, ...]
    scalars: tuple[int, ...]
    result_shape: tuple[int, int, int] | None
    """None where no query is written."""
    result_dtype: "torch.dtype"

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
        if query is None and self.result_shape is not None:
            query = torch.empty(self.result_shape, dtype=self.result_dtype, device=self.device)
        if self.launch is not None and self.config is not None:
            addresses = [tensors[index].data_ptr() if index != OUT else _address(query) for index in self.pointers]
            self.launch(self.config, self.stream(self.device.index or 0), (*addresses, *self.scalars))
        return query


def _address(query: "Tensor | None") -> int:
    assert query is not None  # a kernel with this argument writes a query
    address: int = query.data_ptr()
    return address
