"""Pages of a full catalog: the same as a look at every variant, and right while entries come and go."""

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator

import pytest
from listing_kit import Listed, manifests_of

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.service import builder as builder_module
from mlaprep.service import catalog as catalog_module
from mlaprep.service.builder import Builder
from mlaprep.service.catalog import SORTS, Catalog, Filter, Sort, _spec_facets, _spec_facets_wanted, preset_specs
from mlaprep.service.compiler import Compiler
from mlaprep.service.errors import CatalogUnread, CompileFailed
from mlaprep.service.problems import problem_of
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

ARCHS = (Arch("sm_90a"), Arch("sm_100a"))
FILTERS = (
    Filter(),
    *(Filter(state=state) for state in ("built", "missing", "failed")),
    Filter(arch=ARCHS[0]),
    Filter(arch=ARCHS[1], state="built"),
    Filter(arch=ARCHS[0], state="missing"),
    Filter(num_heads=12),
    Filter(kv_lora_rank=512, layout="fp8", state="built"),
    Filter(model="kimi-k3"),
    Filter(model="kimi-k3", tp=8),
    Filter(tp=4),
    Filter(tp=3),
)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builder]:
    """Over 150 variants on one or two architectures, some used, some refused lately."""
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: None)
    chance = random.Random(7)
    manifests: list[Manifest] = []
    for number, manifest in enumerate(manifests_of(150)):
        for arch in ARCHS[: 1 + number % 2]:
            figures = {"cubin_size": 1000 + chance.randrange(9), "registers": 20 + chance.randrange(5)}
            key = f"{number * 2 + ARCHS.index(arch):064x}"
            manifests.append(dataclasses.replace(manifest, arch=str(arch), key=key, **figures))
    with Compiler(processes=1) as compiler, Builder(Listed(manifests), compiler) as made:
        for manifest in chance.choices(manifests, k=60):
            made._note_use((KernelSpec.from_dict(manifest.spec), Arch(manifest.arch)))
        for spec in (*preset_specs()[:2], KernelSpec(num_heads=7, out_token_stride=32768), _spec_of(manifests[4])):
            made._remember_failure((spec, ARCHS[1]), CompileFailed("refused"))
        yield made


def _spec_of(manifest: Manifest) -> KernelSpec:
    return KernelSpec.from_dict(manifest.spec)


def scanned(catalog: Catalog, wanted: Filter, sort: Sort) -> list[KernelSpec]:
    """What a listing holds, by looking at every variant."""
    view = catalog._view()
    needed = set(_spec_facets_wanted(wanted))
    found = []
    for spec in {*view.snapshot.archs, *view.others}:
        facets = _spec_facets(spec.num_heads, spec.kv_lora_rank, spec.rope_dim, spec.layout)
        archs = view.matching_archs(spec, wanted)
        if archs and needed <= facets:
            found.append((view.place(sort, spec, archs), spec))
    return [spec for _, spec in sorted(found, key=lambda entry: entry[0])]


@pytest.mark.parametrize("sort", SORTS)
def test_pages_are_those_of_a_scan(builder: Builder, sort: Sort) -> None:
    catalog = Catalog(builder)
    lengths = []
    for wanted in FILTERS:
        expected, seen, after = scanned(catalog, wanted, sort), [], None
        lengths.append(len(expected))
        for _ in itertools.count():
            page = catalog.page(dataclasses.replace(wanted, after=after), 17, sort)
            assert page.total == len(expected) - len(seen), wanted
            seen += [variant.spec for variant in page.variants]
            if page.total == len(page.variants):
                break
            after = seen[-1]
        assert seen == expected, wanted
    assert lengths[0] > 150
    assert lengths[3] == 3  # the fourth was built after all
    assert lengths[-1] == 0


@pytest.mark.parametrize("sort", ["shape", "size", "registers"])
def test_a_cursor_stays_right_while_entries_come_and_go(
    builder: Builder, sort: Sort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_SNAPSHOT_S", 0.0)
    catalog, store = Catalog(builder), builder.store
    assert isinstance(store, Listed)
    whole = scanned(catalog, Filter(state="built"), sort)
    seen = [variant.spec for variant in catalog.page(Filter(state="built"), 40, sort).variants]
    gone = {whole[3], whole[60]}
    store.manifests = [manifest for manifest in store.manifests if _spec_of(manifest) not in gone]
    deadline = time.monotonic() + 30
    while catalog.page(Filter(state="built"), 1, sort).total != len(whole) - 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while True:
        page = catalog.page(Filter(state="built", after=seen[-1]), 40, sort)
        seen += [variant.spec for variant in page.variants]
        if page.total == len(page.variants):
            break
    assert seen == [spec for spec in whole if spec != whole[60]]


def test_a_question_spells_the_names_of_its_page_alone(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(builder)
    for sort in SORTS:
        catalog.page(Filter(), 5, sort)
    spelled = 0
    spell = catalog_module.order_of

    def counted(spec: KernelSpec) -> tuple[int, int, int, str]:
        nonlocal spelled
        spelled += 1
        return spell(spec)

    monkeypatch.setattr(catalog_module, "order_of", counted)
    assert catalog.page(Filter(arch=ARCHS[1], state="built"), 5).total == 75
    assert spelled <= 2 * 4  # the refused ones, which the snapshot does not know whole


def test_the_first_reading_goes_on_behind_and_readyz_says_so(builder: Builder) -> None:
    store = builder.store
    assert isinstance(store, Listed)
    store.pause_s = 0.5
    catalog = Catalog(builder)
    assert not catalog.is_indexing
    began = time.monotonic()
    catalog.start()
    time.sleep(0.1)
    assert catalog.is_indexing
    assert time.monotonic() - began < 0.4
    assert catalog.page(Filter(state="built"), 5).total == 150
    assert not catalog.is_indexing
    assert store.looks == 1


def test_nobody_waits_for_long_while_the_store_is_read_for_the_first_time(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = builder.store
    assert isinstance(store, Listed)
    store.pause_s = 0.5
    monkeypatch.setattr(catalog_module, "_FIRST_WAIT_S", 0.05)
    catalog = Catalog(builder)
    catalog.start()
    deadline = time.monotonic() + 10
    while not catalog.is_indexing and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(CatalogUnread, match="ask again"):
        catalog.page(Filter(), 5)
    assert (problem_of(CatalogUnread()).status, problem_of(CatalogUnread()).headers) == (503, {"retry-after": "10"})
    while catalog.is_indexing and time.monotonic() < deadline:
        time.sleep(0.01)
    assert catalog.page(Filter(state="built"), 5).total == 150


def test_equal_specs_of_a_listing_are_one_object(builder: Builder) -> None:
    catalog = Catalog(builder)
    catalog.page(Filter(), 5)
    snapshot = catalog._snapshot
    named = {spec: spec for spec in snapshot.archs}
    assert all(spec is named[spec] for spec, _ in snapshot.manifests)
