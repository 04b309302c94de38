"""Prometheus metrics of clients, read from ``client.stats()`` whenever somebody asks. Needs the extra ``prometheus``.

::

    from mlaprep.clients.prometheus import register

    register()  # the default client, in prometheus_client's default registry
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlaprep.clients.stats import TIERS, ClientStats

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient

PREFIX: Final = "mlaprep_client_"

_lock: Final = threading.Lock()
_collectors: Final["weakref.WeakKeyDictionary[CollectorRegistry, ClientCollector]"] = weakref.WeakKeyDictionary()


def register(client: "KernelClient | None" = None, registry: CollectorRegistry = REGISTRY) -> "ClientCollector":
    """Show a client's counts in a registry; once, however often it is called.

    Several clients of one registry are shown as their sum. The registry keeps the client until :func:`unregister`.

    Args:
        client: by default the one that ``prepare`` uses.
        registry: by default prometheus_client's own.

    Returns:
        The registry's one collector of clients.

    Raises:
        TypeError: a client that is none; the registry is as it was.
    """
    shown = _or_default(client)
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = ClientCollector()
            registry.register(collector)
            _collectors[registry] = collector
        collector.add(shown)
        return collector


def unregister(client: "KernelClient | None" = None, registry: CollectorRegistry = REGISTRY) -> None:
    """Show a client no longer. One that is not shown is no error."""
    with _lock:
        collector = _collectors.get(registry)
        if collector is not None and not collector.remove(_or_default(client)):
            registry.unregister(collector)
            del _collectors[registry]


class ClientCollector(Collector):
    """Metrics made from ``client.stats()`` at the moment they are asked for; nothing is counted twice or kept."""

    def __init__(self) -> None:
        self._clients: tuple[KernelClient, ...] = ()
        self._published: dict[str, Counter | Gauge] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, client: "KernelClient") -> None:
        """Count this client in."""
        if not any(known is client for known in self._clients):
            self._clients = (*self._clients, client)

    def remove(self, client: "KernelClient") -> bool:
        """Count this client out; whether any is left."""
        self._clients = tuple(known for known in self._clients if known is not client)
        return bool(self._clients)

    def describe(self) -> Iterable[Metric]:
        """The metrics' names, without asking a client."""
        return families([ClientStats()])

    def collect(self) -> Iterable[Metric]:
        """Every metric as of now."""
        return families([client.stats() for client in self._clients])

    def publish(self) -> None:
        """Write the metrics as of now to this process's files under ``PROMETHEUS_MULTIPROC_DIR``.

        prometheus_client's multi-process mode collects such files from every process, and no custom collector. Call
        this now and then in each process, for one where it logs its own counts. It is of no use in another mode.
        """
        with _lock:
            for family in self.collect():
                metric = self._published.get(family.name)
                if metric is None:
                    metric = self._published[family.name] = _writable(family)
                for sample in family.samples:
                    labels = tuple(sample.labels.values())
                    place = metric.labels(*labels) if labels else metric
                    if isinstance(place, Gauge):
                        place.set(sample.value)
                    else:
                        before = self._totals.get((family.name, labels), 0.0)
                        # Counts start over in a forked child.
                        place.inc(sample.value - before if sample.value >= before else sample.value)
                        self._totals[family.name, labels] = sample.value


def families(every: Sequence[ClientStats]) -> list[Metric]:
    """The metrics of some clients, summed; of load times, the longest."""

    def total(name: str) -> int:
        return sum(getattr(stats, name) for stats in every)

    fallbacks: dict[str, int] = {
        reason: sum(stats.fallbacks[reason] for stats in every) for reason in ClientStats().fallbacks
    }
    results = {"equal": "verified", "different": "verify_failures", "skipped": "unverified"}
    return [
        _counters("kernels", "Kernels had, by the place that had them.", "tier", {t: total(t) for t in TIERS}),
        _counter("unavailable", "Kernels that no place had.", total("unavailable")),
        _counter("rejected", "Entries and replies that were not the kernel asked for.", total("rejected")),
        _counter("service_errors", "Fetches that the service did not answer with a kernel.", total("service_errors")),
        _counters("fallbacks", "Calls that did not take the kernel, by reason.", "reason", fallbacks),
        _counter("loads", "Modules loaded on a device.", sum(stats.loads.count for stats in every)),
        _counter("load_seconds", "Time that loading took, in all.", sum(stats.loads.total_ms for stats in every) / 1e3),
        _gauge("load_max_seconds", "Longest load.", max((stats.loads.max_ms for stats in every), default=0.0) / 1e3),
        _gauge("load_last_seconds", "Latest load.", max((stats.loads.last_ms for stats in every), default=0.0) / 1e3),
        _gauge("specialisations", "Kernels with strides compiled in.", total("specialisations")),
        _gauge("specialisations_limit", "How many there may be.", total("specialisation_limit")),
        _counter("launches", "Calls that were launched from what is remembered.", total("launches")),
        _gauge("layouts", "Layouts whose launch is remembered.", total("layouts")),
        _counters(
            "verifications",
            "Calls under MLAPREP_VERIFY, by what came of the comparison.",
            "result",
            {result: total(name) for result, name in results.items()},
        ),
        _counters(
            "misses",
            "Kernels lacking, by whether the service was told.",
            "outcome",
            {"reported": total("misses_reported"), "dropped": total("misses_dropped")},
        ),
    ]


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _writable(family: Metric) -> Counter | Gauge:
    """A metric of its own values, in no registry: the files are what is collected."""
    labels = list(family.samples[0].labels)
    if family.type == "counter":
        return Counter(family.name, family.documentation, labels, registry=None)
    if "load" in family.name:
        return Gauge(family.name, family.documentation, labels, registry=None, multiprocess_mode="livemax")
    return Gauge(family.name, family.documentation, labels, registry=None, multiprocess_mode="livesum")


def _or_default(client: "KernelClient | None") -> "KernelClient":
    """The client, or the process's own. One that is none would break every scrape from then on."""
    from mlaprep.clients.dispatch import usable_client

    return usable_client(client)
