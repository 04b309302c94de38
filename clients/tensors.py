"""Checks of one tensor, and the words that say what is wrong with it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def dense(
    name: str, value: object, dtypes: "tuple[torch.dtype, ...]", shape: str, *, written: bool = False
) -> "Tensor":
    """``value`` as a dense tensor of one of ``dtypes`` with memory: detached, and resolved if lazily negated.

    One that is ``written`` must be the caller's own memory, so a lazily negated one is refused.

    Raises:
        TypeError: no tensor, not dense, or of another dtype; ``name`` is named.
        ValueError: a meta tensor, one whose storage was freed, or one to write that is lazily negated.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: found a {kind_of(value)}; pass a torch.Tensor {shape} of {dtype_names(dtypes)}")
    tensor: Tensor = value
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name}: found a {found} tensor; pass a dense one, {shape}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: found dtype {dtype_names((tensor.dtype,))}; pass {dtype_names(dtypes)}")
    if tensor.is_meta:
        raise ValueError(f"{name}: found a meta tensor, which has no memory; pass one on the GPU or the CPU")
    if _is_freed(tensor):
        raise ValueError(
            f"{name}: found a tensor without memory, since its storage was freed; pass one that has its data"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        if written:
            raise ValueError(
                f"{name}: found a lazily negated tensor, whose memory holds other values; pass a plain one"
            )
        tensor = tensor.resolve_neg()
    return tensor


def _is_freed(tensor: "Tensor") -> bool:
    """Whether the storage ends before the last element: torch reads and writes beyond it, and some ways crash."""
    try:
        held: int = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper that computes through another tensor
        return False
    if not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + last + 1) * tensor.element_size() > held)


def same_device(name: str, tensor: "Tensor", first_name: str, first: "Tensor") -> None:
    """Raises ValueError where two operands lie on different devices."""
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: found on {tensor.device}; {first_name} is on {first.device}; pass both on one device"
        )


def overlaps(tensor: "Tensor") -> bool:
    """Whether two elements may share memory, told from sizes and strides."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def shape_error(name: str, tensor: "Tensor", wanted: str) -> ValueError:
    return ValueError(f"{name}: found shape {list(tensor.shape)}; pass {wanted}")


def kind_of(value: object) -> str:
    """The class of a value, with its module where it is no builtin."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def dtype_names(dtypes: "tuple[torch.dtype, ...]") -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
