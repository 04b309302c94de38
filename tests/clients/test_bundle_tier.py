"""Bundles under a client: read in place below the disk, proved like everything else, and no obstacle when damaged."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService, artifact_of

from mlaprep.clients.bundle_install import install_bundle
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import ArtifactRejected, KernelUnavailable
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.bundle import Bundle, as_bundled, write_bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import BundleError, StoreError
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

OTHER = KernelSpec(num_heads=16)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [generate_key(folder / name) for name in ("one", "two")]


@pytest.fixture
def path(tmp_path: Path, spec: KernelSpec) -> Path:
    path = tmp_path / "kernels.tar"
    write_bundle(
        path, [as_bundled(artifact_of(item, arch)) for item in (spec, OTHER) for arch in ("sm_90a", "sm_100a")]
    )
    return path


def worker(*paths: Path, **options: Any) -> KernelClient:
    return KernelClient(**{"store": MemoryStore(), "on_miss": "error", "offline": True, "bundles": paths} | options)


def spoil(path: Path, artifact: KernelArtifact) -> None:
    content = path.read_bytes()
    place = content.index(artifact.cubin) + 70
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


class TestTier:
    def test_is_read_in_place_and_copied_nowhere_but_to_memory(
        self, path: Path, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        client = worker(path, store=store)
        obtained = client.obtain(spec, arch)
        assert (obtained.tier, obtained.cached) == ("bundle", True)
        assert obtained.artifact == as_bundled(artifact_of(spec))
        assert client.obtain(spec, arch).tier == "memory"
        assert (client.stats().bundle, client.stats().memory, client.stats().hits) == (1, 1, 2)
        assert list(store.list()) == []

    def test_comes_behind_the_disk_and_ahead_of_the_service(
        self, path: Path, store: DiskStore, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        client = worker(path, store=store, transport=service.transport(), offline=False)
        assert client.obtain(spec, arch).tier == "bundle"
        assert client.obtain(KernelSpec(num_heads=8), arch).tier == "service"
        assert worker(path, store=store).obtain(KernelSpec(num_heads=8), arch).tier == "disk"
        assert len(service.requests) == 1

    def test_several_by_the_environment(
        self, path: Path, tmp_path: Path, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        more = tmp_path / "more.tar"
        write_bundle(more, [artifact_of(KernelSpec(num_heads=8))])
        monkeypatch.setenv("MLAPREP_BUNDLE", f"{tmp_path / 'none.tar'}:{path}::{more}")
        client = KernelClient(store=MemoryStore(), on_miss="error", offline=True)
        assert client.obtain(spec, arch).tier == client.obtain(KernelSpec(num_heads=8), arch).tier == "bundle"
        assert pickle.loads(pickle.dumps(client)).obtain(OTHER, arch).tier == "bundle"
        monkeypatch.setenv("MLAPREP_BUNDLE", "")
        with pytest.raises(KernelUnavailable):
            KernelClient(store=MemoryStore(), on_miss="error", offline=True).obtain(spec, arch)

    def test_one_by_its_path_alone(self, path: Path, spec: KernelSpec, arch: Arch) -> None:
        for given in (path, str(path)):
            client = KernelClient(store=MemoryStore(), on_miss="error", offline=True, bundles=given)
            assert client.obtain(spec, arch).tier == "bundle"

    def test_another_jinja_wrote_the_head(self, tmp_path: Path, spec: KernelSpec, arch: Arch) -> None:
        """No link in an archive would be found by a release with another fingerprint; the variant is."""
        path = tmp_path / "kernels.tar"
        write_bundle(path, [artifact_of(spec, source=render(spec).text.replace("// jinja2 ", "// jinja2 0"))])
        assert worker(path).obtain(spec, arch).tier == "bundle"

    @pytest.mark.parametrize("damage", ["cubin", "cut", "missing", "writable", "no-bundle"])
    def test_damage_is_a_miss_that_is_told(
        self, path: Path, spec: KernelSpec, arch: Arch, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        whole = path.read_bytes()
        if damage == "cubin":
            spoil(path, artifact_of(spec))
        elif damage == "cut":
            path.write_bytes(whole[:-1])
        elif damage == "missing":
            path.unlink()
        elif damage == "writable":
            path.chmod(0o666)
        else:
            path.write_text("no bundle")
        client = worker(path)
        for _ in range(2):
            with pytest.raises(KernelUnavailable, match=str(path)):
                client.obtain(spec, arch)
        assert len([record for record in caplog.records if "bundle is left out" in record.message]) == 1
        path.unlink(missing_ok=True)
        path.write_bytes(whole)  # a good one in its place serves without a restart
        path.chmod(0o644)
        assert client.obtain(spec, arch).tier == "bundle"

    def test_a_damaged_member_leaves_the_others(self, path: Path, spec: KernelSpec, arch: Arch) -> None:
        spoil(path, artifact_of(spec))
        client = worker(path)
        assert client.obtain(OTHER, arch).tier == "bundle"
        with pytest.raises(KernelUnavailable, match=r"kernel\.cubin"):
            client.obtain(spec, arch)

    @pytest.mark.parametrize("changes", [{"entry": "another"}, {"source": "extern void mla_prepare();\n"}])
    def test_another_release_s_kernel_is_refused(
        self, tmp_path: Path, spec: KernelSpec, arch: Arch, changes: dict[str, Any]
    ) -> None:
        path = tmp_path / "kernels.tar"
        write_bundle(path, [artifact_of(spec, **changes)])
        client = worker(path)
        with pytest.raises(KernelUnavailable, match="bundle: asked for"):
            client.obtain(spec, arch)
        assert client.stats().rejected == 1

    def test_its_kernels_are_known_by_name_without_being_read(
        self, path: Path, spec: KernelSpec, caplog: pytest.LogCaptureFixture
    ) -> None:
        spoil(path, artifact_of(spec))
        bundles = worker(path, path.with_name("none.tar")).bundles
        assert bundles.names() == {(item.variant_id, arch) for item in (spec, OTHER) for arch in ("sm_90a", "sm_100a")}
        assert bundles.names()
        assert len(caplog.records) == 1

    def test_reading_costs_no_time_that_a_worker_would_notice(self, path: Path, spec: KernelSpec, arch: Arch) -> None:
        import time

        client = worker(path)
        client.obtain(OTHER, arch)  # reads templates, opens the archive
        began = time.perf_counter()
        client.obtain(spec, arch)
        assert time.perf_counter() - began < 0.5


class TestTrust:
    def test_a_signed_bundle(
        self, tmp_path: Path, keys: list[SigningKey], store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        path = tmp_path / "kernels.tar"
        write_bundle(path, [as_bundled(artifact_of(spec), keys[0])])
        assert worker(path, trusted_keys=[keys[0].public.text]).obtain(spec, arch).tier == "bundle"
        with pytest.raises(ArtifactRejected, match="not pinned") as caught:
            worker(path, trusted_keys=[keys[1].public.text]).obtain(spec, arch)
        assert caught.value.reason == "unknown-key"

    def test_an_unsigned_one(self, path: Path, keys: list[SigningKey], spec: KernelSpec, arch: Arch) -> None:
        with pytest.raises(ArtifactRejected) as caught:
            worker(path, trusted_keys=[keys[0].public.text]).obtain(spec, arch)
        assert caught.value.reason == "unsigned"

    def test_a_signed_one_serves_where_the_disk_has_it_unsigned(
        self, tmp_path: Path, keys: list[SigningKey], store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        KernelClient(store=store, transport=FakeService().transport()).obtain(spec, arch)
        path = tmp_path / "kernels.tar"
        write_bundle(path, [as_bundled(artifact_of(spec), keys[0])])
        assert worker(path, store=store).obtain(spec, arch).tier == "disk"
        assert worker(path, store=store, trusted_keys=[keys[0].public.text]).obtain(spec, arch).tier == "bundle"


class TestInstall:
    def test_fills_an_empty_store_and_changes_nothing_the_second_time(
        self, path: Path, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        first = install_bundle(Bundle.open(path), store)
        assert [(item.new, item.current) for item in first] == [(True, True)] * 4
        before = {entry: entry.stat().st_mtime_ns for entry in store.root.rglob("kernel.*")}
        assert [(item.new, item.current) for item in install_bundle(Bundle.open(path), store)] == [(False, True)] * 4
        assert {entry: entry.stat().st_mtime_ns for entry in store.root.rglob("kernel.*")} == before
        client = worker(store=DiskStore(store.root))
        assert client.obtain(spec, arch).tier == "disk"

    def test_a_damaged_bundle_leaves_nothing_behind(self, path: Path, store: DiskStore, spec: KernelSpec) -> None:
        spoil(path, artifact_of(OTHER, "sm_90a"))
        with pytest.raises(BundleError, match=r"kernel\.cubin") as caught:
            install_bundle(Bundle.open(path), store)
        assert caught.value.member.endswith(f"{artifact_of(OTHER, 'sm_90a').key}/kernel.cubin")
        assert list(store.list()) == []
        assert list(store.root.rglob("kernel.*")) == []

    def test_what_no_pinned_key_signed_is_not_installed(
        self, tmp_path: Path, keys: list[SigningKey], store: DiskStore, spec: KernelSpec
    ) -> None:
        path = tmp_path / "kernels.tar"
        write_bundle(path, [as_bundled(artifact_of(spec), keys[0]), as_bundled(artifact_of(OTHER), keys[1])])
        with pytest.raises(BundleError, match="not pinned"):
            install_bundle(
                Bundle.open(path), store, worker(trusted_keys=keys[0].public.text)._configuration.trusted_keys
            )
        assert list(store.list()) == []

    def test_a_new_signature_replaces_the_old_one(
        self, tmp_path: Path, keys: list[SigningKey], store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        path = tmp_path / "kernels.tar"
        for key in (None, *keys):
            write_bundle(path, [as_bundled(artifact_of(spec), key)])
            install_bundle(Bundle.open(path), store)
        assert worker(store=store, trusted_keys=keys[1].public.text).obtain(spec, arch).tier == "disk"
        with pytest.raises(ArtifactRejected):
            worker(store=store, trusted_keys=keys[0].public.text).obtain(spec, arch)

    def test_another_release_s_kernels_are_kept_and_called_so(
        self, tmp_path: Path, store: DiskStore, spec: KernelSpec
    ) -> None:
        path = tmp_path / "kernels.tar"
        write_bundle(path, [artifact_of(spec, entry="another")])
        assert [(item.new, item.current) for item in install_bundle(Bundle.open(path), store)] == [(True, False)]

    def test_a_place_that_keeps_nothing_is_told(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="--cache-dir"):
            install_bundle(Bundle.open(path), MemoryStore())
        with pytest.raises(StoreError, match="MLAPREP_CACHE_MAX_BYTES"):
            install_bundle(Bundle.open(path), DiskStore(tmp_path / "small", max_bytes=1000))
