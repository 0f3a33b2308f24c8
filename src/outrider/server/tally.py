"""Figures of every step and every token: counted in plain numbers, and put into Prometheus's form when somebody asks.
Prometheus's own counters take microseconds each, and there are dozens of them for every sequence in every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus


class Count:
    """A counter; with a label, one for each of its values."""

    def __init__(self, name: str, about: str, label: str | None = None) -> None:
        self.name, self.about, self.label = name, about, label
        self.total = 0
        self.by: dict[str, int] = {}

    def add(self, count: int) -> None:
        self.total += count

    def add_to(self, value: str, count: int) -> None:
        self.by[value] = self.by.get(value, 0) + count

    def family(self, model: str) -> Metric:
        labels = ["model_name"] if self.label is None else ["model_name", self.label]
        family = CounterMetricFamily(self.name, self.about, labels=labels)
        if self.label is None:
            family.add_metric([model], self.total)
        for value, count in list(self.by.items()):
            family.add_metric([model, value], count)
        return family


class Histogram:
    """A histogram."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, model: str) -> Metric:
        buckets, reached = [], 0
        for bound, count in zip([*map(float, self.bounds), float("inf")], list(self.counts), strict=True):
            reached += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), reached))
        family = HistogramMetricFamily(self.name, self.about, labels=["model_name"])
        family.add_metric([model], buckets=buckets, sum_value=self.sum)
        return family


class Tally(Collector):
    """All figures of one model. One thread counts, any may ask."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._figures: list[Count | Histogram] = []

    def count(self, name: str, about: str, label: str | None = None) -> Count:
        """Prometheus adds _total to the name."""
        made = Count(name, about, label)
        self._figures.append(made)
        return made

    def spread(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        made = Histogram(name, about, bounds)
        self._figures.append(made)
        return made

    def collect(self) -> Iterator[Metric]:
        for figure in self._figures:
            yield figure.family(self._model)
