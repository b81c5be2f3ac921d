"""Prometheus metrics of a server: names, labels and buckets in one place.

Base units, ``_total`` on counters. Gauges ask for their value when they are read, so that a request pays for counters
and histograms alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST

# A series beside each counter that tells when it began; nobody reads them.
disable_created_metrics()

_SECONDS = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_ATOMS = tuple(float(10**k * m) for k in range(7) for m in (1, 3))


class Metrics:
    """The series of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answered: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._batch: dict[str, tuple[Counter, Histogram, Histogram, Histogram]] = {}
        self._evaluated: dict[str, tuple[Counter, Counter, Histogram, Histogram]] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.requests = self._counter("requests", "Requests answered.", "model", "route", "status")
        self.structures = self._counter("structures", "Structures evaluated.", "model")
        self.atoms = self._counter("atoms", "Atoms evaluated.", "model")
        self.failures = self._counter("structure_failures", "Structures that failed.", "model", "code")
        self.shed = self._counter("shed", "Requests refused before they reached the device.", "reason")
        self.abandoned = self._counter("abandoned", "Requests whose client went away before the answer.")
        self.restarts = self._counter("engine_restarts", "Times the engine failed and was started again.")
        self.latency = self._histogram("request_latency_seconds", "Time to answer, body included.", _SECONDS, "route")
        self.queue_time = self._histogram("request_queue_time_seconds", "Wait for the device.", _SECONDS, "model")
        self.request_atoms = self._histogram("request_atoms", "Atoms of a request.", _ATOMS, "model")
        self.batches = self._counter("batches", "Batches evaluated.", "model")
        self.batch_atoms = self._histogram("batch_atoms", "Atoms of a batch.", _ATOMS, "model")
        self.batch_seconds = self._histogram("batch_device_seconds", "Device time of a batch.", _SECONDS, "model")
        self.batch_fill = self._histogram(
            "batch_fill_ratio", "Work of a batch as a share of the most it could be.",
            (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 1.0), "model",
        )  # fmt: skip
        self.oom_splits = self._counter("oom_splits", "Batches split because the device ran out of memory.", "model")
        self.memory: Callable[[], Mapping[str, int]] = dict
        self.models: Callable[[], Iterable[tuple[str, str, str, str]]] = tuple
        self.registry.register(_AtReading(self))

    def answered(self, model: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        key = (model, route, status)
        series = self._answered.get(key)
        if series is None:
            # Finding a child by its labels costs more than counting; there are few of them.
            series = self._answered[key] = (
                self.requests.labels(model, route, str(status)),
                self.latency.labels(route),
            )
        series[0].inc()
        series[1].observe(seconds)

    def evaluated(self, model: str, structures: int, atoms: int, queue_seconds: float | None) -> None:
        """Count an evaluated request; ``queue_seconds`` is None if nothing of it could be evaluated."""
        series = self._evaluated.get(model)
        if series is None:
            series = self._evaluated[model] = (
                self.structures.labels(model),
                self.atoms.labels(model),
                self.request_atoms.labels(model),
                self.queue_time.labels(model),
            )
        series[0].inc(structures)
        series[1].inc(atoms)
        series[2].observe(atoms)
        if queue_seconds is not None:
            series[3].observe(queue_seconds)

    def batch(self, model: str, atoms: int, fill: float, device_seconds: float, splits: int) -> None:
        """Count an evaluated batch."""
        series = self._batch.get(model)
        if series is None:
            series = self._batch[model] = (
                self.batches.labels(model),
                self.batch_atoms.labels(model),
                self.batch_fill.labels(model),
                self.batch_seconds.labels(model),
            )
        series[0].inc()
        series[1].observe(atoms)
        series[2].observe(fill)
        series[3].observe(device_seconds)
        if splits:
            self.oom_splits.labels(model).inc(splits)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is asked for at each reading."""
        Gauge(f"nepserve_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All series, as Prometheus reads them."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nepserve_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"nepserve_{name}", text, labels, buckets=buckets, registry=self.registry)


class _AtReading(Collector):
    """Series whose labels come and go: they are made when they are read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily("nepserve_device_memory_bytes", "Memory of the engine.", labels=["kind"])
        for kind, size in self._metrics.memory().items():
            memory.add_metric([kind], size)
        yield memory
        info = GaugeMetricFamily(
            "nepserve_model_info", "Models served.", labels=["model", "sha256", "backend", "dtype"]
        )
        for labels in self._metrics.models():
            info.add_metric(labels, 1.0)
        yield info
