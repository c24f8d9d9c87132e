"""Discrete-event replay of arrivals through a policy, in simulated time.

Calls the very same policy and cost model as a live engine; deterministic for equal arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, Protocol

import numpy as np

from embedsvc.engine.buckets import Limits, padded_width
from embedsvc.engine.cost import REST_S, CostModel
from embedsvc.engine.sequence import NO_KEY, Batch, Key, Priority, Request, Sequence

Cost = Callable[[int, int], float]
# Simulated requests have no event loop to resolve a future on.
NOBODY_WAITS: Any = None


class Chooser(Protocol):
    """What is simulated: `Policy`, or another rule to compare it with."""

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue the rows of one request."""

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose a batch or say when to ask again."""


@dataclass(slots=True, frozen=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds.
        lengths: tokens of each text.
        timeout_s: seconds until nobody waits any more.
        priority: share class.
        key: whom it counts for.
    """

    at: float
    lengths: tuple[int, ...]
    timeout_s: float = inf
    priority: Priority = Priority.INTERACTIVE
    key: Key = NO_KEY


@dataclass(slots=True, frozen=True)
class Served:
    """One text that was embedded in time."""

    at: float
    length: int
    latency_s: float
    priority: Priority
    key: Key


@dataclass(slots=True)
class Outcome:
    """What a replay did.

    Attributes:
        served: texts embedded before their deadline, as they ended.
        n_expired: texts that were not.
        batches: `(rows, width, start)` of every batch.
        real_tokens: tokens embedded, padding excluded.
        computed_tokens: padding included.
        end: when the last batch ended, seconds.
    """

    served: list[Served] = field(default_factory=list)
    n_expired: int = 0
    batches: list[tuple[int, int, float]] = field(default_factory=list)
    real_tokens: int = 0
    computed_tokens: int = 0
    end: float = 0.0

    @property
    def padding(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.real_tokens / self.computed_tokens if self.computed_tokens else 0.0

    def latency_s(
        self, quantile: float, longest: float = inf, shortest: int = 1, after: float = 0.0
    ) -> float:
        """Return a quantile of the latency of texts within some lengths; nan where none is."""
        values = [
            s.latency_s for s in self.served if shortest <= s.length <= longest and s.at >= after
        ]
        return float(np.quantile(values, quantile)) if values else float("nan")

    def goodput(self, slo_s: float) -> float:
        """Return texts per second embedded within `slo_s` seconds."""
        return sum(s.latency_s <= slo_s for s in self.served) / self.end


class _Simulation:
    """The state of one replay: a clock, slots, and batches in flight."""

    def __init__(self, chooser: Chooser, slots: int, cost: Cost, cold_s: float = 0.0) -> None:
        self.chooser = chooser
        self.free = slots
        self.cost = cost
        self.cold_s = cold_s
        self.now = 0.0
        self.ask_again = inf
        self.outcome = Outcome()
        self._running: list[tuple[float, int, Batch]] = []

    def arrive(self, arrival: Arrival) -> None:
        request = Request(
            vectors=np.empty((len(arrival.lengths), 0), np.float32),
            deadline=arrival.at + arrival.timeout_s,
            arrival=arrival.at,
            priority=arrival.priority,
            settled=NOBODY_WAITS,
            key=arrival.key,
        )
        rows = [Sequence(request, row, _ids(n)) for row, n in enumerate(arrival.lengths)]
        # Until they are served.
        self.outcome.n_expired += len(rows)
        self.chooser.add(rows, self.now)

    def dispatch(self) -> None:
        """Start batches while slots are free and the chooser has some."""
        self.ask_again = inf
        while self.free:
            choice = self.chooser.next(self.now, self.free)
            if not isinstance(choice, Batch):
                self.ask_again = choice
                return
            self.free -= 1
            done = self.now + self.cost(choice.rows, choice.length)
            if not self._running and self.now - self.outcome.end > REST_S:
                done += self.cold_s
            n = len(self.outcome.batches)
            heapq.heappush(self._running, (done, n, choice))
            self.outcome.batches.append((choice.rows, choice.length, self.now))
            self.outcome.computed_tokens += choice.rows * choice.length

    def next_event(self) -> float:
        return min(self._running[0][0] if self._running else inf, self.ask_again)

    def advance(self, to: float) -> list[Sequence]:
        """Move the clock; return the rows of a batch that ended then, if one did."""
        self.now = to
        if not self._running or self._running[0][0] > to:
            return []
        batch = heapq.heappop(self._running)[2]
        self.free += 1
        self.outcome.end = to
        for row in batch.sequences:
            self._settle(row)
        return batch.sequences

    def _settle(self, row: Sequence) -> None:
        request, length = row.request, row.length
        self.outcome.real_tokens += length
        latency_s = self.now - request.arrival
        if self.now > request.deadline:
            return
        self.outcome.n_expired -= 1
        served = Served(request.arrival, length, latency_s, request.priority, request.key)
        self.outcome.served.append(served)


def replay(
    arrivals: Iterable[Arrival],
    chooser: Chooser,
    slots: int,
    cost: Cost,
    on_arrival: Callable[[Arrival], None] = lambda _: None,
    cold_s: float = 0.0,
) -> Outcome:
    """Run arrivals, in order of time, through a chooser.

    Args:
        arrivals: requests in ascending `at`.
        chooser: an empty queue.
        slots: batches at once.
        cost: true seconds of a batch of (rows, width).
        on_arrival: told each request before it is queued; may change the chooser.
        cold_s: seconds more of a batch that finds the device at rest.
    """
    simulation = _Simulation(chooser, slots, cost, cold_s)
    coming = iter(arrivals)
    arrival = next(coming, None)
    while True:
        due = arrival.at if arrival else inf
        event = simulation.next_event()
        if due == event == inf:
            break
        if arrival and due <= event:
            simulation.advance(due)
            on_arrival(arrival)
            simulation.arrive(arrival)
            arrival = next(coming, None)
            if arrival and arrival.at == due:
                continue
        else:
            simulation.advance(event)
        simulation.dispatch()
    return simulation.outcome


def closed_loop(
    lengths: Iterable[int], n_clients: int, chooser: Chooser, slots: int, cost: Cost
) -> Outcome:
    """Run single texts of clients that each send the next when they have their answer."""
    simulation = _Simulation(chooser, slots, cost)
    coming = iter(lengths)

    def send(n: int) -> None:
        for length in islice(coming, n):
            simulation.arrive(Arrival(simulation.now, (length,)))

    send(n_clients)
    simulation.dispatch()
    while (event := simulation.next_event()) < inf:
        send(len(simulation.advance(event)))
        simulation.dispatch()
    return simulation.outcome


def sorted_limit_s(lengths: Seq[int], limits: Limits, slots: int, cost: CostModel) -> float:
    """Return the seconds all texts take in batches sorted by length, all slots always busy."""
    ordered = sorted(lengths, reverse=True)
    seconds, start = 0.0, 0
    while start < len(ordered):
        width = padded_width(ordered[start], limits.max_length)
        rows = min(limits.rows(width), len(ordered) - start)
        seconds += cost(rows, width)
        start += rows
    return seconds / slots


def poisson(lengths: Iterable[int], rate: float, seed: int = 0) -> Iterator[Arrival]:
    """Yield single texts at exponential intervals, `rate` a second on average."""
    rng = np.random.default_rng(seed)
    at = 0.0
    for length in lengths:
        at += float(rng.exponential(1 / rate))
        yield Arrival(at, (length,))


def scaled(
    lengths: Iterable[int], times_s: Seq[float], rate: float, timeout_s: float = inf
) -> Iterator[Arrival]:
    """Yield single texts at recorded times, stretched so that `rate` a second is the average."""
    stretch = len(times_s) / (times_s[-1] - times_s[0]) / rate
    for length, time_s in zip(lengths, times_s, strict=False):
        yield Arrival((time_s - times_s[0]) * stretch, (length,), timeout_s)


_IDS = np.zeros(1 << 15, np.int64)


def _ids(n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return n ids that take no memory of their own."""
    return _IDS[:n]
