"""A worker and revoked kernels: learned from the service, kept beside the kernels, honoured offline."""

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cache.samples import synthetic_cubin
from fake_service import FakeService, artifact_of, problem, reply_of
from service_kit import wait_for

from mlaprep.clients import revoked as module
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.bundle import as_bundled, write_bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.revocation import FOLDER, Revocation, Revocations, revocations_digest
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_90a")
REASON = "wrong rows at 129 tokens"


@pytest.fixture
def artifact(spec: KernelSpec) -> KernelArtifact:
    return artifact_of(spec)


def revoking(*artifacts: KernelArtifact) -> Any:
    """An answer of the service to whoever asks for its list."""
    told = [Revocation.of(each.manifest, REASON) for each in artifacts]
    tag = f'"{revocations_digest(told)}"'

    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("if-none-match") == tag:
            return httpx.Response(304, headers={"etag": tag})
        return httpx.Response(200, headers={"etag": tag}, json={"revocations": [each.to_dict() for each in told]})

    return answer


def replacement(spec: KernelSpec) -> KernelArtifact:
    """A build of the same spec by another compiler."""
    return artifact_of(spec, nvrtc_version="13.0.88", cubin=synthetic_cubin("sm_90a", b"other code"))


def gone(request: httpx.Request) -> httpx.Response:
    return problem(410, "kernel-revoked", detail="revoked")


def worker(service: FakeService, store: DiskStore, **options: Any) -> KernelClient:
    options = {"transport": service.transport(), "on_miss": "error", "report_misses": False} | options
    return KernelClient(store=store, **options)


@pytest.fixture
def warm(service: FakeService, store: DiskStore, spec: KernelSpec) -> DiskStore:
    """A store that a worker filled before."""
    with worker(service, store) as client:
        client.artifact(spec, ARCH)
    service.requests.clear()
    service.looks.clear()
    return store


def test_a_kernel_on_disk_that_was_revoked_is_not_used(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact, caplog: pytest.LogCaptureFixture
) -> None:
    service.revoked, service.answer = revoking(artifact), gone
    with (
        caplog.at_level(logging.WARNING, "mlaprep.clients.revoked"),
        worker(service, warm) as client,
    ):
        for _ in range(3):
            with pytest.raises(KernelUnavailable, match="revoked"):
                client.artifact(spec, ARCH)
    assert warm.get(artifact.key) is None
    assert len([record for record in caplog.records if record.message.startswith("revoked kernel:")]) == 1
    assert len(service.looks) == 1  # asked once, not for every kernel


