"""Pinned keys in a client: what no pinned key signed is refused on every tier, before it is stored or loaded."""

import contextlib
import dataclasses
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService, artifact_of, reply_of

from mlaprep.clients.building import Built
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import ArtifactRejected, KernelUnavailable, SpecError
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.supply import KernelSupply
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.bundle import as_bundled, write_bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.kernels_cache.trust import TrustedKeys
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import templates_fingerprint
from mlaprep.templates.spec import KernelSpec

OTHER = KernelSpec(num_heads=16)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [generate_key(folder / name) for name in ("old", "new", "strange")]


@pytest.fixture
def trusted(keys: list[SigningKey]) -> TrustedKeys:
    return TrustedKeys((keys[0].public, keys[1].public))


def served(service: FakeService, artifact: KernelArtifact) -> None:
    service.answer = lambda request: httpx.Response(200, json=reply_of(artifact))


def link(store: Any, spec: KernelSpec, artifact: KernelArtifact) -> None:
    store.publish(artifact)
    request = request_key(arch="sm_90a", spec=spec.to_dict(), generator=templates_fingerprint())
    store.link(request, artifact.key)


def swapped_signature(spec: KernelSpec, keys: list[SigningKey]) -> KernelArtifact:
    """The kernel of the spec under a signature that a pinned key made for another."""
    signature = keys[0].sign(artifact_of(OTHER).manifest).signature
    artifact = artifact_of(spec)
    return dataclasses.replace(artifact, manifest=dataclasses.replace(artifact.manifest, signature=signature))


REFUSED = {
    "unsigned": lambda spec, keys: artifact_of(spec),
    "unknown-key": lambda spec, keys: keys[2].sign_artifact(artifact_of(spec)),
    "bad-signature": swapped_signature,
}


@pytest.mark.parametrize("reason", REFUSED)
class TestRefused:
    def test_by_the_service(
        self,
        service: FakeService,
        store: DiskStore,
        keys: list[SigningKey],
        trusted: TrustedKeys,
        spec: KernelSpec,
        arch: Arch,
        reason: str,
    ) -> None:
        served(service, REFUSED[reason](spec, keys))
        client = KernelClient(transport=service.transport(), store=store, on_miss="error", trusted_keys=trusted)
        with pytest.raises(ArtifactRejected, match="MLAPREP_TRUSTED_KEYS") as caught:
            client.artifact(spec, arch)
        assert caught.value.reason == reason
        assert list(store.list()) == []
        assert client.stats().rejected == 1
        served(service, keys[0].sign_artifact(artifact_of(spec)))
        assert client.obtain(spec, arch).tier == "service"

    @pytest.mark.parametrize("kind", ["memory", "disk"])
    @pytest.mark.parametrize("linked", [True, False])
    def test_by_the_local_store(
        self,
        tmp_path: Path,
        keys: list[SigningKey],
        trusted: TrustedKeys,
        spec: KernelSpec,
        arch: Arch,
        reason: str,
        kind: str,
        linked: bool,
    ) -> None:
        store = MemoryStore() if kind == "memory" else DiskStore(tmp_path / "store")
        artifact = REFUSED[reason](spec, keys)
        link(store, spec, artifact) if linked else store.publish(artifact)
        client = KernelClient(store=store, on_miss="error", trusted_keys=trusted)
        with pytest.raises(ArtifactRejected) as caught:
            client.artifact(spec, arch)
        assert caught.value.reason == reason
        assert not client._serving._serving
        assert KernelClient(store=store, on_miss="error").artifact(spec, arch) == artifact

    def test_a_good_one_from_the_service_takes_its_place(
        self,
        service: FakeService,
        store: DiskStore,
        keys: list[SigningKey],
        trusted: TrustedKeys,
        spec: KernelSpec,
        arch: Arch,
        reason: str,
    ) -> None:
        link(store, spec, REFUSED[reason](spec, keys))
        good = keys[1].sign_artifact(artifact_of(spec))
        served(service, good)
        client = KernelClient(transport=service.transport(), store=store, on_miss="error", trusted_keys=trusted)
        assert client.obtain(spec, arch).tier == "service"
        again = KernelClient(store=DiskStore(store.root), offline=True, on_miss="error", trusted_keys=trusted)
        assert (again.obtain(spec, arch).tier, again.artifact(spec, arch)) == ("disk", good)


