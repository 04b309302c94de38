"""Misses are reported in the background: few words, no wait, and no harm where nobody listens."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from emulation.driver import EmulatedDriver
from fake_service import FakeService, artifact_of, problem
from service_kit import wait_for

from mlaprep.clients import launch
from mlaprep.clients import misses as module
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable, SpecError
from mlaprep.clients.misses import MissReporter
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.stats import Tally
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.service.misses import MAX_COUNT, MISS_REASONS
from mlaprep.service.routes.misses import MAX_ENTRIES
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 0.2)
    monkeypatch.setattr(module, "PAUSE_S", 0.05)


@pytest.fixture
def reporter(service: FakeService) -> Iterator[MissReporter]:
    reporter = MissReporter(service.transport(), Tally())
    yield reporter
    reporter.close()


def specs(count: int) -> list[KernelSpec]:
    return [KernelSpec(num_heads=number % 64 + 1, kv_lora_rank=16 * (number // 64 + 1)) for number in range(count)]


def reported(service: FakeService) -> list[dict[str, Any]]:
    return [entry for request in service.reports for entry in json.loads(request.content)["misses"]]


def ended(reporter: MissReporter) -> bool:
    return reporter._thread is None


class Compiles:
    """Stands for a compiler on this machine."""

    def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Any:
        return SimpleNamespace(artifact=artifact_of(spec, str(arch)), cached=False)

    def close(self) -> None:
        pass


class TestReporter:
    def test_one_start_is_one_report(self, reporter: MissReporter, service: FakeService, arch: Arch) -> None:
        wanted = specs(20)
        for spec in wanted * 3:
            reporter.report(spec, arch, "compiled")
        wait_for(lambda: ended(reporter))
        assert len(service.reports) == 1
        entries = reported(service)
        assert [entry["variant_id"] for entry in entries] == [spec.variant_id for spec in wanted]
        assert {(entry["arch"], entry["count"], entry["reason"]) for entry in entries} == {("sm_90a", 3, "compiled")}
        assert reporter._tally.stats().misses_reported == 60

    def test_a_caller_waits_for_nobody(self, service: FakeService, arch: Arch) -> None:
        release = threading.Event()

        def hang(request: httpx.Request) -> httpx.Response:
            release.wait(10)
            return httpx.Response(200, json={})

        reporter = MissReporter(RestTransport("http://kernels.test", transport=httpx.MockTransport(hang)), Tally())
        began = time.monotonic()
        for spec in specs(50):
            reporter.report(spec, arch, "built")
            time.sleep(0.005)
        assert time.monotonic() - began < 2
        release.set()
        reporter.close()

    def test_no_thread_before_the_first_miss_and_none_after_the_last(
        self, reporter: MissReporter, spec: KernelSpec, arch: Arch
    ) -> None:
        assert ended(reporter)
        reporter.report(spec, arch, "built")
        assert not ended(reporter)
        thread = reporter._thread
        assert thread is not None
        wait_for(lambda: ended(reporter))
        thread.join(5)
        assert not thread.is_alive()

    def test_reports_are_bounded_and_apart(
        self, reporter: MissReporter, service: FakeService, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_PENDING", 300)
        monkeypatch.setattr(module, "GATHER_S", 0.3)
        monkeypatch.setattr(module, "PAUSE_S", 0.3)
        for spec in specs(400):
            reporter.report(spec, arch, "unavailable")
        assert reporter._tally.stats().misses_dropped == 100
        began = time.monotonic()
        wait_for(lambda: ended(reporter))
        assert time.monotonic() - began >= 0.6
        assert [len(json.loads(request.content)["misses"]) for request in service.reports] == [128, 128, 44]

    @pytest.mark.parametrize("status", [404, 405, 413, 422, 500, 503])
    def test_a_service_that_takes_none_is_left_alone(self, spec: KernelSpec, arch: Arch, status: int) -> None:
        asked: list[httpx.Request] = []

        def refuse(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return problem(status, "not-found")

        reporter = MissReporter(RestTransport("http://kernels.test", transport=httpx.MockTransport(refuse)), Tally())
        reporter.report(spec, arch, "built")
        wait_for(lambda: ended(reporter))
        reporter.report(spec, arch, "built")
        assert ended(reporter)
        assert len(asked) == 1
        assert reporter._tally.stats().misses_dropped == 2

    def test_a_dead_service_costs_nothing(self, spec: KernelSpec, arch: Arch) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        reporter = MissReporter(RestTransport(url), Tally())
        reporter.report(spec, arch, "built")
        wait_for(lambda: ended(reporter))
        assert reporter._tally.stats().misses_dropped == 1

    def test_closing_tells_what_is_left(
        self, reporter: MissReporter, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(module, "GATHER_S", 60.0)
        reporter.report(spec, arch, "built")
        reporter.close()
        assert len(reported(service)) == 1
        reporter.report(spec, arch, "built")  # a client may be used again
        reporter.close()
        assert len(reported(service)) == 2

    def test_closing_waits_for_no_hung_service(self, spec: KernelSpec, arch: Arch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            reporter = MissReporter(RestTransport(f"http://127.0.0.1:{silent.getsockname()[1]}"), Tally())
            reporter.report(spec, arch, "built")
            began = time.monotonic()
            reporter.close()
            assert time.monotonic() - began < 3

    def test_a_fork_takes_neither_thread_nor_misses(
        self, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "GATHER_S", 0.3)
        client = KernelClient(transport=service.transport(), store=MemoryStore())
        client.misses.report(spec, arch, "built")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                clean = ended(client.misses) and not client.misses._pending
                client.misses.report(spec, arch, "compiled")
                client.misses.close()
                code = 0 if clean and client.stats().misses_reported == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.close()
        assert [entry["reason"] for entry in reported(service)] == ["built"]

    def test_a_process_that_ends_tells_first(self, tmp_path: Path) -> None:
        """A short run, such as a job that only compiles, ends long before a report is due."""
        script = """
