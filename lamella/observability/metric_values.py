"""Metrics as plain values, as vLLM's `get_metrics` returns them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

PER_POSITION = "lamella:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with one set of labels. The name of a counter is without the `_total` of the text form."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Is what it is now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters that belong together, one for each draft position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """buckets: upper bound -> observations up to it; "+Inf" has all, which is `count`. sum: of the values."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(registry: CollectorRegistry) -> list[Metric]:
    """All metrics of a registry, now."""
    found: list[Metric] = []
    vectors: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for family in registry.collect():
        histograms: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.type == "histogram":
                bound = labels.pop("le", sample.name.rsplit("_", 1)[1])
                histograms.setdefault(tuple(labels.items()), {})[bound] = sample.value
            elif family.type == "counter" and family.name == PER_POSITION:
                position = int(labels.pop("position"))
                vectors.setdefault(tuple(labels.items()), {})[position] = int(sample.value)
            elif family.type == "counter":
                found.append(Counter(family.name, labels, int(sample.value)))
            else:
                found.append(Gauge(family.name, labels, sample.value))
        for key, values in histograms.items():
            count, total = int(values.pop("count")), values.pop("sum")
            buckets = {bound: int(value) for bound, value in values.items()}
            found.append(Histogram(family.name, dict(key), count, total, buckets))
    for key, at in vectors.items():
        found.append(Vector(PER_POSITION, dict(key), [at[position] for position in sorted(at)]))
    return found