class TestLies:
    """A service that holds a pinned key's signatures, and lies with them."""

    def lie(self, service: FakeService, trusted: TrustedKeys, spec: KernelSpec, arch: Arch) -> str:
        store = MemoryStore()
        client = KernelClient(transport=service.transport(), store=store, on_miss="error", trusted_keys=trusted)
        with pytest.raises(ArtifactRejected) as caught:
            client.artifact(spec, arch)
        assert list(store.list()) == []
        return caught.value.reason

    def test_another_spec(
        self, service: FakeService, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        served(service, keys[0].sign_artifact(artifact_of(OTHER)))
        assert self.lie(service, trusted, spec, arch) == "wrong-spec"

    def test_another_architecture(
        self, service: FakeService, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        served(service, keys[0].sign_artifact(artifact_of(spec, "sm_100a")))
        assert self.lie(service, trusted, spec, arch) == "wrong-arch"

    @pytest.mark.parametrize("cut", [1, 100])
    def test_cut_short(
        self, service: FakeService, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch, cut: int
    ) -> None:
        signed = keys[0].sign_artifact(artifact_of(spec))
        served(service, dataclasses.replace(signed, cubin=signed.cubin[:-cut]))
        assert self.lie(service, trusted, spec, arch) == "cubin-size"

    def test_other_bytes(
        self, service: FakeService, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        signed = keys[0].sign_artifact(artifact_of(spec))
        served(service, dataclasses.replace(signed, cubin=signed.cubin[:-1] + b"\x01"))
        assert self.lie(service, trusted, spec, arch) == "cubin-digest"

    def test_other_bytes_with_a_manifest_to_match(
        self, service: FakeService, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        """Whole in every other way: only the signature tells."""
        from cache.samples import synthetic_cubin

        forged = artifact_of(spec, cubin=synthetic_cubin(text=b"evil"))
        signature = keys[0].sign(artifact_of(spec).manifest).signature
        served(
            service,
            dataclasses.replace(forged, manifest=dataclasses.replace(forged.manifest, signature=signature)),
        )
        assert KernelClient(transport=service.transport(), store=MemoryStore()).artifact(spec, arch).cubin
        assert self.lie(service, trusted, spec, arch) == "bad-signature"


class Builder:
    def __init__(self) -> None:
        self.stores: list[object] = []

    def __call__(self, store: object) -> "Builder":
        self.stores.append(store)
        return self

    def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
        @dataclasses.dataclass(frozen=True)
        class Now:
            artifact: KernelArtifact
            cached: bool = False

        return Now(artifact_of(spec, str(arch)))

    def close(self) -> None: ...


class TestCompiledHere:
    def test_is_used_and_never_stored(
        self, store: DiskStore, trusted: TrustedKeys, spec: KernelSpec, arch: Arch, service: FakeService
    ) -> None:
        served(service, artifact_of(spec))
        builder = Builder()
        supply = KernelSupply(lambda: store, service.transport(), builder, trusted_keys=trusted)
        assert supply.obtain(spec, arch).tier == "compiled"
        assert supply.obtain(spec, arch).tier == "memory"
        assert supply.tally.stats().rejected == 1
        assert list(store.list()) == []
        assert store not in builder.stores

    def test_an_unsigned_entry_on_disk_is_compiled_anew(
        self, store: DiskStore, trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        link(store, spec, artifact_of(spec))
        supply = KernelSupply(lambda: store, None, Builder(), trusted_keys=trusted)
        assert supply.obtain(spec, arch).tier == "compiled"
        assert supply.tally.stats().disk == 0

    def test_with_a_real_compiler(self, store: DiskStore, trusted: TrustedKeys, spec: KernelSpec, arch: Arch) -> None:
        link(store, spec, artifact_of(spec))
        with KernelClient(store=store, offline=True, trusted_keys=trusted) as client:
            obtained = client.obtain(spec, arch)
        assert (obtained.tier, obtained.artifact.manifest.signature) == ("compiled", None)
        assert [manifest.key for manifest in store.list()] == [artifact_of(spec).key]


class TestConfiguration:
    @pytest.mark.parametrize("text", ["", " ", "ed25519:", "nonsense", "/nonexistent"])
    def test_a_variable_without_keys_is_an_error_at_the_start(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", text)
        with pytest.raises(SpecError, match="MLAPREP_TRUSTED_KEYS"):
            KernelClient()

    @pytest.mark.parametrize("given", ["", [], (), ["nonsense"], 3, [3], True])
    def test_so_is_an_argument(self, given: Any) -> None:
        with pytest.raises(SpecError, match="trusted_keys"):
            KernelClient(trusted_keys=given)

    def test_by_variable_list_and_file(
        self,
        service: FakeService,
        keys: list[SigningKey],
        spec: KernelSpec,
        arch: Arch,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        listed = tmp_path / "trusted"
        listed.write_text(f"{keys[0].public.text}\n")
        listed.chmod(0o644)
        served(service, keys[0].sign_artifact(artifact_of(spec)))

        def tier(**options: Any) -> str:
            transport = service.transport()
            return (
                KernelClient(transport=transport, store=MemoryStore(), on_miss="error", **options)
                .obtain(spec, arch)
                .tier
            )

        assert tier(trusted_keys=[listed]) == tier(trusted_keys=listed) == tier(trusted_keys=str(listed)) == "service"
        assert tier(trusted_keys=[listed]) == tier(trusted_keys=keys[0].public.text) == "service"
        monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", f"{keys[1].public.text},{listed}")
        assert tier() == "service"
        with pytest.raises(ArtifactRejected):
            tier(trusted_keys=keys[1].public.text)

    def test_pins_travel_with_a_pickled_client(
        self, store: DiskStore, trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        link(store, spec, artifact_of(spec))
        client = KernelClient(store=store, on_miss="error", trusted_keys=trusted)
        with pytest.raises(ArtifactRejected):
            pickle.loads(pickle.dumps(client)).artifact(spec, arch)

    def test_a_kernel_that_is_nowhere_is_no_matter_of_trust(
        self, store: DiskStore, trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        with pytest.raises(KernelUnavailable, match="not in the local store"):
            KernelClient(store=store, on_miss="error", trusted_keys=trusted).artifact(spec, arch)


class TestDeadAndSlow:
    """With keys pinned too, a service that is no help costs its deadline at most, and then the next place is asked."""

    @pytest.fixture(params=["hangs", "drips", "500", "cut", "nonsense", "dead"])
    def url(self, request: pytest.FixtureRequest) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            if request.param == "dead":
                listener.close()
                yield address
                return
            stop = threading.Event()
            thread = threading.Thread(target=misbehave, args=(listener, request.param, stop), daemon=True)
            thread.start()
            yield address
            stop.set()
            thread.join(5)

    def test_the_next_place_is_asked_in_time(
        self, url: str, trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        supply = KernelSupply(MemoryStore, RestTransport(url, timeout=0.6), Builder(), trusted_keys=trusted)
        began = time.monotonic()
        assert supply.obtain(spec, arch).tier == "compiled"
        assert supply.obtain(OTHER, arch).tier == "compiled"
        assert time.monotonic() - began < 2.5  # 0.6 s, or twice that, on a busy machine
        assert supply.tally.stats().service == 0

    def test_a_bundle_spares_the_wait(
        self, url: str, tmp_path: Path, keys: list[SigningKey], trusted: TrustedKeys, spec: KernelSpec, arch: Arch
    ) -> None:
        path = tmp_path / "kernels.tar"
        write_bundle(path, [as_bundled(artifact_of(spec), keys[1])])
        client = KernelClient(url, store=MemoryStore(), on_miss="error", trusted_keys=trusted, bundles=[path])
        assert client.obtain(spec, arch).tier == "bundle"
        client.close()


def misbehave(listener: socket.socket, how: str, stop: threading.Event) -> None:
    listener.settimeout(0.05)
    while not stop.is_set():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(1)
                connection.recv(65536)
                if how == "hangs":
                    stop.wait(3)
                elif how == "500":
                    connection.sendall(b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}")
                elif how == "cut":
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{")
                elif how == "nonsense":
                    connection.sendall(b"\x00\xff" * 500)
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
                    while not stop.wait(0.05):
                        connection.sendall(b" ")
