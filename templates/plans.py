"""WarmupPlan: which kernels to build ahead, each once.

A plan is written as JSON or YAML::

    arch: [sm_100a, sm_103a]          # of every entry that names none
    kernels:
      - preset: kimi-k3               # tp: one degree, several, or all (the default)
        tp: [8, 16]
        set: {loc_dtype: i32}         # spec fields in place of the preset's
      - variant_id: mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl
      - spec: {num_heads: 16, kv_lora_rank: 512}
    misses: 100                       # and up to so many kernels that workers lacked
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlaprep.templates.arch import ARCHS, DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import describe
from mlaprep.templates.presets import preset
from mlaprep.templates.render import check_target, templates_fingerprint
from mlaprep.templates.spec import KernelSpec, parse_variant_id

Target = tuple[KernelSpec, Arch]
Lacking = Callable[[int], Iterable[Target]]
"""Up to so many kernels that workers asked for and lacked."""

MAX_KERNELS: Final = 8192
"""Kernels of one plan."""
MAX_ENTRIES: Final = 256
"""Entries that a plan lists."""
_ALL: Final = "all"
_KINDS: Final = ("preset", "variant_id", "spec")
_MEMBERS: Final = {
    "preset": ("preset", "tp", "set", "arch"),
    "variant_id": ("variant_id", "arch"),
    "spec": ("spec", "arch"),
}


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """Kernels to build, each once, in the order the plan names them."""

    targets: tuple[Target, ...]

    @property
    def digest(self) -> str:
        """sha256 over what is to be built, in whatever order, and the templates it is built from: two plans of one
        digest are one job."""
        names = sorted([str(arch), spec.variant_id] for spec, arch in self.targets)
        return hashlib.sha256(json.dumps([templates_fingerprint(), names]).encode()).hexdigest()

    def to_document(self) -> dict[str, Any]:
        """The plan with everything spelled out: variant ids by architecture."""
        by_arch: dict[str, list[dict[str, str]]] = {}
        for spec, arch in self.targets:
            by_arch.setdefault(str(arch), []).append({"variant_id": spec.variant_id})
        return {"kernels": [entry | {"arch": [arch]} for arch, entries in by_arch.items() for entry in entries]}


def parse_plan(document: object, lacking: Lacking | None = None) -> WarmupPlan:
    """A plan from its JSON value.

    Raises:
        SpecError: everything that is wrong, by the place of each entry; nothing is left out.
    """
    if not isinstance(document, Mapping):
        raise SpecError(FieldProblem("plan", describe(document), 'an object with "kernels"'))
    problems = [
        FieldProblem(_plain(name), "an unknown field", "arch, kernels, misses")
        for name in document
        if name not in ("arch", "kernels", "misses")
    ]
    archs = _archs(document.get("arch"), "arch", list(DEFAULT_ARCHS), problems)
    entries = document.get("kernels", [])
    targets: dict[Target, None] = {}
    if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
        problems.append(FieldProblem("kernels", "no list of that length", f"a list of up to {MAX_ENTRIES} entries"))
        entries = []
    for number, entry in enumerate(entries):
        try:
            for target in _targets(entry, archs):
                targets[target] = None
                if len(targets) > MAX_KERNELS:
                    raise _too_many()
        except SpecError as error:
            problems += [
                FieldProblem(f"kernels.{number}.{problem.field}", problem.found, problem.allowed)
                for problem in error.problems
            ]
    most = document.get("misses", 0)
    if not (isinstance(most, int) and not isinstance(most, bool) and 0 <= most <= MAX_KERNELS):
        problems.append(FieldProblem("misses", describe(most), f"an integer from 0 to {MAX_KERNELS}"))
    elif most and lacking is None:
        problems.append(FieldProblem("misses", "misses without a service that knows them", "a service, by --url"))
    elif lacking is not None and most and not problems:
        targets.update(dict.fromkeys(lacking(most)))
    if not problems and not targets and not most:
        problems.append(FieldProblem("kernels", "nothing to build", "entries, or misses"))
    if len(targets) > MAX_KERNELS:
        problems += _too_many().problems
    if problems:
        raise SpecError(problems)
    return WarmupPlan(tuple(targets))


def _targets(entry: object, archs: list[Arch]) -> Iterator[Target]:
    if not isinstance(entry, Mapping):
        raise SpecError(FieldProblem("entry", describe(entry), f"an object with one of {', '.join(_KINDS)}"))
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise SpecError(FieldProblem("entry", f"{len(kinds)} of {', '.join(_KINDS)}", "exactly one of them"))
    (kind,) = kinds
    problems = [
        FieldProblem(_plain(name), "an unknown field", ", ".join(_MEMBERS[kind]))
        for name in entry
        if name not in _MEMBERS[kind]
    ]
    own = _archs(entry.get("arch"), "arch", archs, problems)
    if problems:
        raise SpecError(problems)
    for spec in _specs(kind, entry):
        for arch in own:
            check_target(spec, arch)
            yield spec, arch


def _specs(kind: str, entry: Mapping[str, Any]) -> Iterator[KernelSpec]:
    value = entry[kind]
    if kind == "variant_id":
        yield parse_variant_id(value)
    elif kind == "spec":
        yield KernelSpec.from_dict(value)
    else:
        if not isinstance(value, str):
            raise SpecError(FieldProblem("preset", describe(value), "the name of a preset"))
        model, fields = preset(value), entry.get("set", {})
        if not isinstance(fields, Mapping):
            raise SpecError(FieldProblem("set", describe(fields), "an object of spec fields"))
        tp = entry.get("tp", _ALL)
        degrees = model.tp_degrees if tp == _ALL else tp if isinstance(tp, list) else [tp]
        for degree in degrees:
            yield model.spec(degree, **fields)


def _archs(value: object, field: str, default: list[Arch], problems: list[FieldProblem]) -> list[Arch]:
    if value is None:
        return default
    found: list[Arch] = []
    for name in value if isinstance(value, list) else [value]:
        if name == _ALL:
            found += [arch for arch in ARCHS if arch.name.endswith("a")]
            continue
        try:
            found.append(Arch(name if isinstance(name, str) else ""))
        except SpecError:
            allowed = f"{_ALL}, or of {', '.join(map(str, ARCHS))}"
            problems.append(FieldProblem(field, "an architecture that is not known", allowed))
    if not found and not problems:
        problems.append(FieldProblem(field, "no architecture", "one or more"))
    return list(dict.fromkeys(found))


def _too_many() -> SpecError:
    return SpecError(FieldProblem("kernels", f"more than {MAX_KERNELS} kernels", "several smaller plans"))


def _plain(name: object) -> str:
    """A field's name as a report may repeat it."""
    text = str(name)
    return text if text.isascii() and text.isidentifier() and len(text) <= 64 else "field"
