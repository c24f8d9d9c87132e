"""One set of metrics from those of several processes. Pure.

Each process tells its numbers when it is asked; nothing is kept in files. The multi-process mode of
prometheus_client keeps every value in files named by process id, so it needs a directory to write
to that grows with each process that is replaced, and it knows neither gauges that are read from
functions nor registries of one's own; this service lives on both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from embedsvc.metrics import LEAST_OF_ALL, MOST_OF_ALL

# Kinds of families that only ever grow, and outlive their process in the totals.
COUNTED = frozenset({"counter", "histogram"})


class Sample(Struct, frozen=True, array_like=True):
    """One number."""

    name: str
    labels: dict[str, str]
    value: float


class Family(Struct, frozen=True, array_like=True):
    """One metric: its numbers by label, and for histograms by bucket."""

    name: str
    documentation: str
    kind: str
    samples: list[Sample]


class Totals:
    """The numbers of processes that come and go.

    What was shown once never falls: the counts of a process that has gone stay, as far as it had
    told them.
    """

    def __init__(self) -> None:
        self._told: dict[Hashable, list[Family]] = {}
        self._gone: list[Family] = []

    def tell(self, process: Hashable, families: list[Family]) -> None:
        """Put what a process says in the place of what it said before."""
        self._told[process] = families

    def forget(self, process: Hashable) -> None:
        """Keep of a process that is gone only what it had counted."""
        counted = [f for f in self._told.pop(process, []) if f.kind in COUNTED]
        self._gone = total([self._gone, counted])

    def render(self) -> bytes:
        """Return the sum of all in Prometheus' text format."""
        return render(total([self._gone, *self._told.values()]))


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return all numbers of a registry as they are now."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(s.name, s.labels, float(s.value)) for s in metric.samples],
        )
        for metric in registry.collect()
    ]


def total(snapshots: Iterable[list[Family]]) -> list[Family]:
    """Add up the numbers of several processes; a few gauges are the least or the most of all."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for snapshot in snapshots for family in snapshot):
        families.setdefault(family.name, family)
        found = values.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            add = _addition(family.name, sample.name)
            found[key] = add(found[key], sample.value) if key in found else sample.value
    return [
        Family(
            name,
            family.documentation,
            family.kind,
            [Sample(key[0], dict(key[1]), value) for key, value in values[name].items()],
        )
        for name, family in families.items()
    ]


def _addition(family: str, sample: str) -> Callable[[float, float], float]:
    # The time when counting began.
    if family in LEAST_OF_ALL or sample.endswith("_created"):
        return min
    return max if family in MOST_OF_ALL else operator.add


class _Shown(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def render(families: list[Family]) -> bytes:
    """Return families in Prometheus' text format."""
    return generate_latest(_Shown(families))
