"""KernelClient and its supply: memory, store, service, compile; verified, once, and never stuck."""

import dataclasses
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulation.driver import EmulatedDriver
from fake_service import URL, FakeService, artifact_of, problem, reply_of

from mlaprep.clients import launch
from mlaprep.clients.building import Built
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import (
    ArtifactRejected,
    KernelNotReady,
    KernelUnavailable,
    SpecError,
)
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.supply import KernelSupply
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.store import KernelStore, MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec


class FakeBuilder:
    """Compiles in no time, and counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.closed = False
        self.error = error

    def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return BuiltNow(artifact_of(spec, str(arch)))

    def close(self) -> None:
        self.closed = True


@dataclasses.dataclass(frozen=True)
class BuiltNow:
    artifact: KernelArtifact
    cached: bool = False


def supply_of(store: KernelStore, transport: RestTransport | None, builder: FakeBuilder | None) -> KernelSupply:
    return KernelSupply(lambda: store, transport, None if builder is None else lambda store: builder)


def request_of(spec: KernelSpec, arch: Arch) -> str:
    return request_key(arch=str(arch), spec=spec.to_dict(), generator=templates_fingerprint())


class TestOrder:
    def test_each_place_fills_the_nearer_ones(
        self, client: KernelClient, service: FakeService, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        fetched = client.obtain(spec, arch)
        assert (fetched.tier, fetched.cached) == ("service", True)
        assert client.obtain(spec, arch).tier == "memory"
        again = KernelClient(transport=service.transport(), store=DiskStore(store.root), on_miss="error")
        assert again.obtain(spec, arch).tier == "disk"
        assert len(service.requests) == 1
        assert (client.stats().service, client.stats().memory, again.stats().disk) == (1, 1, 1)

    def test_a_local_compile_comes_last(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        builder = FakeBuilder()
        supply = supply_of(MemoryStore(), service.transport(), builder)
        obtained = supply.obtain(spec, arch)
        assert (obtained.tier, obtained.cached, builder.calls) == ("compiled", False, 1)
        assert supply.obtain(spec, arch).tier == "memory"
        supply.close()
        assert builder.closed

    def test_the_service_is_preferred_to_compiling(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        builder = FakeBuilder()
        assert supply_of(MemoryStore(), service.transport(), builder).obtain(spec, arch).tier == "service"
        assert builder.calls == 0

    def test_a_store_that_keeps_nothing_is_no_obstacle(
        self, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        client = KernelClient(transport=service.transport(), store=MemoryStore(max_bytes=0), on_miss="error")
        assert client.artifact(spec, arch) == artifact_of(spec)


FOREIGN: dict[str, dict[str, Any]] = {
    "source": {"source": render(KernelSpec(num_heads=12)).text + "// and more\n"},
    "launch": {"launch": render(KernelSpec(num_heads=12)).launch | {"rows_per_token": 99}},
    "entry": {"entry": "mla_prepare_fast"},
    "variant-id": {"variant_id": KernelSpec(num_heads=16).variant_id},
}
"""Changes that leave an artifact of the spec whole, but make it another release's."""


