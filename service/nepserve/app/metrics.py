"""Prometheus metrics of a server: names, labels and buckets in one place.

Base units, ``_total`` on counters. Counting is on the way of every force call and happens in one thread, so counters
are entries of dictionaries here, and become Prometheus' own families when somebody reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST

Labels = tuple[str, ...]

_SECONDS = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_ATOMS = tuple(float(10**k * m) for k in range(7) for m in (1, 3))
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 1.0)


class Counter:
    """A family of counters; without labels there is one, and it is shown from the start."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._family = f"nepserve_{name}", text, labels
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def take(self) -> list[tuple[Labels, float]]:
        """What was counted, which is forgotten here."""
        taken = [(labels, value) for labels, value in self._values.items() if value]
        self._values = dict.fromkeys(self._values, 0.0)
        return taken

    def put(self, taken: Iterable[tuple[Iterable[str], float]]) -> None:
        """Add what another one took."""
        for labels, value in taken:
            self.add(*labels, amount=value)

    def collect(self) -> Metric:
        """The family, for Prometheus."""
        name, text, names = self._family
        family = CounterMetricFamily(name, text, labels=names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """A family of histograms with one label."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], label: str) -> None:
        self._family = f"nepserve_{name}", text, label
        self._buckets = buckets
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, value: float, label: str) -> None:
        """Sort a value in."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._buckets) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._buckets, value)] += 1
        self._sums[label] += value

    def take(self) -> list[tuple[str, list[int], float]]:
        """What was observed, which is forgotten here."""
        taken = [(label, counts, self._sums[label]) for label, counts in self._counts.items()]
        self._counts, self._sums = {}, {}
        return taken

    def put(self, taken: Iterable[tuple[str, list[int], float]]) -> None:
        """Add what another one took."""
        for label, counts, total in taken:
            there = self._counts.setdefault(label, [0] * (len(self._buckets) + 1))
            self._counts[label] = [a + b for a, b in zip(there, counts, strict=True)]
            self._sums[label] = self._sums.get(label, 0.0) + total

    def collect(self) -> Metric:
        """The family, for Prometheus."""
        name, text, label = self._family
        family = HistogramMetricFamily(name, text, labels=[label])
        bounds = [*map(repr, self._buckets), "+Inf"]
        for value, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric([value], buckets, self._sums[value])
        return family


class Metrics(Collector):
    """The series of one server.

    Attributes:
        gauges: Text and value, asked for at each reading, by name.
        memory: Bytes of memory of the engine by kind, asked for at each reading.
        models: Name, digest, backend and dtype of the served models, asked for at each reading.
    """

    def __init__(self) -> None:
        self.requests = Counter("requests", "Requests answered.", "model", "route", "status")
        self.structures = Counter("structures", "Structures evaluated.", "model")
        self.atoms = Counter("atoms", "Atoms evaluated.", "model")
        self.failures = Counter("structure_failures", "Structures that failed.", "model", "code")
        self.shed = Counter("shed", "Requests refused before they reached the device.", "reason")
        self.abandoned = Counter("abandoned", "Requests whose client went away before the answer.")
        self.restarts = Counter("engine_restarts", "Times the engine failed and was started again.")
        self.front_restarts = Counter("front_restarts", "Times a front failed and was started again.")
        self.batches = Counter("batches", "Batches evaluated.", "model")
        self.oom_splits = Counter("oom_splits", "Batches split because the device ran out of memory.", "model")
        self.latency = Histogram("request_latency_seconds", "Time to answer, body included.", _SECONDS, "route")
        self.queue_time = Histogram("request_queue_time_seconds", "Wait for the device.", _SECONDS, "model")
        self.request_atoms = Histogram("request_atoms", "Atoms of a request.", _ATOMS, "model")
        self.batch_atoms = Histogram("batch_atoms", "Atoms of a batch.", _ATOMS, "model")
        self.batch_seconds = Histogram("batch_device_seconds", "Device time of a batch.", _SECONDS, "model")
        self.batch_fill = Histogram("batch_fill_ratio", "A batch as a share of the most it could be.", _SHARES, "model")
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.memory: Callable[[], Mapping[str, int]] = dict
        self.models: Callable[[], Iterable[tuple[str, str, str, str]]] = tuple
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def answered(self, model: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests.add(model, route, str(status))
        self.latency.observe(seconds, route)

    def evaluated(self, model: str, structures: int, atoms: int, queue_seconds: float | None) -> None:
        """Count an evaluated request; ``queue_seconds`` is None if nothing of it could be evaluated."""
        self.structures.add(model, amount=structures)
        self.atoms.add(model, amount=atoms)
        self.request_atoms.observe(atoms, model)
        if queue_seconds is not None:
            self.queue_time.observe(queue_seconds, model)

    def batch(self, model: str, atoms: int, fill: float, device_seconds: float, splits: int) -> None:
        """Count an evaluated batch."""
        self.batches.add(model)
        self.batch_atoms.observe(atoms, model)
        self.batch_fill.observe(fill, model)
        self.batch_seconds.observe(device_seconds, model)
        if splits:
            self.oom_splits.add(model, amount=splits)

    def take(self) -> dict[str, Any]:
        """All that was counted, as plain values; it is forgotten here."""
        return {name: family.take() for name, family in self._families()}

    def put(self, taken: Mapping[str, Any]) -> None:
        """Add what another one took."""
        for name, family in self._families():
            family.put(taken[name])

    def _families(self) -> Iterator[tuple[str, Counter | Histogram]]:
        for name, family in vars(self).items():
            if isinstance(family, (Counter, Histogram)):
                yield name, family

    def text(self) -> bytes:
        """All series, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, for Prometheus."""
        for _, family in self._families():
            yield family.collect()
        for name, (text, value) in self.gauges.items():
            yield GaugeMetricFamily(f"nepserve_{name}", text, value=value())
        memory = GaugeMetricFamily("nepserve_device_memory_bytes", "Memory of the engine.", labels=["kind"])
        for kind, size in self.memory().items():
            memory.add_metric([kind], size)
        yield memory
        info = GaugeMetricFamily(
            "nepserve_model_info", "Models served.", labels=["model", "sha256", "backend", "dtype"]
        )
        for labels in self.models():
            info.add_metric(labels, 1.0)
        yield info
