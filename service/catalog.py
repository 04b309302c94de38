"""Catalog: which variants there are, and how far each is on every architecture."""

import bisect
import functools
import heapq
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.service.builder import Builder, Target, Use
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.presets import PRESETS, Preset
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import KernelSpec

State = Literal["built", "building", "failed", "missing"]
STATES: Final[tuple[State, ...]] = get_args(State)

Sort = Literal["shape", "size", "registers", "hits", "last_use"]
"""What a listing starts with: small shapes, or the largest figure that a variant has on any architecture shown."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)

_SNAPSHOT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class VariantArch:
    """One variant on one architecture."""

    arch: Arch
    state: State
    manifest: Manifest | None = None
    """Of the built kernel."""
    use: Use | None = None
    """How often this process served it, and when last."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A spec, the models it serves, and its state by architecture."""

    spec: KernelSpec
    models: tuple[str, ...]
    archs: tuple[VariantArch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What a listing keeps; None keeps everything. A variant shows only the architectures that match."""

    arch: Arch | None = None
    model: str | None = None
    num_heads: int | None = None
    layout: str | None = None
    state: State | None = None
    after: KernelSpec | None = None
    """Variants that stand behind this one, in the order of the listing."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the variants that match, and how many do from the cursor on."""

    variants: tuple[Variant, ...]
    total: int


Order = tuple[int, int, int, str]
_Manifests = Mapping[Target, Manifest]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the store held when it was read last."""

    manifests: _Manifests = field(default_factory=dict)
    archs: Mapping[KernelSpec, frozenset[Arch]] = field(default_factory=dict)
    """Of every variant in the store or of a preset."""
    ordered: Sequence[tuple[Order, KernelSpec]] = ()
    compiles: int = -1
    taken: float = float("-inf")
    """When reading ended."""
    took: float = 0.0

    def is_fresh(self, compiles: int) -> bool:
        """Whether it will do; reading takes a fifth of the time at most, half where this process has built more."""
        pause = self.took if compiles != self.compiles else max(_SNAPSHOT_S, 4 * self.took)
        return time.monotonic() - self.taken <= pause


class _View:
    """A snapshot together with what is being built and what failed, for one question."""

    def __init__(self, snapshot: _Snapshot, builder: Builder) -> None:
        self.snapshot = snapshot
        self._builder = builder
        self._flights = builder.in_flight()
        self._failures = builder.failed()
        self._others: dict[KernelSpec, set[Arch]] = {}
        for spec, arch in (*self._flights, *self._failures):
            self._others.setdefault(spec, set()).add(arch)

    def ordered(self) -> Sequence[tuple[Order, KernelSpec]]:
        """Every variant there is, in order."""
        new = [(order_of(spec), spec) for spec in self._others if spec not in self.snapshot.archs]
        return sorted((*self.snapshot.ordered, *new), key=_first) if new else self.snapshot.ordered

    def archs(self, spec: KernelSpec) -> Set[Arch]:
        """Where a variant is built, being built or failed, or would be for a preset."""
        known, others = self.snapshot.archs.get(spec, frozenset()), self._others.get(spec)
        return known | others if others else known

    def state(self, target: Target) -> State:
        if target in self.snapshot.manifests:
            return "built"
        if target in self._flights:
            return "building"
        return "failed" if target in self._failures else "missing"

    def matching_archs(self, spec: KernelSpec, wanted: Filter) -> Set[Arch]:
        """The architectures of a variant that a listing shows."""
        archs = self.archs(spec) if wanted.arch is None else self.archs(spec) & {wanted.arch}
        if wanted.state is None:
            return archs
        return {arch for arch in archs if self.state((spec, arch)) == wanted.state}

    def matching(
        self, ordered: Iterable[tuple[Order, KernelSpec]], wanted: Filter
    ) -> Iterator[tuple[KernelSpec, Set[Arch]]]:
        """Variants that match, with the architectures that do."""
        for _, spec in ordered:
            if _matches(spec, wanted) and (archs := self.matching_archs(spec, wanted)):
                yield spec, archs

    def figure(self, sort: Sort, spec: KernelSpec, archs: Iterable[Arch]) -> float:
        """What a listing is sorted by: the largest on any of these architectures, 0 where there is none."""
        if sort in ("hits", "last_use"):
            uses = [use for arch in archs if (use := self._builder.use(spec, arch)) is not None]
            return max((use.count if sort == "hits" else use.last for use in uses), default=0)
        built = [self.snapshot.manifests[spec, arch] for arch in archs if (spec, arch) in self.snapshot.manifests]
        return max((each.cubin_size if sort == "size" else each.registers for each in built), default=0)

    def describe(self, spec: KernelSpec, archs: Iterable[Arch]) -> Variant:
        rows = tuple(
            VariantArch(
                arch,
                self.state((spec, arch)),
                self.snapshot.manifests.get((spec, arch)),
                self._builder.use(spec, arch),
            )
            for arch in sorted(archs)
        )
        return Variant(spec, models_of(spec), rows)


class Catalog:
    """Variants of the presets and of the store, with what is being built.

    The store is read by one caller at a time; all others are answered from what was read before.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._reading = threading.Lock()
        self._snapshot = _Snapshot()
        self._version: str | None = None
        self._served: dict[str, Target | None] = {}
        """By key of an entry: what it is given out for, if for anything."""

    def page(self, wanted: Filter, limit: int, sort: Sort = "shape") -> Page:
        """The first variants that match, in order. What another process built shows within seconds."""
        view = self._view()
        ordered = view.ordered()
        if sort != "shape":
            return self._sorted_page(view, wanted, limit, sort)
        start = 0 if wanted.after is None else bisect.bisect_right(ordered, order_of(wanted.after), key=_first)
        page: list[Variant] = []
        total = 0
        for spec, archs in view.matching(ordered[start:], wanted):
            total += 1
            if len(page) < limit:
                page.append(view.describe(spec, archs))
        return Page(tuple(page), total)

    @staticmethod
    def _sorted_page(view: _View, wanted: Filter, limit: int, sort: Sort) -> Page:
        """As :meth:`page`, the largest figures first. A figure that changes between two pages moves its variant."""

        def place(spec: KernelSpec, archs: Iterable[Arch]) -> tuple[float, Order]:
            return -view.figure(sort, spec, archs), order_of(spec)

        found = [(place(spec, archs), spec, archs) for spec, archs in view.matching(view.ordered(), wanted)]
        if wanted.after is not None:
            last = place(wanted.after, view.matching_archs(wanted.after, wanted))
            found = [entry for entry in found if entry[0] > last]
        first = heapq.nsmallest(limit, found, key=lambda entry: entry[0])
        return Page(tuple(view.describe(spec, archs) for _, spec, archs in first), len(found))

    def variant(self, spec: KernelSpec, archs: Iterable[Arch]) -> Variant:
        """One variant on each of these architectures that can run it, and on those it is built for."""
        view = self._view()
        return view.describe(spec, view.archs(spec) | {arch for arch in archs if _runs(spec, arch)})

    def states(self, targets: Iterable[Target]) -> list[State]:
        """How far each of these kernels is, as :meth:`page` tells it."""
        view = self._view()
        return [view.state(target) for target in targets]

    def _view(self) -> _View:
        snapshot = self._snapshot
        if not snapshot.is_fresh(self._builder.compiles) and self._reading.acquire(blocking=not snapshot.ordered):
            try:
                if not self._snapshot.is_fresh(self._builder.compiles):
                    self._snapshot = self._read()
            finally:
                self._reading.release()
        return _View(self._snapshot, self._builder)

    def _read(self) -> _Snapshot:
        began, compiles = time.monotonic(), self._builder.compiles
        manifests = dict(self._entries())
        archs: dict[KernelSpec, set[Arch]] = {}
        for spec, arch in manifests:
            archs.setdefault(spec, set()).add(arch)
        for spec in preset_specs():
            archs.setdefault(spec, set()).update(arch for arch in DEFAULT_ARCHS if _runs(spec, arch))
        taken = time.monotonic()
        return _Snapshot(
            manifests=manifests,
            archs={spec: frozenset(known) for spec, known in archs.items()},
            ordered=sorted(((order_of(spec), spec) for spec in archs), key=_first),
            compiles=compiles,
            taken=taken,
            took=taken - began,
        )

    def _entries(self) -> Iterator[tuple[Target, Manifest]]:
        """The entries that a worker would be given: of this release's source and this compiler, the latest last."""
        version = self._builder.serving_version()
        known = self._served if version == self._version else {}
        served: dict[str, Target | None] = {}
        for manifest in sorted(self._builder.store.list(), key=lambda manifest: manifest.created_at):
            key = manifest.key
            served[key] = target = known[key] if key in known else self._target(manifest, version)
            if target is not None:
                yield target, manifest
        self._version, self._served = version, served

    def _target(self, manifest: Manifest, version: str | None) -> Target | None:
        try:
            spec, arch = KernelSpec.from_dict(manifest.spec), Arch(manifest.arch)
        except SpecError:  # from a release that knew more
            return None
        return (spec, arch) if self._builder.would_serve(manifest, spec, arch, version) else None


def _first(pair: tuple[Order, KernelSpec]) -> Order:
    return pair[0]


def order_of(spec: KernelSpec) -> Order:
    """Sort key of a variant: by shape, then by name."""
    return spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.variant_id


@functools.cache
def preset_specs() -> tuple[KernelSpec, ...]:
    """The default variant of every preset and degree."""
    return tuple(dict.fromkeys(preset.spec(tp) for preset in PRESETS.values() for tp in preset.tp_degrees))


def models_of(spec: KernelSpec) -> tuple[str, ...]:
    """Presets whose shape and cache layout this spec has, at one of their degrees."""
    return tuple(name for name, preset in PRESETS.items() if _serves(spec, preset))


def _serves(spec: KernelSpec, preset: Preset) -> bool:
    shape = (spec.kv_lora_rank, spec.rope_dim, spec.layout) == (preset.kv_lora_rank, preset.rope_dim, preset.layout)
    return shape and spec.num_heads in {preset.num_heads // tp for tp in preset.tp_degrees}


def _matches(spec: KernelSpec, wanted: Filter) -> bool:
    return (
        (wanted.num_heads is None or spec.num_heads == wanted.num_heads)
        and (wanted.layout is None or spec.layout == wanted.layout)
        and (wanted.model is None or _serves(spec, PRESETS[wanted.model]))
    )


def _runs(spec: KernelSpec, arch: Arch) -> bool:
    try:
        check_target(spec, arch)
    except SpecError:
        return False
    return True
