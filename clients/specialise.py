"""Specialisation: which kernel takes a call, and which of its strides may be constants of it.

A stride that does not depend on the number of tokens is the same for every call of a model, and a kernel that
has it compiled in runs some percent faster at few tokens.
"""

import functools
import threading
from typing import TYPE_CHECKING, Final

from mlaprep.clients.coverage import coverage
from mlaprep.clients.operands import Operands
from mlaprep.clients.options import PrepareOptions
from mlaprep.templates.errors import SpecError
from mlaprep.templates.fields import DYNAMIC
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

DEVICE_TYPE: Final = "cuda"
MAX_SPECIALISATIONS: Final = 32
"""Kernels with strides compiled in that one client asks for, where nothing else is said: several models' worth."""


def covering_spec(operands: Operands, options: PrepareOptions) -> KernelSpec | None:
    """The spec of the kernel that takes these operands; None if there is none."""
    return covering(operands, options)[0]


def covering(operands: Operands, options: PrepareOptions) -> tuple[KernelSpec | None, str]:
    """The spec of the kernel that takes these operands, every input stride dynamic; or None and the reason.

    The widest accesses that widths, strides and addresses allow are chosen; the reason is the one that keeps
    the narrowest from it.
    """
    reserved_slot = options.get("reserved_slot")
    # Slot rules say nothing where no cache is written.
    writes = operands.kv_cache is not None
    world = options.get("dcp_world", 1) if writes else 1
    scale = operands.q_scale_inv
    even = operands.page_stride == operands.page * operands.row_stride
    out = operands.out
    fields = (
        # With no query the number of heads says nothing, and one kernel serves them all.
        ("num_heads", operands.heads if operands.q_nope is not None else 1),
        ("kv_lora_rank", operands.rank),
        ("rope_dim", operands.rope_dim),
        ("dtype", _DTYPE[str(operands.dtype).removeprefix("torch.")]),
        ("layout", operands.layout.name),
        ("query_dtype", operands.layout.query_dtype),
        ("tile_scale", operands.layout.tile_scale),
        ("rope", options.get("rope", "none")),
        ("loc_dtype", _index_dtype(operands.loc)),
        ("position_dtype", _index_dtype(operands.positions)),
        ("q_scale", "none" if scale is None else "scalar" if scale.numel() == 1 else "token"),
        ("kv_scale", "none" if operands.kv_scale_inv is None else "scalar"),
        ("dcp_world", world),
        ("dcp_interleave", options.get("dcp_interleave", 1) if world > 1 else 1),
        ("reserved_slot", writes and reserved_slot is not None),
        ("pad_heads_to", operands.padded_heads if operands.q_nope is not None else None),
        ("page_size", 1 if even else operands.page),
        ("write_kv", writes),
        ("write_q", operands.q_nope is not None),
        ("out_token_stride", None if out is None or out.is_contiguous() else "dynamic"),
        ("out_head_stride", None if out is None or out.is_contiguous() else "dynamic"),
    )
    unmade = unmet = ""
    for elements in _ELEMENTS_PER_THREAD:
        spec = _spec((*fields, ("elements_per_thread", elements)))
        if isinstance(spec, str):
            unmade = spec
            continue
        covered = coverage(spec, DEVICE_TYPE, operands, reserved_slot)
        if covered.reason is None:
            return spec, ""
        unmet = covered.reason
    return None, unmet or unmade


def with_constant_strides(spec: KernelSpec, operands: Operands, reserved_slot: int | None = None) -> KernelSpec:
    """``spec`` with each stride of these operands that does not depend on the number of tokens as a constant.

    Where heads lie outside tokens, as in a transposed ``[H, T, R]`` product, the head stride grows with the
    batch and stays dynamic. So does a stride that no spec may have.
    """
    fields = {
        name: stride
        for name, stride in _constants(spec, operands)
        # One token's stride may be anything, since nothing is multiplied by it.
        if getattr(spec, name) == DYNAMIC and not spec.stride_is_moot(name) and not stride % spec.stride_unit(name)
    }
    if not fields:
        return spec
    made = _spec(tuple((spec.to_dict() | fields).items()))
    if isinstance(made, str) or not coverage(made, DEVICE_TYPE, operands, reserved_slot):
        return spec
    return made


class Specialisations:
    """The specs with constant strides that a client may ask for; a bounded number of them."""

    def __init__(self, limit: int = MAX_SPECIALISATIONS) -> None:
        self.limit: Final = limit
        self.forget()

    def forget(self) -> None:
        """Back to none, with a lock that nobody holds."""
        self._lock = threading.Lock()
        self._admitted: set[KernelSpec] = set()

    def has_room_for(self, spec: KernelSpec) -> bool:
        """Whether this one was admitted, or could be."""
        return spec in self._admitted or len(self._admitted) < self.limit

    def admit(self, spec: KernelSpec) -> bool:
        """Whether this one may be asked for, from now on always if so."""
        with self._lock:
            if not self.has_room_for(spec):
                return False
            self._admitted.add(spec)
            return True

    def __len__(self) -> int:
        return len(self._admitted)


def _constants(spec: KernelSpec, operands: Operands) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name in ("q_nope", "q_rope", "out"):
        tensor: Tensor | None = getattr(operands, name)
        if tensor is not None:
            token, head, _ = tensor.stride()
            found.append((f"{name}_token_stride", token))
            if head < token or tensor.shape[1] == 1:
                found.append((f"{name}_head_stride", head))
    for name in ("k_nope", "k_rope"):
        tensor = getattr(operands, name)
        if tensor is not None:
            found.append((f"{name}_token_stride", tensor.stride(0)))
    if operands.kv_cache is not None:
        found.append(("cache_row_stride", operands.row_stride))
        if operands.page == spec.page_size:
            found.append(("cache_page_stride", operands.page_stride))
    return found


@functools.lru_cache(maxsize=4096)
def _spec(fields: tuple[tuple[str, object], ...]) -> KernelSpec | str:
    """The spec of these fields, or what is wrong with them."""
    try:
        return KernelSpec.from_dict(dict(fields))
    except SpecError as error:
        # The width of accesses is no wish of the caller's, so it is told last.
        return str(min(error.problems, key=lambda problem: problem.field == "elements_per_thread"))


def _index_dtype(indices: "Tensor | None") -> str:
    return "i64" if indices is None else f"i{indices.element_size() * 8}"


_DTYPE: Final = {"bfloat16": "bf16", "float16": "fp16"}
_ELEMENTS_PER_THREAD: Final = (16, 8, 4, 2)
