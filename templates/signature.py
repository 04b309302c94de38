"""KernelParameter: the arguments of a prepare kernel, in order.

The template renders its parameter list from this, the manifest records it, and the handle packs its
launch by it, so the three cannot disagree.
"""

from dataclasses import dataclass
from typing import Literal

from mlaprep.templates.fields import DYNAMIC, STRIDE_FIELDS
from mlaprep.templates.spec import KernelSpec

ParameterType = Literal["pointer", "i64", "u32"]


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """One kernel argument: a device pointer, or an integer passed by value."""

    name: str
    type: ParameterType


def kernel_parameters(spec: KernelSpec) -> tuple[KernelParameter, ...]:
    """The arguments that this spec's kernel takes, in the order it takes them.

    ``tokens`` is T; ``cache_rows`` is S; ``cos_sin_rows`` is P; ``reserved_slot`` and ``dcp_rank`` are
    there when the spec has them; every dynamic stride follows under its field's name, in elements.
    """
    rotates = spec.rope != "none"
    pointers = {
        "q_out": spec.write_q,
        "kv_cache": spec.write_kv,
        "q_nope": spec.write_q,
        "q_rope": spec.write_q and spec.rope_dim > 0,
        "k_nope": spec.write_kv,
        "k_rope": spec.write_kv and spec.rope_dim > 0,
        "loc": spec.write_kv,
        "positions": rotates,
        "cos_sin_cache": rotates,
        "q_scale_inv": spec.q_scale != "none",
        "kv_scale_inv": spec.kv_scale != "none",
    }
    scalars: dict[str, tuple[ParameterType, bool]] = {
        "tokens": ("u32", True),
        "cache_rows": ("i64", spec.write_kv),
        "cos_sin_rows": ("i64", rotates),
        "reserved_slot": ("i64", spec.reserved_slot),
        "dcp_rank": ("u32", spec.dcp_world > 1),
        **{field: ("i64", _passed_at_launch(spec, field)) for field in STRIDE_FIELDS},
    }
    return (
        *(KernelParameter(name, "pointer") for name, used in pointers.items() if used),
        *(KernelParameter(name, type) for name, (type, used) in scalars.items() if used),
    )


def _passed_at_launch(spec: KernelSpec, field: str) -> bool:
    return getattr(spec, field) == DYNAMIC and not spec.stride_is_moot(field)
