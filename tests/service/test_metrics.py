"""/metrics: counts of requests, compiles, tiers and jobs; and the log lines and spans beside them."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from service_kit import Client, ClientMaker

from mlaprep.service.logs import formatter
from mlaprep.service.metrics import bury_dead
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def samples(client: Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    reply = client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(reply.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(client: Client, name: str, **labels: str) -> float | None:
    return samples(client).get((f"mlaprep_{name}", frozenset(labels.items())))


def test_requests_are_counted_by_route_and_never_by_path(
    make_client: ClientMaker, spec: KernelSpec, arch: Arch
) -> None:
    client = make_client()
    for _ in range(3):
        client.get(f"/v1/kernels/{arch}/{spec.variant_id}")
    for path in ("/secret-one", "/secret-two", "/v1/artifacts/../../etc"):
        client.get(path)
    client.request("BREW", "/v1/variants")
    route = "/v1/kernels/{arch}/{variant_id}"
    assert value(client, "requests_total", method="GET", route=route, status="404") == 3
    assert value(client, "request_seconds_count", route=route) == 3
    assert value(client, "requests_total", method="GET", route="none", status="404") == 3
    text = client.get("/metrics").text
    assert "secret" not in text
    assert "etc" not in text
    assert "BREW" not in text
    assert 'method="other"' in text


def test_head_counts_as_head_and_sends_no_bytes(make_client: ClientMaker) -> None:
    client = make_client()
    client.request("HEAD", "/healthz")
    assert value(client, "requests_total", method="HEAD", route="/healthz", status="200") == 1
    assert value(client, "response_bytes_total", route="/healthz") == 0
    size = len(client.get("/healthz").content)
    assert value(client, "response_bytes_total", route="/healthz") == size


def test_compiles_tiers_and_lookups(make_client: ClientMaker, spec: KernelSpec, arch: Arch) -> None:
    client = make_client()
    for _ in range(2):
        assert client.put(f"/v1/kernels/{arch}/{spec.variant_id}").status_code in (200, 201)
    assert value(client, "compiles_total", result="ok") == 1
    assert value(client, "compile_seconds_count") == 1
    assert (value(client, "compile_seconds_sum") or 0) > 0.001
    assert value(client, "lookups_total", result="built") == 1
    assert value(client, "store_hits_total", tier="memory") == 1
    assert value(client, "store_entries", tier="disk") == 1
    assert value(client, "ready") == 1
    again = samples(client)
    assert again[("mlaprep_store_hits_total", frozenset({("tier", "memory")}))] == 1  # asked twice, counted once


def test_a_failed_compile_is_counted_by_its_kind(make_client: ClientMaker, spec: KernelSpec, arch: Arch) -> None:
    from mlaprep.service.errors import CompileTimeout

    client = make_client()
    client.service.builder.observe(CompileTimeout(1.0))
    assert value(client, "compiles_total", result="compile_timeout") == 1
    assert value(client, "compiles_total", result="ok") is None


def test_jobs_by_state(make_client: ClientMaker) -> None:
    client = make_client()
    plan = {"kernels": [{"variant_id": KernelSpec(num_heads=3).variant_id}], "arch": ["sm_90a"]}
    reply = client.request("POST", "/v1/warmups", json=plan)
    assert reply.status_code in (201, 202), reply.text
    total = sum(value(client, "warmups", state=state) or 0 for state in ("queued", "running", "done"))
    assert total == 1


def test_no_shared_tier_has_no_state(make_client: ClientMaker) -> None:
    assert "mlaprep_redis_up{" not in make_client().get("/metrics").text


def test_a_fault_of_the_service_counts_as_500(make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client()

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(client.service.misses, "page", broken)
    assert client.get("/v1/misses").status_code == 500
    monkeypatch.undo()
    assert value(client, "requests_total", method="GET", route="/v1/misses", status="500") == 1
    assert value(client, "requests_total", method="GET", route="/v1/misses", status="499") is None


def test_scrapes_at_once_count_nothing_twice(make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client()
    measured = client.app.state.metrics
    client.get("/v1/kernels/sm_90a/" + KernelSpec(num_heads=3).variant_id)
    child = type(measured._misses).inc

    def slow(counter: Any, *args: Any) -> None:
        time.sleep(0.002)
        child(counter, *args)

    monkeypatch.setattr(type(measured._misses), "inc", slow)
    threads = [threading.Thread(target=measured.publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert value(client, "store_misses_total") == client.service.store.stats().misses > 0


def test_a_dead_worker_may_be_buried_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    file = tmp_path / f"gauge_livesum_{process.pid}.db"
    file.touch()

    def late(*_: object) -> None:
        file.unlink()
        raise FileNotFoundError

    monkeypatch.setattr("mlaprep.service.metrics.mark_process_dead", late)
    bury_dead(tmp_path)
    assert not file.exists()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lines that the access log wrote, as they would stand on stderr."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(True))
    logger = logging.getLogger("mlaprep")
    monkeypatch.setattr(logging.getLogger("mlaprep.access"), "level", logging.INFO)
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_a_request_is_one_line_without_query_or_token(make_client: ClientMaker, lines: Any) -> None:
    client = make_client(access_log=True, token="s3cret-s3cret-s3cret", reads_need_token=True)
    sent = {"authorization": "Bearer s3cret-s3cret-s3cret", "x-request-id": "of-my-own"}
    client.get("/v1/variants?arch=sm_90a", headers=sent)
    client.get("/v1/variants", headers={"authorization": "Bearer wrong-wrong-wrong"})
    first, second = (line for line in lines() if line["logger"] == "mlaprep.access")
    assert first["request_id"] == "of-my-own"
    assert (first["route"], first["status"], first["token"]) == ("/v1/variants", 200, "MLAPREP_TOKEN")
    assert second["status"] == 401
    assert re.fullmatch("[0-9a-f]{32}", second["request_id"])
    text = json.dumps(lines())
    for secret in ("s3cret", "wrong-wrong", "sm_90a"):
        assert secret not in text


def test_a_warning_has_the_id_of_its_request(make_client: ClientMaker, lines: Any) -> None:
    client = make_client(token="s3cret-s3cret-s3cret", reads_need_token=True)
    client.get("/v1/variants", headers={"x-request-id": "who-tried", "authorization": "Bearer no"})
    told = [line for line in lines() if line["logger"] == "mlaprep.service.auth"]
    assert [line["request_id"] for line in told] == ["who-tried"]


def test_a_console_line_is_for_people() -> None:
    record = logging.LogRecord("mlaprep.x", logging.WARNING, "", 0, "the %s is full", ("disk",), None)
    assert "the disk is full" in formatter(False).format(record)


def test_a_request_is_a_span_of_the_callers_trace(make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    caller = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    make_client().get("/v1/variants", headers={"traceparent": caller})
    (span,) = (span for span in exporter.get_finished_spans() if span.kind is trace.SpanKind.SERVER)
    assert span.name == "GET /v1/variants"
    assert f"{span.context.trace_id:032x}" == "0123456789abcdef0123456789abcdef"
    assert span.attributes["http.response.status_code"] == 200


def test_every_metric_stands_in_the_documentation(make_client: ClientMaker) -> None:
    told = set(re.findall(r"`(mlaprep_[a-z_]+)`", OPERATIONS.read_text()))
    shown = {
        name + ("_total" if kind == "counter" else "")
        for name, kind in ((family.name, family.type) for family in make_client().app.state.metrics.registry.collect())
        if name.startswith("mlaprep")
    }
    assert shown - told == set()
    assert {name for name in told - shown if not name.startswith("mlaprep_client")} == set()


def test_repeated_cubins_are_counted_too(make_client: ClientMaker, spec: KernelSpec, arch: Arch) -> None:
    client = make_client()
    digest = client.put(f"/v1/kernels/{arch}/{spec.variant_id}").json()["manifest"]["cubin_sha256"]
    sizes = [len(client.get(f"/v1/artifacts/{digest}").content) for _ in range(5)]
    assert client.app.state.metrics.hot.replies > 0
    route = "/v1/artifacts/{digest}"
    for _ in range(2):  # and each once, however often it is asked
        assert value(client, "requests_total", method="GET", route=route, status="200") == 5
        assert value(client, "response_bytes_total", route=route) == sum(sizes)
