"""Inverse scales: the multipliers of scales that their owner divides by, without a launch a call.

The kernel multiplies by an inverse that it reads from device memory. Computing one is a launch of its own, so
inverses are kept, and what is kept must never be older than the scale:

- A scale seen before, outside of a graph capture, is recognised by identity, version counter, address and stream.
- While a graph is captured nothing kept is used: the inverse is computed in the graph, at every replay, since a
  replay cannot look whether the scale changed since.
- :func:`fix_scale` promises that a scale stays as it is. Then a captured graph reads the kept inverse, and one
  launch less is in the graph.

Writes that no version counter sees (through ``.data``, by another library's kernel, by the replay of a graph) are
seen inside of a captured graph only; call :func:`fix_scale` after them.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mlaprep.clients.errors import KernelNotReady
from mlaprep.clients.launch import cuda_driver
from mlaprep.clients.tensors import dense, shape_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Kept:
    scale: "weakref.ref[Tensor]"
    state: tuple[int | None, int]
    inverse: "Tensor"


@dataclass(frozen=True, slots=True)
class _Fixed:
    # Held, since graphs read the inverse for as long as they live.
    scale: "Tensor"
    state: tuple[int | None, int]
    inverse: "Tensor"


_kept: Final[dict[tuple[int, int], _Kept]] = {}
_fixed: Final[dict[int, _Fixed]] = {}


def inverse_of(scale: "Tensor", name: str = "scale") -> "Tensor":
    """``1 / scale`` in fp32, rounded to nearest, on the scale's device and good on its current stream.

    One launch where the scale is new or was written since, or while its stream is being captured; else none.
    Errors call the scale by ``name``.

    Raises:
        TypeError, ValueError: anything but one float32.
    """
    try:
        state = _state(scale)
    except (AttributeError, RuntimeError):  # no tensor, or one without memory
        _check(name, scale)
        raise
    fixed = _fixed.get(id(scale))
    if fixed is not None and fixed.state == state:
        return fixed.inverse
    if _is_capturing(scale):
        return _reciprocal(name, scale)
    if fixed is not None:
        return fix_scale(scale)
    if state[0] is None:  # an inference tensor has no version to know a change by
        return _reciprocal(name, scale)
    key = (id(scale), _stream(scale))
    kept = _kept.get(key)
    if kept is not None and kept.scale() is scale and kept.state == state:
        return kept.inverse
    inverse = _reciprocal(name, scale)
    _kept[key] = _Kept(weakref.ref(scale, lambda _: _kept.pop(key, None)), state, inverse)
    return inverse


def fix_scale(scale: "Tensor") -> "Tensor":
    """Promise that ``scale`` (one float32) stays as it is, so that captured graphs need not invert it; its inverse.

    Call it for each layer's scales once weights are loaded, before graphs are captured; and again where a scale
    did change: the inverse stays at its address, and graphs captured before read the new one. Waits for the
    device. A scale and its inverse are kept for the life of the process.

    Raises:
        TypeError, ValueError: anything but one float32.
        KernelNotReady: the device's stream is being captured.
    """
    import torch

    _check("scale", scale)
    if _is_capturing(scale):
        raise KernelNotReady(
            "asked to fix a scale while its device's stream is being captured; call fix_scale before the capture"
        )
    fixed = _fixed.get(id(scale))
    if fixed is None:
        inverse = _reciprocal("scale", scale)
    else:
        inverse = fixed.inverse
        inverse.copy_(_reciprocal("scale", scale))
    if scale.is_cuda:
        torch.cuda.current_stream(scale.device).synchronize()
    _fixed[id(scale)] = _Fixed(scale, _state(scale), inverse)
    return inverse


def _check(name: str, scale: object) -> None:
    import torch

    found = dense(name, scale, (torch.float32,), "of one element")
    if found.numel() != 1:
        raise shape_error(name, found, "one element")


def _reciprocal(name: str, scale: "Tensor") -> "Tensor":
    import torch

    _check(name, scale)
    # Not an inference tensor, which could not be renewed outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        return torch.reciprocal(scale)


def _state(scale: "Tensor") -> tuple[int | None, int]:
    return None if scale.is_inference() else scale._version, scale.data_ptr()


def _stream(scale: "Tensor") -> int:
    return cuda_driver().current_stream(scale.device.index) if scale.is_cuda else 0


def _is_capturing(scale: "Tensor") -> bool:
    return scale.is_cuda and cuda_driver().is_capturing(scale.device.index)
