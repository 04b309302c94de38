"""Coverage: whether a kernel takes a call's operands exactly as they lie in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mlaprep.clients.operands import Operands
from mlaprep.clients.plan import MAX_TOKENS
from mlaprep.clients.prepared import TENSORS
from mlaprep.templates.fields import DYNAMIC
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coverage:
    """Whether a handle takes a call; true if it does, and ``reason`` says why where it does not."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


def coverage(spec: KernelSpec, device_type: str, operands: Operands, reserved_slot: int | None) -> Coverage:
    """The first reason why this spec's kernel does not take these operands, or that it does.

    Reads shapes, strides, dtypes and addresses, never values.
    """
    return Coverage(next(_reasons(spec, device_type, operands, reserved_slot), None))


def _reasons(spec: KernelSpec, device_type: str, operands: Operands, reserved_slot: int | None) -> Iterator[str]:
    if operands.device.type != device_type:
        yield f"tensors on {operands.device.type}, the kernel runs on {device_type}"
    dtype = str(operands.dtype).removeprefix("torch.")
    if dtype != _TORCH_DTYPE[spec.dtype]:
        yield f"inputs of {dtype}, the kernel takes {_TORCH_DTYPE[spec.dtype]}"
    if spec.write_q and operands.heads != spec.num_heads:
        yield f"{operands.heads} heads, the kernel has {spec.num_heads}"
    for name, found, wanted in (
        ("kv_lora_rank", operands.rank, spec.kv_lora_rank),
        ("rope_dim", operands.rope_dim, spec.rope_dim),
    ):
        if found != wanted:
            yield f"{name} {found}, the kernel has {wanted}"
    if operands.tokens > MAX_TOKENS:
        yield f"{operands.tokens} tokens, one launch takes at most {MAX_TOKENS}"
    for name, given, made in (
        ("q_scale_inv", operands.q_scale_inv is not None, spec.q_scale != "none"),
        ("kv_scale_inv", operands.kv_scale_inv is not None, spec.kv_scale != "none"),
        ("positions", operands.positions is not None, spec.rope != "none"),
        ("reserved_slot", spec.write_kv and reserved_slot is not None, spec.reserved_slot),
    ):
        if given != made:
            yield f"{name} {'given' if given else 'absent'}, unlike in the spec the kernel was made for"
    for name in TENSORS:
        tensor: Tensor | None = getattr(operands, name)
        if tensor is not None and tensor.numel() and not _address(tensor):
            yield f"{name} without memory of its own, the kernel takes an address"
    yield from _index_reasons("loc", operands.loc, spec.loc_dtype)
    yield from _index_reasons("positions", operands.positions, spec.position_dtype)
    yield from _scale_reasons(spec, operands)
    yield from _cache_reasons(spec, operands)
    yield from _memory_reasons(spec, operands)


def _address(tensor: "Tensor") -> int:
    """0 for a wrapper, and for a tensor whose storage was freed."""
    try:
        address: int = tensor.data_ptr()
    except RuntimeError:
        return 0
    return address


def _index_reasons(name: str, indices: "Tensor | None", made: str) -> Iterator[str]:
    if indices is None:
        return
    width = indices.element_size() * 8
    if f"i{width}" != made:
        yield f"{name} of int{width}, the kernel takes int{made[1:]}"
    if len(indices) > 1 and indices.stride(0) != 1:
        yield f"{name} with stride {indices.stride(0)}, the kernel takes a contiguous one"
    if indices.data_ptr() % indices.element_size():
        yield f"{name} at an address that is no multiple of {indices.element_size()} bytes"