class TestRejection:
    @pytest.fixture
    def liar(self, service: FakeService) -> FakeService:
        service.answer = lambda request: httpx.Response(200, json=reply_of(artifact_of(KernelSpec(num_heads=16))))
        return service

    def test_nothing_wrong_is_stored(
        self, liar: FakeService, client: KernelClient, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        with pytest.raises(ArtifactRejected, match="asked for"):
            client.artifact(spec, arch)
        assert list(store.list()) == []
        assert store.resolve(request_of(spec, arch)) is None
        assert client.stats().rejected == 1
        liar.answer = None
        assert client.artifact(spec, arch) == artifact_of(spec)

    def test_a_worker_that_can_compile_does_not_depend_on_a_lying_service(
        self, liar: FakeService, spec: KernelSpec, arch: Arch, caplog: pytest.LogCaptureFixture
    ) -> None:
        supply = supply_of(MemoryStore(), liar.transport(), FakeBuilder())
        assert supply.obtain(spec, arch).tier == "compiled"
        assert supply.tally.stats().rejected == 1
        assert any(record.levelname == "ERROR" for record in caplog.records)

    @pytest.mark.parametrize("other", [KernelSpec(num_heads=16), KernelSpec(num_heads=12, pdl=False)])
    def test_a_link_to_another_kernel_is_not_believed(
        self,
        service: FakeService,
        store: DiskStore,
        client: KernelClient,
        arch: Arch,
        spec: KernelSpec,
        other: KernelSpec,
    ) -> None:
        wrong = artifact_of(other)
        store.publish(wrong)
        store.link(request_of(spec, arch), wrong.key)
        assert client.obtain(spec, arch).tier == "service"
        assert client.stats().rejected == 2  # before the lock is held, and after

    def test_a_link_to_another_architecture_is_not_believed(
        self, store: DiskStore, client: KernelClient, spec: KernelSpec, arch: Arch
    ) -> None:
        wrong = artifact_of(spec, "sm_100a")
        store.publish(wrong)
        store.link(request_of(spec, arch), wrong.key)
        assert client.obtain(spec, arch).artifact.manifest.arch == "sm_90a"

    @pytest.mark.parametrize("change", FOREIGN)
    def test_a_link_to_a_foreign_kernel_of_the_same_spec_is_not_believed(
        self, store: DiskStore, client: KernelClient, spec: KernelSpec, arch: Arch, change: str
    ) -> None:
        wrong = artifact_of(spec, nvrtc_version="12.8.93", **FOREIGN[change])
        store.publish(wrong)
        store.link(request_of(spec, arch), wrong.key)
        assert client.obtain(spec, arch).tier == "service"
        assert client.stats().rejected == 2  # before the lock is held, and after
        assert store.resolve(request_of(spec, arch)) == artifact_of(spec).key

    def test_a_foreign_kernel_of_the_same_spec_is_not_served_for_want_of_another(
        self, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        for number, changes in enumerate(FOREIGN.values()):
            store.publish(artifact_of(spec, nvrtc_version=f"12.8.{number}", **changes))
        with pytest.raises(KernelUnavailable):
            KernelClient(store=store, offline=True, on_miss="error").artifact(spec, arch)
        assert store.resolve(request_of(spec, arch)) is None

    def test_a_local_build_of_something_else_is_refused(self, spec: KernelSpec, arch: Arch) -> None:
        class Foreign(FakeBuilder):
            def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
                return BuiltNow(artifact_of(spec, str(arch), entry="another"))

        with pytest.raises(ArtifactRejected, match="another"):
            supply_of(MemoryStore(), None, Foreign()).obtain(spec, arch)

    def test_another_jinja_in_the_head_is_no_other_kernel(self, store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
        artifact = artifact_of(spec, source=render(spec).text.replace("// jinja2 ", "// jinja2 0"))
        store.publish(artifact)
        store.link(request_of(spec, arch), artifact.key)
        assert KernelClient(store=store, offline=True, on_miss="error").obtain(spec, arch).artifact == artifact


class TestLostLinks:
    @pytest.fixture
    def store(self, tmp_path: Path, spec: KernelSpec) -> DiskStore:
        """Holds two builds of one kernel, and others, with no link to any."""
        store = DiskStore(tmp_path / "store")
        for artifact in (
            artifact_of(spec, nvrtc_version="12.8.93", created_at="2025-01-31T12:00:00Z"),
            artifact_of(spec),
            artifact_of(spec, nvrtc_version="12.6.85", created_at="2024-01-31T12:00:00Z"),
            artifact_of(spec, "sm_100a", created_at="2026-03-31T12:00:00Z"),
            artifact_of(KernelSpec(num_heads=16), created_at="2026-03-31T12:00:00Z"),
        ):
            store.publish(artifact)
        return store

    @pytest.mark.parametrize("link", ["lost", "dangling", "wrong"])
    def test_B043_the_latest_entry_is_found_and_linked_again(
        self, store: DiskStore, spec: KernelSpec, arch: Arch, link: str
    ) -> None:
        if link != "lost":
            wrong = "0" * 64 if link == "dangling" else artifact_of(KernelSpec(num_heads=16)).key
            store.link(request_of(spec, arch), wrong)
        obtained = KernelClient(store=store, offline=True, on_miss="error").obtain(spec, arch)
        assert obtained.artifact == artifact_of(spec)
        assert (obtained.tier, obtained.cached) == ("disk", True)
        assert store.resolve(request_of(spec, arch)) == obtained.artifact.key

    def test_serves_where_the_service_is_dead_and_nothing_can_be_compiled(
        self, service: FakeService, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        supply = supply_of(store, service.transport(), FakeBuilder(KernelUnavailable("no compiler")))
        assert supply.obtain(spec, arch).tier == "disk"
        assert supply.tally.stats().unavailable == 0

    def test_what_a_builder_found_is_linked(self, store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
        class Finder(FakeBuilder):
            def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
                return BuiltNow(artifact_of(spec, str(arch)), cached=True)

        assert supply_of(store, None, Finder()).obtain(spec, arch).tier == "disk"
        assert store.resolve(request_of(spec, arch)) == artifact_of(spec).key


class TestMiss:
    @pytest.mark.parametrize("on_miss", ["error", "fallback"])
    def test_says_what_was_asked_and_what_to_do(
        self, service: FakeService, store: DiskStore, spec: KernelSpec, arch: Arch, on_miss: Any
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built", detail="There is none for sm_90a yet.")
        client = KernelClient(transport=service.transport(), store=store, on_miss=on_miss)
        with pytest.raises(KernelUnavailable) as caught:
            client.artifact(spec, arch)
        text = str(caught.value)
        for part in (spec.variant_id, "sm_90a", "local store", URL, "404", "mlaprep compile", "MLAPREP_URL"):
            assert part in text
        assert len(caught.value.attempts) == 3
        assert client.stats().unavailable == 1
        assert client.stats().service_errors == 1

    def test_refuses_an_unknown_policy(self) -> None:
        with pytest.raises(SpecError, match="compile, fallback, error"):
            KernelClient(on_miss="ignore")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "argument",
        [
            {"timeout": 0}, {"timeout": -1}, {"timeout": "5"}, {"timeout": float("nan")}, {"timeout": None},
            {"timeout": True}, {"offline": "no"}, {"offline": 0}, {"report_misses": "off"}, {"token": 3},
            {"max_specialisations": -1}, {"max_specialisations": "8"}, {"store": 3}, {"transport": "http://kernels"},
        ],
    )  # fmt: skip
    def test_refuses_an_argument_when_the_client_is_made(self, argument: dict[str, Any]) -> None:
        with pytest.raises(SpecError, match=f"^{next(iter(argument))}: found"):
            KernelClient("http://kernels.test", **argument)

    def test_tells_of_every_argument_at_once(self) -> None:
        with pytest.raises(SpecError) as refused:
            KernelClient(offline="no", timeout=0)  # type: ignore[arg-type]
        assert {problem.field for problem in refused.value.problems} == {"offline", "timeout"}

    def test_refuses_what_the_architecture_cannot_run(self, client: KernelClient, spec: KernelSpec) -> None:
        with pytest.raises(SpecError, match="pdl"):
            client.artifact(spec, Arch("sm_89"))


class TestOffline:
    @pytest.fixture
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """Every socket made is recorded and fails."""
        made: list[object] = []

        def explode(*arguments: object, **_: object) -> None:
            made.append(arguments)
            raise AssertionError("a socket was made")

        monkeypatch.setattr(socket, "socket", explode)
        monkeypatch.setattr(socket, "getaddrinfo", explode)
        monkeypatch.setattr(socket, "create_connection", explode)
        return made

    @pytest.mark.parametrize("by", ["argument", "environment"])
    def test_B043_warm_offline_cache_makes_no_network_call(
        self,
        client: KernelClient,
        store: DiskStore,
        spec: KernelSpec,
        arch: Arch,
        no_network: list[object],
        monkeypatch: pytest.MonkeyPatch,
        by: str,
    ) -> None:
        client.artifact(spec, arch)
        if by == "environment":
            monkeypatch.setenv("MLAPREP_OFFLINE", "1")
        offline = True if by == "argument" else None
        worker = KernelClient("http://kernels.test", store=DiskStore(store.root), on_miss="error", offline=offline)
        assert worker.offline
        assert worker.obtain(spec, arch).tier == "disk"
        with pytest.raises(KernelUnavailable, match="offline"):
            worker.artifact(KernelSpec(num_heads=1), arch)
        assert no_network == []

    def test_B043_warm_cache_needs_no_service(
        self, client: KernelClient, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        client.artifact(spec, arch)
        transport = RestTransport("http://127.0.0.1:9", timeout=5)
        worker = KernelClient(transport=transport, store=DiskStore(store.root), on_miss="error")
        assert worker.obtain(spec, arch).tier == "disk"

    def test_B043_cold_key_with_a_dead_name_server_is_a_typed_error_in_time(
        self, store: DiskStore, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        released = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(5) and [])
        client = KernelClient("http://kernels.test", store=store, on_miss="fallback", timeout=0.5)
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(KernelUnavailable):
                client.artifact(spec, arch)
        assert time.monotonic() - began < 2
        released.set()

    def test_a_hung_service_delays_a_local_compile_once(self, spec: KernelSpec, arch: Arch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, never answers
            transport = RestTransport(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
            supply = supply_of(MemoryStore(), transport, FakeBuilder())
            began = time.monotonic()
            for heads in range(1, 9):
                assert supply.obtain(KernelSpec(num_heads=heads), arch).tier == "compiled"
            assert time.monotonic() - began < 2


class TestOneFlight:
    def test_threads_share_one_fetch(
        self, service: FakeService, store: DiskStore, spec: KernelSpec, arch: Arch
    ) -> None:
        def slow(request: httpx.Request) -> httpx.Response:
            time.sleep(0.2)
            return service.kernel(request)

        service.answer = slow
        client = KernelClient(transport=service.transport(), store=store, on_miss="error")
        with ThreadPoolExecutor(16) as pool:
            artifacts = list(pool.map(lambda _: client.artifact(spec, arch), range(16)))
        assert len(service.requests) == 1
        assert len({artifact.digest for artifact in artifacts}) == 1
        assert client.stats().memory == 15

    def test_threads_share_one_failure_and_may_ask_again(
        self, service: FakeService, client: KernelClient, spec: KernelSpec, arch: Arch
    ) -> None:
        def refuse(request: httpx.Request) -> httpx.Response:
            time.sleep(0.2)
            return problem(422, "invalid-spec")

        service.answer = refuse
        with ThreadPoolExecutor(8) as pool:
            flights = [pool.submit(client.artifact, spec, arch) for _ in range(8)]
            assert all(isinstance(flight.exception(), KernelUnavailable) for flight in flights)
        assert len(service.requests) == 1
        service.answer = None
        client.artifact(spec, arch)

    def test_an_interrupted_leader_leaves_nobody_waiting(self, spec: KernelSpec, arch: Arch) -> None:
        entered, release = threading.Event(), threading.Event()

        class Interrupted(FakeBuilder):
            def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
                if not entered.is_set():
                    entered.set()
                    release.wait(5)
                    raise KeyboardInterrupt
                return super().get_or_compile(spec, arch)

        supply = supply_of(MemoryStore(), None, Interrupted())
        with ThreadPoolExecutor(2) as pool:
            leader = pool.submit(supply.obtain, spec, arch)
            entered.wait(5)
            follower = pool.submit(supply.obtain, spec, arch)
            time.sleep(0.05)
            release.set()
            assert isinstance(leader.exception(5), KeyboardInterrupt)
            assert follower.result(5).tier == "compiled"


class TestB024:
    """A publisher that loses, or cannot write, serves the bytes it holds."""

    @pytest.mark.parametrize("name", ["ENOTEMPTY", "EEXIST", "ESTALE", "EBUSY", "ENOSPC", "EROFS"])
    def test_B024_rename_loser_serves_its_bytes(
        self, client: KernelClient, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        import errno

        def fail(*_: object, **__: object) -> None:
            raise OSError(getattr(errno, name), name)

        client.store  # noqa: B018 - opened before the disk turns bad
        monkeypatch.setattr(os, "rename", fail)
        monkeypatch.setattr(os, "replace", fail)
        assert client.artifact(spec, arch) == artifact_of(spec)
        assert client.artifact(spec, arch) == artifact_of(spec)

    def test_B024_own_publish_is_never_read_back(
        self, client: KernelClient, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published: list[str] = []
        publish = client.store.publish
        monkeypatch.setattr(client.store, "publish", lambda a: (publish(a), published.append(a.key)))

        def get(key: str) -> None:
            assert key not in published, "its own publish was read back"

        monkeypatch.setattr(client.store, "get", get)
        assert client.artifact(spec, arch) == artifact_of(spec)
        assert published == [artifact_of(spec).key]


class TestLoad:
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
        driver = EmulatedDriver()
        monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
        return driver

    def test_with_an_architecture_and_no_device_touches_no_driver(
        self, client: KernelClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "cuda_driver", lambda: pytest.fail("the driver was opened"))
        handle = client.load(num_heads=12, arch="sm_90a")
        assert (handle.spec, handle.arch) == (KernelSpec(num_heads=12), Arch("sm_90a"))

    def test_takes_a_spec_a_variant_id_or_fields(self, client: KernelClient, spec: KernelSpec) -> None:
        for arguments in ({"spec": spec}, {"spec": spec.variant_id}, spec.to_dict(), {"num_heads": 12}):
            assert client.load(arch="sm_90a", **arguments).spec == spec
        with pytest.raises(SpecError, match="alone"):
            client.load(spec, arch="sm_90a", num_heads=12)
        with pytest.raises(SpecError, match="num_heads"):
            client.load(arch="sm_90a")
        with pytest.raises(SpecError, match="sm_90a, sm_100"):
            client.load(spec, arch="sm_91")

    @pytest.mark.parametrize(
        ("capability", "arch"),
        [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
    )
    def test_B045_each_device_gets_its_own_architecture(
        self,
        client: KernelClient,
        service: FakeService,
        driver: EmulatedDriver,
        spec: KernelSpec,
        capability: tuple[int, int],
        arch: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        driver.device_capability = capability
        monkeypatch.setattr("mlaprep.clients.handle.KernelHandle.load", lambda self, device: self)
        assert client.load(spec, device=0).arch.name == arch
        assert service.calls == [f"PUT /v1/kernels/{arch}/{spec.variant_id}"]

    @pytest.mark.parametrize("capability", [(12, 1), (8, 9), (11, 0), (8, 0), (10, 1), (13, 0)])
    def test_B045_other_devices_fall_back(
        self,
        client: KernelClient,
        service: FakeService,
        driver: EmulatedDriver,
        spec: KernelSpec,
        capability: tuple[int, int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        assert Arch.for_device(capability) is None
        driver.device_capability = capability
        with pytest.raises(KernelUnavailable, match="capability"):
            client.load(spec, device=0)
        monkeypatch.setattr("mlaprep.clients.serving.is_capturing", lambda device: False)
        fallback = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="fallback")
        assert fallback.serving_handle(spec, 0) is None
        assert service.requests == []


class TestServingHandle:
    def test_remembers_that_there_is_none(
        self, service: FakeService, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        monkeypatch.setattr(launch, "cuda_driver", EmulatedDriver)
        monkeypatch.setattr("mlaprep.clients.serving.is_capturing", lambda device: False)
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="fallback")
        assert client.serving_handle(spec, 0) is None
        assert client.serving_handle(spec, 0) is None
        assert len(service.requests) == 1

    def test_under_error_it_raises(
        self, service: FakeService, client: KernelClient, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        monkeypatch.setattr(launch, "cuda_driver", EmulatedDriver)
        monkeypatch.setattr("mlaprep.clients.serving.is_capturing", lambda device: False)
        with pytest.raises(KernelUnavailable):
            client.serving_handle(spec, 0)

    def test_asks_nobody_during_capture(
        self, service: FakeService, client: KernelClient, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlaprep.clients.serving.is_capturing", lambda device: True)
        with pytest.raises(KernelNotReady, match="before the capture"):
            client.serving_handle(spec, 0)
        assert service.requests == []


class TestProcesses:
    def test_pickles_as_its_configuration(self, store: DiskStore, spec: KernelSpec, arch: Arch) -> None:
        client = KernelClient("http://kernels", token="secret", on_miss="fallback", offline=True, timeout=3)
        client._supply._store = store
        again = pickle.loads(pickle.dumps(client))
        assert (again.on_miss, again.offline) == ("fallback", True)
        transport = again._configuration.transport
        assert (transport.url, transport.timeout) == ("http://kernels", 3)
        assert again._supply._store is None
        assert again.stats() == KernelClient().stats()

    def test_a_fork_gets_locks_of_its_own(self, client: KernelClient, spec: KernelSpec, arch: Arch) -> None:
        """A lock and a flight that another thread held at the moment of the fork would be held for ever."""
        supply = client._supply
        supply._lock.acquire()
        client.service._lock.acquire()
        try:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.write(write, client.artifact(spec, arch).digest.encode())
                finally:
                    os._exit(0)
        finally:
            supply._lock.release()
            client.service._lock.release()
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == artifact_of(spec).digest.encode()
        assert os.waitpid(child, 0)[1] == 0
        assert client.stats().service == 0

    def test_a_fork_leaves_the_parents_compiler_alone(self, spec: KernelSpec, arch: Arch) -> None:
        builder = FakeBuilder()
        supply = supply_of(MemoryStore(), None, builder)
        supply.obtain(spec, arch)
        supply.forget()  # what happens in the child
        supply.close()
        assert not builder.closed


class TestEnvironment:
    def test_url_token_and_cache_come_from_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: KernelSpec
    ) -> None:
        monkeypatch.setenv("MLAPREP_URL", "http://elsewhere:1")
        monkeypatch.setenv("MLAPREP_TOKEN", "secret")
        monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
        client = KernelClient()
        assert client.service is not None
        assert (client.service.url, client.service._token) == ("http://elsewhere:1", "secret")
        assert isinstance(client.store, DiskStore)
        assert client.store.root == tmp_path / "cache"
        assert KernelClient("http://here").service.url == "http://here"  # type: ignore[union-attr]

    def test_making_a_client_does_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
        KernelClient("http://kernels")
        assert not (tmp_path / "cache").exists()


class TestArguments:
    def test_names_will_do(self, client: KernelClient, spec: KernelSpec, arch: Arch) -> None:
        wanted = client.artifact(spec, arch)
        assert client.artifact(spec.variant_id, "sm_90a") is wanted
        assert client.obtain(spec, "sm_90a").artifact is wanted

    @pytest.mark.parametrize("arch", [90, None, b"sm_90a", ["sm_90a"]])
    def test_another_architecture_type_is_named(self, client: KernelClient, spec: KernelSpec, arch: Any) -> None:
        for call in (client.obtain, client.artifact):
            with pytest.raises(TypeError, match=rf"^arch is a {type(arch).__name__}; "):
                call(spec, arch)

    @pytest.mark.parametrize("spec", [12, None, {"num_heads": 12}])
    def test_another_spec_type_is_named(self, client: KernelClient, arch: Arch, spec: Any) -> None:
        with pytest.raises(TypeError, match=rf"^spec is a {type(spec).__name__}; "):
            client.obtain(spec, arch)

    def test_an_unknown_name_is_a_spec_error(self, client: KernelClient, spec: KernelSpec) -> None:
        with pytest.raises(SpecError, match="arch"):
            client.obtain(spec, "sm_91")


def test_a_word_that_is_no_switch_makes_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_OFFLINE", "enabled")
    with pytest.raises(SpecError, match="MLAPREP_OFFLINE"):
        KernelClient()
