"""Wanted kernels: what a worker means by a model, a variant id, a spec or a plan."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import describe
from mlaprep.templates.plans import parse_plan
from mlaprep.templates.presets import preset
from mlaprep.templates.spec import KernelSpec, parse_variant_id

MAX_KERNELS: Final = 1024
"""Kernels that one request may mean."""


class HasSpec(Protocol):
    """What has a spec; a :class:`~mlaprep.clients.handle.KernelHandle` does, one by name included."""

    @property
    def spec(self) -> KernelSpec: ...


Wanted = KernelSpec | str | Mapping[str, Any] | HasSpec
"""One spec, variant id, preset name or handle; a mapping with ``preset`` and ``tp``, or of spec fields alone, in which
every value may be a list of values; or a warm-up plan, ``{"kernels": [...]}``, whose architectures are passed over."""


def wanted_specs(
    what: "Wanted | Iterable[Wanted] | None", tp: "int | Iterable[int] | None" = None, **fields: Any
) -> tuple[KernelSpec, ...]:
    """The specs that a request means, each once, in the order of the request.

    Args:
        what: a preset's name, a variant id, a spec, a handle, a mapping, or any number of these; None for
            ``fields`` alone.
        tp: the tensor-parallel degree of presets, or several.
        fields: spec fields that override a preset's, or make a spec. A list or tuple stands for each of its
            values, so ``loc_dtype=("i32", "i64")`` doubles the kernels.

    Raises:
        SpecError: no such preset, variant or field; a ``tp`` or fields beside what takes none; a preset without
            ``tp``; nothing at all, or more than ``MAX_KERNELS``.
        TypeError: something else.
    """
    items: list[Wanted] = [{}] if what is None else _items(what)
    specs: dict[KernelSpec, None] = {}
    for item in items:
        for spec in _specs_of(item, tp, fields):
            specs[spec] = None
            if len(specs) > MAX_KERNELS:
                raise SpecError(FieldProblem("specs", f"more than {MAX_KERNELS} kernels", f"up to {MAX_KERNELS}"))
    if not specs:
        raise SpecError(FieldProblem("specs", "no kernel at all", "a preset with its tp, variant ids, or specs"))
    return tuple(specs)


def _items(what: "Wanted | Iterable[Wanted]") -> list[Wanted]:
    if isinstance(what, KernelSpec | str | Mapping):
        return [what]
    if hasattr(what, "spec"):
        return [what.spec]
    if not isinstance(what, Iterable):
        raise TypeError(
            f"what: found a {type(what).__name__}; give a preset's name, a variant id, a spec, a mapping, "
            "or a list of them"
        )
    return list(itertools.islice(what, MAX_KERNELS + 1))


def _specs_of(item: Wanted, tp: "int | Iterable[int] | None", fields: Mapping[str, Any]) -> Iterator[KernelSpec]:
    item = getattr(item, "spec", item)  # a handle
    if isinstance(item, KernelSpec) or (isinstance(item, str) and item.startswith("mla_prepare")):
        if fields:
            raise SpecError(FieldProblem(min(fields), "a field beside a whole spec or variant id", "omitted"))
        yield parse_variant_id(item) if isinstance(item, str) else item
        return
    if isinstance(item, str):
        item = {"preset": item}
    elif isinstance(item, Mapping) and "kernels" in item:
        yield from dict.fromkeys(spec for spec, _ in parse_plan(item).targets)
        return
    elif not isinstance(item, Mapping):
        raise TypeError(f"a {type(item).__name__} among the kernels; give preset names, variant ids, specs or mappings")
    given = {"tp": tp, **fields, **item}
    name, degrees = given.pop("preset", None), given.pop("tp")
    if name is None:
        if degrees is not None and tp is None:
            raise SpecError(FieldProblem("tp", "a degree without a preset", "a preset, or num_heads in place of tp"))
        yield from (KernelSpec.from_dict(values) for values in _each(given))
        return
    if type(name) is not str:
        raise SpecError(FieldProblem("preset", describe(name), "the name of a preset"))
    model = preset(name)
    if degrees is None:
        allowed = ", ".join(map(str, model.tp_degrees))
        raise SpecError(FieldProblem("tp", f"no degree for {name}", f"one or several of {allowed}"))
    for values in _each({"tp": degrees, **given}):
        yield model.spec(values.pop("tp"), **values)


def _each(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values that lists stand for."""
    choices = [value if isinstance(value, list | tuple) else [value] for value in fields.values()]
    combinations = itertools.product(*choices)
    return (dict(zip(fields, values, strict=True)) for values in combinations)
