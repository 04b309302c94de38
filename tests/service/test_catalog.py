"""The catalog: one look at the store for all who ask, and none of them holds up the service."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from listing_kit import Listed, manifests_of
from service_kit import ClientMaker

from mlaprep.service import builder as builder_module
from mlaprep.service.builder import Builder
from mlaprep.service.catalog import SORTS, Catalog, Filter, Sort, order_of, preset_specs
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


@pytest.fixture(autouse=True)
def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no compiler is known, every entry is given out, so that samples will do."""
    monkeypatch.setattr(builder_module, "installed_nvrtc_version", lambda: None)


@pytest.fixture
def idle() -> Iterator[Compiler]:
    with Compiler(processes=1) as compiler:
        yield compiler


def test_six_thousand_entries_are_paged_in_a_fraction_of_a_second(
    idle: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Listed(manifests_of(6000))
    described = 0
    real = builder_module.Builder.use

    def use(self: Builder, spec: KernelSpec, arch: Arch) -> Any:
        nonlocal described
        described += 1
        return real(self, spec, arch)

    monkeypatch.setattr(builder_module.Builder, "use", use)
    with Builder(store, idle) as builder:
        catalog = Catalog(builder)
        first = catalog.page(Filter(), 100)
        assert first.total >= 6000
        described = 0
        began = time.perf_counter()
        assert catalog.page(Filter(), 100) == first
        assert time.perf_counter() - began < 0.5
        assert described == sum(len(variant.archs) for variant in first.variants)
        assert store.looks == 1


def test_pages_hold_every_variant_once_and_in_order(idle: Compiler) -> None:
    store = Listed(manifests_of(250))
    with Builder(store, idle) as builder:
        catalog = Catalog(builder)
        seen, after = [], None
        while True:
            page = catalog.page(Filter(after=after), 60)
            seen += [variant.spec for variant in page.variants]
            assert page.total == len(page.variants) + (250 + len(preset_specs()) - len(seen))
            if page.total == len(page.variants):
                break
            after = seen[-1]
        assert seen == sorted({*seen}, key=order_of)
        assert len(seen) == 250 + len(preset_specs())
        built = catalog.page(Filter(state="built"), 500)
        assert built.total == len(built.variants) == 250


@pytest.mark.parametrize("sort", SORTS)
def test_pages_of_any_sort_hold_every_variant_once(idle: Compiler, sort: Sort) -> None:
    manifests = [
        dataclasses.replace(manifest, cubin_size=1000 + number % 7, registers=20 + number % 5)
        for number, manifest in enumerate(manifests_of(40))
    ]
    with Builder(Listed(manifests), idle) as builder:
        for number, manifest in enumerate(manifests):
            for _ in range(number % 3):
                builder._note_use((KernelSpec.from_dict(manifest.spec), Arch("sm_100a")))
        catalog, seen, after = Catalog(builder), [], None
        while True:
            page = catalog.page(Filter(state="built", after=after), 9, sort)
            seen += page.variants
            if page.total == len(page.variants):
                break
            after = seen[-1].spec
    assert len({variant.spec for variant in seen}) == len(seen) == 40
    rows = [variant.archs[0] for variant in seen]
    figures = {
        "shape": [0 for _ in rows],
        "size": [row.manifest.cubin_size for row in rows if row.manifest],
        "registers": [row.manifest.registers for row in rows if row.manifest],
        "hits": [row.use.count if row.use else 0 for row in rows],
        "last_use": [row.use.last if row.use else 0 for row in rows],
    }[sort]
    placed = [(-figure, order_of(variant.spec)) for figure, variant in zip(figures, seen, strict=True)]
    assert placed == sorted(placed)


def test_what_is_new_shows_and_what_is_gone_goes(idle: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaprep.service.catalog._SNAPSHOT_S", 0.05)
    manifests = manifests_of(3)
    store = Listed(manifests[:2])
    with Builder(store, idle) as builder:
        catalog = Catalog(builder)
        assert catalog.page(Filter(state="built"), 10).total == 2
        store.manifests = manifests[1:]
        time.sleep(0.3)
        page = catalog.page(Filter(state="built"), 10)
        assert [variant.spec.out_token_stride for variant in page.variants] == [65552, 65568]


def test_a_slow_store_is_read_by_one_and_holds_up_nobody(make_client: ClientMaker) -> None:
    """Reading takes longer than a reading is good for, and as many ask as there are threads."""
    store = Listed(manifests_of(20), pause_s=1.2)
    client = make_client(store=store, read_only=True)
    with ThreadPoolExecutor(60) as threads:
        storm = [threads.submit(client.get, "/v1/variants?limit=1") for _ in range(50)]
        time.sleep(0.3)
        began = time.monotonic()
        assert client.get("/readyz").status_code == 200
        assert client.get(KERNEL).status_code == 404
        assert time.monotonic() - began < 0.8
        assert {reply.result().status_code for reply in storm} == {200}
        assert (store.looks, store.most) == (1, 1)
        time.sleep(1.1)  # what was read is old now, but the next reading only costs whoever does it
        again = [threads.submit(client.get, "/v1/variants?limit=1") for _ in range(50)]
        began = time.monotonic()
        assert {reply.result().status_code for reply in again} == {200}
        assert time.monotonic() - began < 5
    assert store.looks <= 2
    assert store.most == 1


def test_a_reading_counts_from_its_end(idle: Compiler) -> None:
    store = Listed(manifests_of(1), pause_s=1.2)
    with Builder(store, idle) as builder:
        catalog = Catalog(builder)
        threads = [threading.Thread(target=catalog.page, args=(Filter(), 1)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        catalog.page(Filter(), 1)
        assert store.looks == 1
