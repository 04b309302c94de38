"""Catalog: which variants there are, and how far each is on every architecture."""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.service.builder import Builder, Target, Use
from mlaprep.service.errors import CatalogUnread
from mlaprep.service.variant_order import Facet, Order, Place, VariantOrder
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import KernelSpec

State = Literal["built", "building", "failed", "missing"]
STATES: Final[tuple[State, ...]] = get_args(State)

Sort = Literal["shape", "size", "registers", "hits", "last_use"]
"""What a listing starts with: small shapes, or the largest figure that a variant has on any architecture shown."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)

_SNAPSHOT_S: Final = 1.0
_COMPILER_FIRST_S: Final = 3.0
_POLL_S: Final = 0.02
_FIRST_WAIT_S: Final = 4.0  # below the patience of whatever stands in front
_SHORT_S: Final = 0.1  # a reading that may be done before an answer; a longer one goes on behind it
_SHORT_AFTER_BUILD_S: Final = 1.0  # the same where this process has built more, which its callers expect to see


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
    kv_lora_rank: int | None = None
    tp: int | None = None
    """Variants that a preset, or ``model``, has at this tensor-parallel degree."""
    layout: str | None = None
    state: State | None = None
    after: KernelSpec | None = None
    """Variants that stand behind this one, in the order of the listing."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the variants that match, and how many do from the cursor on."""

    variants: tuple[Variant, ...]
    total: int