def test_offline_what_was_learned_holds(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.revoked, service.answer = revoking(artifact), gone
    with worker(service, warm) as client, pytest.raises(KernelUnavailable):
        client.artifact(spec, ARCH)
    warm.publish(artifact)
    asked = len(service.looks)
    monkeypatch.setattr(socket, "socket", None)
    with worker(service, warm, offline=True) as client, pytest.raises(KernelUnavailable, match=REASON):
        client.artifact(spec, ARCH)
    assert len(service.looks) == asked


def test_a_service_that_still_gives_it_out_is_not_believed(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact
) -> None:
    """As one behind a cache does, or a replica that was not told."""
    Revocations(warm.root).add(Revocation.of(artifact.manifest, REASON))
    with worker(service, warm) as client, pytest.raises(KernelUnavailable, match=r"kernels\.test:8400: .*revoked"):
        client.artifact(spec, ARCH)
    assert warm.get(artifact.key) is None


def test_another_build_takes_its_place(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact
) -> None:
    new = replacement(spec)
    assert new.key != artifact.key
    service.revoked = revoking(artifact)
    service.answer = lambda request: httpx.Response(200, json=reply_of(new))
    with worker(service, warm) as client:
        assert client.artifact(spec, ARCH).key == new.key
    with worker(service, warm, offline=True) as client:
        assert client.artifact(spec, ARCH).key == new.key


def test_a_kernel_in_memory_is_refused_once_that_is_known(
    service: FakeService,
    store: DiskStore,
    spec: KernelSpec,
    artifact: KernelArtifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    with worker(service, store) as client:
        client.artifact(spec, ARCH)
        service.revoked, service.answer = revoking(artifact), gone

        def is_refused() -> bool:
            try:
                client.artifact(spec, ARCH)
            except KernelUnavailable as error:
                return "revoked" in str(error)
            return False

        wait_for(is_refused)


def test_a_bundle_is_passed_over(
    service: FakeService, store: DiskStore, tmp_path: Path, spec: KernelSpec, artifact: KernelArtifact
) -> None:
    path = tmp_path / "kernels.tar"
    write_bundle(path, [as_bundled(artifact)])
    Revocations(store.root).add(Revocation.of(artifact.manifest, REASON))
    with (
        worker(service, store, bundles=[path], offline=True) as client,
        pytest.raises(KernelUnavailable, match=r"bundle: .*revoked"),
    ):
        client.artifact(spec, ARCH)


def test_the_list_is_asked_for_by_its_tag(service: FakeService, warm: DiskStore, artifact: KernelArtifact) -> None:
    other = artifact_of(KernelSpec(num_heads=99))
    service.revoked = revoking(other)
    for _ in range(2):
        with worker(service, warm) as client:
            client.artifact(KernelSpec(num_heads=artifact.manifest.spec["num_heads"]), ARCH)
    first, second = service.looks
    assert first.headers["if-none-match"] != second.headers["if-none-match"]
    assert second.headers["if-none-match"] == f'"{revocations_digest(Revocations(warm.root).list())}"'


def test_lifted_by_the_service_it_is_used_again(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact
) -> None:
    service.revoked, service.answer = revoking(artifact), gone
    with worker(service, warm) as client, pytest.raises(KernelUnavailable):
        client.artifact(spec, ARCH)
    service.revoked, service.answer = revoking(), None
    with worker(service, warm) as client:
        assert client.artifact(spec, ARCH).digest == artifact.digest
    assert Revocations(warm.root).list() == ()


def test_what_was_revoked_on_the_worker_is_not_the_services_to_lift(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact
) -> None:
    Revocations(warm.root).add(Revocation.of(artifact.manifest, REASON))
    with worker(service, warm) as client, pytest.raises(KernelUnavailable, match=REASON):
        client.artifact(spec, ARCH)
    assert [each.origin for each in Revocations(warm.root).list()] == [""]


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: problem(404, "not-found"),
        lambda request: httpx.Response(200, content=b"<html>"),
        lambda request: httpx.Response(200, json=[]),
        lambda request: httpx.Response(200, json={"revocations": [{"key": "../../x"}]}),
        lambda request: httpx.Response(200, json={"revocations": None}),
        lambda request: httpx.Response(500),
    ],
)
def test_a_service_without_a_list_costs_nothing_and_lifts_nothing(
    service: FakeService, warm: DiskStore, spec: KernelSpec, artifact: KernelArtifact, answer: Any
) -> None:
    other = artifact_of(KernelSpec(num_heads=99))
    service.revoked = revoking(other)
    with worker(service, warm) as client:
        client.artifact(spec, ARCH)
    assert len(list((warm.root / FOLDER).iterdir())) == 1
    service.revoked = answer
    with worker(service, warm) as client:
        assert client.artifact(spec, ARCH).digest == artifact.digest
        client.artifact(spec, ARCH)
    assert len(list((warm.root / FOLDER).iterdir())) == 1
    assert len(service.looks) == 2


def test_a_service_that_hangs_costs_a_quarter_of_a_second_once(
    service: FakeService, warm: DiskStore, spec: KernelSpec
) -> None:
    release = threading.Event()

    def hang(request: httpx.Request) -> httpx.Response:
        release.wait(10)
        return httpx.Response(500)

    service.revoked = hang
    try:
        with worker(service, warm) as client:
            began = time.monotonic()
            client.artifact(spec, ARCH)
            first = time.monotonic() - began
            began = time.monotonic()
            for _ in range(10):
                client.artifact(spec, ARCH)
            later = time.monotonic() - began
    finally:
        release.set()
    assert module.WAIT_S <= first < module.WAIT_S + 2
    assert later < module.WAIT_S


def test_a_kernel_that_nobody_has_yet_waits_for_no_list(
    service: FakeService, store: DiskStore, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service answers for it itself."""
    monkeypatch.setattr(module, "WAIT_S", 5.0)
    release = threading.Event()

    def hang(request: httpx.Request) -> httpx.Response:
        release.wait(10)
        return httpx.Response(500)

    service.revoked = hang
    try:
        with worker(service, store) as client:
            began = time.monotonic()
            client.artifact(spec, ARCH)
            assert time.monotonic() - began < 3
    finally:
        release.set()
