"""Named things: a spec, a variant or an architecture, given as itself or by its name."""

from collections.abc import Mapping
from typing import Any

from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.spec import KernelSpec, parse_variant_id


def as_spec(spec: KernelSpec | str | None, fields: Mapping[str, Any]) -> KernelSpec:
    """A spec from a spec, a variant id, or fields.

    Raises:
        SpecError: both or neither, or one that cannot be.
        TypeError: a ``spec`` of another type.
    """
    if spec is None:
        return KernelSpec.from_dict(fields)
    if fields:
        allowed = "a spec or variant id alone, or fields alone"
        raise SpecError(FieldProblem("spec", "a spec together with fields", allowed))
    return as_named(spec)


def as_arch(arch: Arch | str) -> Arch:
    """An architecture from itself or its name.

    Raises:
        SpecError: an unknown name.
        TypeError: something else.
    """
    if isinstance(arch, str):
        return Arch(arch)
    if not isinstance(arch, Arch):
        raise TypeError(f"arch is a {type(arch).__name__}; give an Arch, or a name such as 'sm_100a'")
    return arch


def as_named(spec: KernelSpec | str) -> KernelSpec:
    """A spec from itself or its variant id.

    Raises:
        SpecError: no such variant.
        TypeError: something else.
    """
    if isinstance(spec, str):
        return parse_variant_id(spec)
    if not isinstance(spec, KernelSpec):
        raise TypeError(f"spec is a {type(spec).__name__}; give a KernelSpec, or a variant id")
    return spec
