"""The Prometheus collector: every count by the conventions, once a registry, and from many processes."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_service import FakeService
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlaprep.clients.client import KernelClient
from mlaprep.clients.prometheus import families, register, unregister
from mlaprep.clients.stats import FALLBACK_REASONS, ClientStats, LoadTimes
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Name and label value to number, as a scraper reads the text."""
    return {
        " ".join([sample.name.removeprefix("mlaprep_client_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_counts_are_those_of_the_client(client: KernelClient, spec: KernelSpec, arch: Arch) -> None:
    registry = CollectorRegistry()
    register(client, registry)
    before = samples(registry)
    client.obtain(spec, arch)
    client.obtain(spec, arch)
    client.fall_back("uncovered", "a shape")
    client.tally.load(250.0)
    after = samples(registry)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "kernels_total service": 1,
        "kernels_total memory": 1,
        "fallbacks_total uncovered": 1,
        "loads_total": 1,
        "load_seconds_total": 0.25,
        "load_max_seconds": 0.25,
        "load_last_seconds": 0.25,
    }
    assert {name for name in after if name.startswith("fallbacks")} == {
        f"fallbacks_total {r}" for r in FALLBACK_REASONS
    }


def test_every_count_is_shown() -> None:
    """A count that is added to ClientStats has to be given a metric."""
    numbers = {field.name: 1000 + place for place, field in enumerate(dataclasses.fields(ClientStats))}
    numbers.pop("fallbacks")
    numbers.pop("loads")
    shown = {sample.value for metric in families([ClientStats(**numbers)]) for sample in metric.samples}
    assert {name for name, value in numbers.items() if value not in shown} == set()


def test_names_follow_the_conventions(root: Path) -> None:
    page = (root / "docs" / "observability.md").read_text()
    for metric in families([ClientStats()]):
        for sample in metric.samples:
            assert re.fullmatch(r"mlaprep_client_[a-z_]+", sample.name)
            assert (metric.type == "counter") == sample.name.endswith("_total")
            assert f"`{sample.name}`" in page, sample.name
        assert metric.documentation.endswith(".")


def test_once_a_client_and_registry(client: KernelClient, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
    other = KernelClient(transport=service.transport(), store=MemoryStore())
    first, second = CollectorRegistry(), CollectorRegistry()
    assert register(client, first) is register(client, first)
    assert register(client, second) is not register(client, first)
    client.obtain(spec, arch)
    assert samples(first)["kernels_total service"] == samples(second)["kernels_total service"] == 1
    register(other, first)
    other.obtain(spec, arch)
    assert samples(first)["kernels_total service"] == 2
    unregister(other, first)
    assert samples(first)["kernels_total service"] == 1
    unregister(client, first)
    assert samples(first) == {}
    unregister(client, first)
    register(client, first)
    assert samples(first)["kernels_total service"] == 1


def test_several_clients_are_summed_and_the_longest_load_is_shown() -> None:
    every = [ClientStats(disk=2, loads=LoadTimes(1, 5, 5, 5)), ClientStats(disk=3, loads=LoadTimes(2, 9, 7, 2))]
    shown = {sample.name: sample.value for metric in families(every) for sample in metric.samples if not sample.labels}
    assert shown["mlaprep_client_load_seconds_total"] == pytest.approx(0.014)
    assert shown["mlaprep_client_load_max_seconds"] == pytest.approx(0.007)


def test_registering_asks_no_client_for_anything(service: FakeService) -> None:
    class Untouched(KernelClient):
        def stats(self) -> ClientStats:
            raise AssertionError

    register(Untouched(transport=service.transport(), store=MemoryStore()), CollectorRegistry())


def test_what_is_no_client_is_refused_and_breaks_no_scrape() -> None:
    registry = CollectorRegistry()
    with pytest.raises(TypeError, match="client is a int"):
        register(3, registry)  # type: ignore[arg-type]
    assert samples(registry) == {}


PUBLISH = """
import sys
from prometheus_client import CollectorRegistry
from mlaprep.clients import KernelClient
from mlaprep.clients.prometheus import register
client = KernelClient(offline=True)
collector = register(client, CollectorRegistry())
for _ in range(3):
    client.fall_back("cpu", "")
    client.tally.load(1000.0 * int(sys.argv[1]))
    collector.publish()
"""
COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_processes_of_an_engine_are_summed(tmp_path: Path) -> None:
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank in ("1", "2"):
        subprocess.run([sys.executable, "-c", PUBLISH, rank], env=environ, check=True)
    shown = subprocess.run([sys.executable, "-c", COLLECT], env=environ, check=True, capture_output=True, text=True)
    assert 'mlaprep_client_fallbacks_total{reason="cpu"} 6.0' in shown.stdout
    assert "mlaprep_client_loads_total 6.0" in shown.stdout
    assert "mlaprep_client_load_seconds_total 9.0" in shown.stdout
    assert "mlaprep_client_load_max_seconds 2.0" in shown.stdout