_Manifests = Mapping[Target, Manifest]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the store held when it was read last."""

    manifests: _Manifests = field(default_factory=dict)
    archs: Mapping[KernelSpec, frozenset[Arch]] = field(default_factory=dict)
    """Of every variant in the store or of a preset."""
    shapes: Mapping[KernelSpec, Order] = field(default_factory=dict)
    """Where each of them stands by shape: its name is costly to spell."""
    compiles: int = -1
    taken: float = float("-inf")
    """When reading ended."""
    took: float = 0.0
    orders: dict[tuple[Sort, Arch | None], VariantOrder] = field(default_factory=dict)
    """Those that were asked for so far; making one looks at every variant."""

    def order(self, sort: Sort, arch: Arch | None) -> VariantOrder:
        """Every variant by shape, or by its largest figure on any architecture or on this one."""
        key: tuple[Sort, Arch | None] = (sort, arch) if sort in ("size", "registers") else ("shape", None)
        if (order := self.orders.get(key)) is None:
            order = self.orders[key] = VariantOrder(
                ((-self.figure(*key, spec), shape), spec, self._facets(spec)) for spec, shape in self.shapes.items()
            )
        return order

    def figure(self, sort: Sort, arch: Arch | None, spec: KernelSpec, among: Iterable[Arch] | None = None) -> float:
        """The largest size or number of registers of a variant, 0 where it is not built."""
        if sort == "shape":
            return 0
        archs = among if among is not None else self.archs.get(spec, ()) if arch is None else (arch,)
        built = [manifest for arch in archs if (manifest := self.manifests.get((spec, arch))) is not None]
        return max((each.cubin_size if sort == "size" else each.registers for each in built), default=0)

    def _facets(self, spec: KernelSpec) -> list[Facet]:
        facets = list(_spec_facets(spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.layout))
        for arch in self.archs[spec]:
            state = "built" if (spec, arch) in self.manifests else "missing"
            facets += [("arch", arch), (state, arch), (state, None)]
        return facets

    def is_fresh(self, compiles: int) -> bool:
        """Whether it will do; reading takes a fifth of the time at most, half where this process has built more."""
        pause = self.took if compiles != self.compiles else max(_SNAPSHOT_S, 4 * self.took)
        return time.monotonic() - self.taken <= pause


_NOTHING: Final = _Snapshot()
_FIRST_ORDERS: Final[tuple[tuple[Sort, Arch | None], ...]] = (("shape", None), ("size", None), ("registers", None))


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

    @property
    def others(self) -> Set[KernelSpec]:
        """Variants of which a snapshot does not know all: something of them is being built, or failed."""
        return self._others.keys()

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

    def figure(self, sort: Sort, spec: KernelSpec, archs: Iterable[Arch]) -> float:
        """What a listing is sorted by: the largest on any of these architectures, 0 where there is none."""
        if sort in ("hits", "last_use"):
            uses = [use for arch in archs if (use := self._builder.use(spec, arch)) is not None]
            return max((use.count if sort == "hits" else use.last for use in uses), default=0)
        return self.snapshot.figure(sort, None, spec, archs)

    def place(self, sort: Sort, spec: KernelSpec, archs: Iterable[Arch]) -> Place:
        """Where a variant stands in a listing that shows these architectures."""
        return -self.figure(sort, spec, archs), order_of(spec)

    def page(self, wanted: Filter, limit: int, sort: Sort) -> Page:
        """What the snapshot knows comes from its bits; only what is in motion is looked at one by one."""
        # What is not built has no figure, and stands by its shape.
        by_figure = sort in ("size", "registers") and wanted.state in (None, "built")
        ordered_by: Sort = sort if by_figure else "shape"
        order = self.snapshot.order(ordered_by, wanted.arch)
        alone = set(self.others)
        if sort in ("hits", "last_use"):
            alone |= {spec for spec, _ in self._builder.used()}
        bits = 0 if wanted.state in ("building", "failed") else order.having(_wanted_facets(wanted))
        known = (spec for spec in alone if spec in self.snapshot.archs)
        bits = order.without(
            bits, ((-self.snapshot.figure(ordered_by, wanted.arch, spec), order_of(spec)) for spec in known)
        )
        needed = set(_spec_facets_wanted(wanted))
        moving = [
            (self.place(sort, spec, archs), spec)
            for spec in alone
            if needed.issubset(_spec_facets(spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.layout))
            and (archs := self.matching_archs(spec, wanted))
        ]
        if wanted.after is not None:
            last = self.place(sort, wanted.after, self.matching_archs(wanted.after, wanted))
            bits = order.behind(bits, last)
            moving = [entry for entry in moving if entry[0] > last]
        first = sorted([*moving, *itertools.islice(order.walk(bits), limit)], key=lambda entry: entry[0])[:limit]
        variants = tuple(self.describe(spec, self.matching_archs(spec, wanted)) for _, spec in first)
        return Page(variants, bits.bit_count() + len(moving))

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
        self._snapshot = _NOTHING
        self._version: str | None = None
        self._served: dict[str, Target | None] = {}
        """By key of an entry: what it is given out for, if for anything."""

    def page(self, wanted: Filter, limit: int, sort: Sort = "shape") -> Page:
        """The first variants that match, in order. What another process built shows within seconds.

        Raises:
            CatalogUnread: the store is being read for the first time, and takes long.
        """
        return self._view().page(wanted, limit, sort)

    def start(self) -> None:
        """Read the store in a thread of its own, so that the first question need not.

        Once the compiler is there, or after a moment: both at once would keep the service from being ready.
        """
        threading.Thread(target=self._read_first, name="mlaprep-catalog", daemon=True).start()

    def _read_first(self) -> None:
        until = time.monotonic() + _COMPILER_FIRST_S
        while self._builder.compiler.state().status == "starting" and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._refresh(wait=False)

    @property
    def is_indexing(self) -> bool:
        """Whether the store is being read for the first time."""
        return self._snapshot is _NOTHING and self._reading.locked()

    def variant(self, spec: KernelSpec, archs: Iterable[Arch]) -> Variant:
        """One variant on each of these architectures that can run it, and on those it is built for.

        Raises:
            CatalogUnread: as for :meth:`page`.
        """
        view = self._view()
        return view.describe(spec, view.archs(spec) | {arch for arch in archs if _runs(spec, arch)})

    def states(self, targets: Iterable[Target]) -> list[State]:
        """How far each of these kernels is, as :meth:`page` tells it, with the same errors."""
        view = self._view()
        return [view.state(target) for target in targets]

    def _view(self) -> _View:
        snapshot = self._snapshot
        if not snapshot.is_fresh(self._builder.compiles):
            short = _SHORT_S if snapshot.compiles == self._builder.compiles else _SHORT_AFTER_BUILD_S
            if snapshot is _NOTHING or snapshot.took <= short:
                self._refresh(wait=snapshot is _NOTHING)
            elif not self._reading.locked():
                self._refresh_behind()
        return _View(self._snapshot, self._builder)

    def _refresh(self, *, wait: bool) -> None:
        if not self._reading.acquire(timeout=_FIRST_WAIT_S if wait else 0):
            if self._snapshot is _NOTHING and wait:
                raise CatalogUnread()
            return
        try:
            if not self._snapshot.is_fresh(self._builder.compiles):
                self._snapshot = self._read()
        finally:
            self._reading.release()

    def _refresh_behind(self) -> None:
        threading.Thread(target=self._refresh, kwargs={"wait": False}, name="mlaprep-catalog", daemon=True).start()

    def _read(self) -> _Snapshot:
        began, compiles = time.monotonic(), self._builder.compiles
        archs: dict[KernelSpec, set[Arch]] = {}
        manifests: dict[Target, Manifest] = {}
        one: dict[KernelSpec, KernelSpec] = {}
        for (equal, arch), manifest in self._entries():
            spec = one.setdefault(equal, equal)  # one object for all: to compare two field by field is slow
            manifests[spec, arch] = manifest
            archs.setdefault(spec, set()).add(arch)
        for spec in preset_specs():
            archs.setdefault(spec, set()).update(arch for arch in DEFAULT_ARCHS if _runs(spec, arch))
        last = self._snapshot
        known = {spec: frozenset(each) for spec, each in archs.items()}
        if known == last.archs and manifests == last.manifests:
            orders = last.orders
        else:
            orders = {}
        shapes = {spec: last.shapes.get(spec) or order_of(spec) for spec in known}
        snapshot = _Snapshot(manifests, known, shapes, compiles, orders=orders)
        for asked in last.orders or _FIRST_ORDERS:
            snapshot.order(*asked)
        taken = time.monotonic()
        return dataclasses.replace(snapshot, taken=taken, took=taken - began)

    def _entries(self) -> Iterator[tuple[Target, Manifest]]:
        """The entries that a worker would be given: of this release's source and this compiler, the latest last."""
        version = self._builder.serving_version()
        known = self._served if version == self._version else {}
        served: dict[str, Target | None] = {}
        specs: dict[str, KernelSpec] = {}
        for manifest in sorted(self._builder.store.list(), key=lambda manifest: manifest.created_at):
            key = manifest.key
            served[key] = target = known[key] if key in known else self._target(manifest, version, specs)
            if target is not None:
                yield target, manifest
        self._version, self._served = version, served

    def _target(self, manifest: Manifest, version: str | None, specs: dict[str, KernelSpec]) -> Target | None:
        text = manifest.spec.text
        try:
            if (spec := specs.get(text)) is None:  # an entry for each architecture has the same
                spec = specs[text] = KernelSpec.from_dict(manifest.spec)
            arch = Arch(manifest.arch)
        except SpecError:  # from a release that knew more
            return None
        return (spec, arch) if self._builder.would_serve(manifest, spec, arch, version) else None