import sys
from mlaprep.clients.misses import MissReporter
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.stats import Tally
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec
reporter = MissReporter(RestTransport(sys.argv[1]), Tally())
reporter.report(KernelSpec(num_heads=12), Arch("sm_90a"), "compiled")
"""
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            process = subprocess.Popen([sys.executable, "-c", script, url], stderr=subprocess.PIPE)
            server.settimeout(30)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(65536).startswith(b"POST /v1/misses ")
                # Nobody answers: the process ends all the same, and quietly.
                _, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (0, b"")


class TestClient:
    @pytest.fixture
    def one(self, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Any:
        def make(**options: Any) -> KernelClient:
            return KernelClient(transport=service.transport(), store=MemoryStore(), **options)

        return make

    def reasons(self, client: KernelClient, service: FakeService) -> list[str]:
        client.close()
        return [entry["reason"] for entry in reported(service)]

    def test_what_is_built_is_no_miss(self, one: Any, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        client = one(on_miss="error")
        for _ in range(3):
            client.obtain(spec, arch)
        assert ended(client.misses)
        assert self.reasons(client, service) == []

    def test_what_the_service_built_for_it(self, one: Any, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        kernel = service.kernel

        def built(request: httpx.Request) -> httpx.Response:
            return httpx.Response(201, json=kernel(request).json() | {"cached": False})

        service.answer = built
        client = one(on_miss="error")
        client.obtain(spec, arch)
        client.obtain(spec, arch)
        assert self.reasons(client, service) == ["built"]

    def test_what_no_place_had(self, one: Any, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        client = one(on_miss="error")
        with pytest.raises(KernelUnavailable):
            client.obtain(spec, arch)
        assert self.reasons(client, service) == ["unavailable"]
        assert client.stats().misses_reported == 1

    def test_what_this_machine_compiled(
        self, one: Any, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        monkeypatch.setattr("mlaprep.clients.client._open_builder", lambda store: Compiles())
        client = one()
        assert client.obtain(spec, arch).tier == "compiled"
        assert self.reasons(client, service) == ["compiled"]

    def test_one_specialisation_too_many(
        self, one: Any, service: FakeService, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = EmulatedDriver()
        monkeypatch.setattr(EmulatedDriver, "load", lambda *arguments: SimpleNamespace(function=0, multiprocessors=4))
        monkeypatch.setattr(EmulatedDriver, "prepare", lambda *arguments: None)
        monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
        client = one(max_specialisations=0)
        for stride in (6144, 6144, 8192):
            special = KernelSpec.from_dict(spec.to_dict() | {"q_nope_token_stride": stride})
            handle = client.serving_handle(special, 0, spec)
            assert handle is not None
            assert handle.spec == spec
        assert self.reasons(client, service) == ["refused", "refused"]
        assert [entry["count"] for entry in reported(service)] == [1, 1]

    def test_offline_or_told_not_to_it_says_nothing(
        self, one: Any, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        clients = [one(on_miss="error", offline=True), one(on_miss="error", report_misses=False)]
        monkeypatch.setenv("MLAPREP_REPORT_MISSES", "off")
        clients.append(one(on_miss="error"))
        for client in clients:
            with pytest.raises(KernelUnavailable):
                client.obtain(spec, arch)
            assert ended(client.misses)
            assert self.reasons(client, service) == []
        monkeypatch.setenv("MLAPREP_REPORT_MISSES", "nope")
        with pytest.raises(SpecError, match="MLAPREP_REPORT_MISSES"):
            one()


def test_client_and_service_agree() -> None:
    assert set(get_args(module.MissReason)) == set(MISS_REASONS)
    assert module.MAX_COUNT == MAX_COUNT
    assert module.MAX_ENTRIES <= MAX_ENTRIES
    longest = {"variant_id": "x" * 400, "arch": "sm_100a", "count": MAX_COUNT, "reason": "unavailable"}
    assert len(json.dumps({"misses": [longest] * module.MAX_ENTRIES})) < 64 * 1024