def _scale_reasons(spec: KernelSpec, operands: Operands) -> Iterator[str]:
    scale = operands.q_scale_inv
    if scale is not None:
        if spec.q_scale == "token" and tuple(scale.shape) != (operands.tokens,):
            yield f"q_scale_inv of shape {list(scale.shape)}, the kernel takes one a token"
        if spec.q_scale == "scalar" and scale.numel() != 1:
            yield f"q_scale_inv of shape {list(scale.shape)}, the kernel takes a scalar"
        if scale.numel() > 1 and scale.stride(0) != 1:
            yield f"q_scale_inv with stride {scale.stride(0)}, the kernel takes a contiguous one"
    for name, tensor in (("q_scale_inv", scale), ("kv_scale_inv", operands.kv_scale_inv)):
        if tensor is not None and tensor.data_ptr() % 4:
            yield f"{name} at an address that is no multiple of 4 bytes"
    angles = operands.cos_sin_cache
    if angles is not None:
        if not angles.is_contiguous():
            yield f"cos_sin_cache with strides {tuple(angles.stride())}, the kernel takes a contiguous one"
        if angles.data_ptr() % _VECTOR_BYTES:
            yield f"cos_sin_cache at an address that is no multiple of {_VECTOR_BYTES} bytes"


def _cache_reasons(spec: KernelSpec, operands: Operands) -> Iterator[str]:
    cache = operands.kv_cache
    if cache is None:
        return
    if cache.numel() == 0:
        return
    unit = spec.stride_unit("cache_row_stride")
    if cache.data_ptr() % (unit * cache.element_size()):
        yield f"kv_cache at an address that is no multiple of {unit * cache.element_size()} bytes"
    if cache.stride(-1) != 1:
        yield f"kv_cache with a last stride of {cache.stride(-1)}, the kernel takes 1"
    even = operands.page_stride == operands.page * operands.row_stride
    strides = [("cache_row_stride", operands.row_stride)] if operands.rows > 1 else []
    if spec.page_size > 1:
        if not even and operands.page != spec.page_size:
            yield f"kv_cache in pages of {operands.page} rows, the kernel takes {spec.page_size}"
        if operands.rows > spec.page_size:
            strides.append(("cache_page_stride", page_stride(spec, operands)))
    elif not even:
        yield "kv_cache in pages with gaps, the kernel takes evenly spaced rows"
    for field, stride in strides:
        yield from _stride_reasons(spec, "kv_cache", field, stride)


def page_stride(spec: KernelSpec, operands: Operands) -> int:
    """Elements between two pages as the kernel counts them: evenly spaced rows make pages of any size."""
    if operands.page == spec.page_size:
        return operands.page_stride
    return spec.page_size * operands.row_stride


def _memory_reasons(spec: KernelSpec, operands: Operands) -> Iterator[str]:
    for name in ("q_nope", "q_rope", "k_nope", "k_rope", "out"):
        tensor: Tensor | None = getattr(operands, name)
        if tensor is None or tensor.numel() == 0:
            continue
        alignment = spec.stride_unit(f"{name}_token_stride") * tensor.element_size()
        if tensor.data_ptr() % alignment:
            yield f"{name} at an address that is no multiple of {alignment} bytes"
        *strides, last = tensor.stride()
        if last != 1:
            yield f"{name} with a last stride of {last}, the kernel takes 1"
        for size, stride, dim in zip(tensor.shape, strides, ("token", "head"), strict=False):
            if size > 1:
                yield from _stride_reasons(spec, name, f"{name}_{dim}_stride", stride)
    if operands.out is None and spec.write_q and operands.tokens:
        packed = (spec.pad_heads_to * spec.row_width, spec.row_width)
        for dim, stride, size in zip(("token", "head"), packed, (operands.tokens, spec.pad_heads_to), strict=True):
            if size > 1 and getattr(spec, f"out_{dim}_stride") not in (DYNAMIC, stride):
                yield f"no out, the kernel writes a result with a {dim} stride of its own; pass out"


def _stride_reasons(spec: KernelSpec, name: str, field: str, stride: int) -> Iterator[str]:
    unit = spec.stride_unit(field)
    words = field.removeprefix(f"{name}_").removeprefix("cache_").replace("_", " ")
    if stride % unit:
        yield f"{name} with a {words} of {stride} elements, no multiple of {unit}"
    made = getattr(spec, field)
    if made not in (DYNAMIC, stride):
        yield f"{name} with a {words} of {stride} elements, the kernel was made for {made}"


_TORCH_DTYPE: Final = {"bf16": "bfloat16", "fp16": "float16"}
_VECTOR_BYTES: Final = 16