def order_of(spec: KernelSpec) -> Order:
    """Sort key of a variant: by shape, then by name."""
    return spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.variant_id


@functools.cache
def preset_specs() -> tuple[KernelSpec, ...]:
    """The default variant of every preset and degree."""
    return tuple(dict.fromkeys(preset.spec(tp) for preset in PRESETS.values() for tp in preset.tp_degrees))


def models_of(spec: KernelSpec) -> tuple[str, ...]:
    """Presets whose shape and cache layout this spec has, at one of their degrees."""
    facets = _spec_facets(spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.layout)
    return tuple(name for name in PRESETS if ("model", name) in facets)


@functools.lru_cache(maxsize=65536)
def _spec_facets(num_heads: int, kv_lora_rank: int, rope_dim: int, layout: str) -> frozenset[Facet]:
    """What a listing filters by and that never changes of a variant."""
    facets: set[Facet] = {("num_heads", num_heads), ("kv_lora_rank", kv_lora_rank), ("layout", layout)}
    for name, preset in PRESETS.items():
        if (kv_lora_rank, rope_dim, layout) == (preset.kv_lora_rank, preset.rope_dim, preset.layout):
            for tp in preset.tp_degrees:
                if preset.num_heads // tp == num_heads:
                    facets |= {("model", name), ("tp", tp), ("tp", (name, tp))}
    return frozenset(facets)


def _spec_facets_wanted(wanted: Filter) -> Iterator[Facet]:
    for name in ("num_heads", "kv_lora_rank", "layout", "model"):
        if (value := getattr(wanted, name)) is not None:
            yield name, value
    if wanted.tp is not None:
        yield "tp", wanted.tp if wanted.model is None else (wanted.model, wanted.tp)


def _wanted_facets(wanted: Filter) -> Iterator[Facet]:
    yield from _spec_facets_wanted(wanted)
    if wanted.state is not None:
        yield wanted.state, wanted.arch
    elif wanted.arch is not None:
        yield "arch", wanted.arch


def _runs(spec: KernelSpec, arch: Arch) -> bool:
    try:
        check_target(spec, arch)
    except SpecError:
        return False
    return True
