"""OpenTelemetry spans where a process traces, and nothing at all where it does not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from fake_service import FakeService, problem
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.tracing import span
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

Spans = Callable[[], list[tuple[str, dict[str, Any]]]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """What is traced, innermost first. A provider can be set once a process, so the API is given ours."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield lambda: [
        (found.name, {key.removeprefix("mlaprep."): value for key, value in (found.attributes or {}).items()})
        for found in exporter.get_finished_spans()
    ]
    provider.shutdown()


def test_a_fetch(spans: Spans, client: KernelClient, spec: KernelSpec, arch: Arch) -> None:
    named = {"variant_id": spec.variant_id, "arch": "sm_90a", "tier": "service"}
    client.obtain(spec, arch)
    assert spans() == [("mlaprep.fetch", named), ("mlaprep.obtain", named)]
    client.obtain(spec, arch)  # from memory
    assert len(spans()) == 2


def test_a_compile_and_a_failure(spans: Spans, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
    service.answer = lambda request: problem(404, "kernel-not-built")

    class Broken:
        def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Any:
            raise KernelUnavailable("no compiler")

        def close(self) -> None:
            pass

    client = KernelClient(transport=service.transport(), store=MemoryStore(), report_misses=False)
    client._supply._open_builder = lambda store: Broken()
    with pytest.raises(KernelUnavailable):
        client.obtain(spec, arch)
    assert [name for name, _ in spans()] == ["mlaprep.fetch", "mlaprep.compile", "mlaprep.obtain"]
    assert "tier" not in spans()[-1][1]


def test_a_load_on_each_device(spans: Spans) -> None:
    spec = KernelSpec(num_heads=2, kv_lora_rank=32, rope_dim=16)
    handle = KernelHandle(emulated_artifact(spec), EmulatedDriver(), tier="disk")
    for device in (0, 1, 0):
        handle.load(device)
    named = {"variant_id": spec.variant_id, "arch": "sm_90a", "tier": "disk"}
    assert spans() == [("mlaprep.load", named | {"device": device}) for device in (0, 1)]


def test_errors_are_recorded_and_go_on(spans: Spans, spec: KernelSpec, arch: Arch) -> None:
    with pytest.raises(ZeroDivisionError), span("obtain", spec, arch):
        raise ZeroDivisionError
    assert len(spans()) == 1


def test_without_a_provider_there_is_no_span(spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object) -> ModuleType:
        raise AssertionError

    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    monkeypatch.setattr(trace, "get_tracer", explode)
    with span("obtain", spec, arch) as note:
        note("tier", "disk")


def test_opentelemetry_and_prometheus_are_never_imported_for_it() -> None:
    script = (
        "import sys\n"
        "from mlaprep.clients import KernelClient, KernelUnavailable\n"
        "from mlaprep.kernels_cache.store import MemoryStore\n"
        "client = KernelClient(store=MemoryStore(), on_miss='error', offline=True)\n"
        "try: client.obtain('mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl', 'sm_90a')\n"
        "except KernelUnavailable: print([m for m in ('opentelemetry', 'prometheus_client') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
