"""Catalog: which variants there are, and how far each is on every architecture."""

import functools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.service.builder import Builder, Use
from mlaprep.templates.arch import DEFAULT_ARCHS, Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.presets import PRESETS, Preset
from mlaprep.templates.render import check_target
from mlaprep.templates.spec import KernelSpec

State = Literal["built", "building", "failed", "missing"]
STATES: Final[tuple[State, ...]] = get_args(State)

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

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Where it stands in a listing."""
        return order_of(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What a listing keeps; None keeps everything. A variant shows only the architectures that match."""

    arch: Arch | None = None
    model: str | None = None
    num_heads: int | None = None
    layout: str | None = None
    state: State | None = None
    after: KernelSpec | None = None
    """Variants that stand behind this one."""


@dataclass(slots=True)
class _Snapshot:
    taken: float = float("-inf")
    compiles: int = -1
    manifests: Mapping[tuple[KernelSpec, Arch], Manifest] = field(default_factory=dict)


class Catalog:
    """Variants of the presets and of the store, with what is being built."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._lock = threading.Lock()
        self._snapshot = _Snapshot()

    def variants(self, wanted: Filter) -> list[Variant]:
        """What matches, in order. Reads every manifest of the store, at most once a second."""
        found = self._rows()
        for spec in preset_specs():
            found.setdefault(spec, set()).update(arch for arch in DEFAULT_ARCHS if _runs(spec, arch))
        after = order_of(wanted.after) if wanted.after else None
        listed = []
        for spec, archs in found.items():
            if not _matches(spec, wanted) or (after is not None and order_of(spec) <= after):
                continue
            variant = self._describe(spec, sorted(archs if wanted.arch is None else archs & {wanted.arch}))
            rows = tuple(row for row in variant.archs if wanted.state in (None, row.state))
            if rows:
                listed.append(Variant(spec, variant.models, rows))
        return sorted(listed, key=lambda variant: variant.order)

    def variant(self, spec: KernelSpec, archs: Iterable[Arch]) -> Variant:
        """One variant on each of these architectures that can run it, and on those it is built for."""
        known = self._rows().get(spec, set())
        return self._describe(spec, sorted(known | {arch for arch in archs if _runs(spec, arch)}))

    def _rows(self) -> dict[KernelSpec, set[Arch]]:
        rows: dict[KernelSpec, set[Arch]] = {}
        for spec, arch in (*self._manifests(), *self._builder.in_flight(), *self._builder.failed()):
            rows.setdefault(spec, set()).add(arch)
        return rows

    def _describe(self, spec: KernelSpec, archs: Iterable[Arch]) -> Variant:
        manifests, flights, failures = self._manifests(), self._builder.in_flight(), self._builder.failed()
        rows = []
        for arch in archs:
            target = (spec, arch)
            manifest = manifests.get(target)
            state: State = "missing"
            if manifest is not None:
                state = "built"
            elif target in flights:
                state = "building"
            elif target in failures:
                state = "failed"
            rows.append(VariantArch(arch, state, manifest, self._builder.use(spec, arch)))
        return Variant(spec, models_of(spec), tuple(rows))

    def _manifests(self) -> Mapping[tuple[KernelSpec, Arch], Manifest]:
        with self._lock:
            now, compiles = time.monotonic(), self._builder.compiles
            if now - self._snapshot.taken > _SNAPSHOT_S or compiles != self._snapshot.compiles:
                self._snapshot = _Snapshot(now, compiles, dict(self._read()))
            return self._snapshot.manifests

    def _read(self) -> Iterator[tuple[tuple[KernelSpec, Arch], Manifest]]:
        """The entries that a worker would be given: of this release's source and this compiler."""
        for manifest in sorted(self._builder.store.list(), key=lambda manifest: manifest.created_at):
            try:
                spec, arch = KernelSpec.from_dict(manifest.spec), Arch(manifest.arch)
            except SpecError:  # from a release that knew more
                continue
            if self._builder.would_serve(manifest, spec, arch):
                yield (spec, arch), manifest


def order_of(spec: KernelSpec) -> tuple[int, int, int, str]:
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
