"""What a plan would do at a rate: latency, padding, refusals and saturation, in simulated time.

Runs the engine's own policy through `simulate`, behind its own rule of admission. Pure; equal
arguments give equal figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

import numpy as np
from msgspec import Struct

from embedsvc.engine.admission import promised_s
from embedsvc.engine.buckets import Limits
from embedsvc.engine.cost import CostModel, Floats
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Batch, Sequence
from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.simulate import Arrival, Outcome, closed_loop, replay, scaled

# Texts up to this many tokens are short: the first of the metrics' length classes.
SHORT_TOKENS = 32
# Clients of a closed loop: as many as a busy service has, and enough to choose from freely.
CLIENTS, MANY_WAITING = 64, 1_500


@dataclass(slots=True, frozen=True)
class Plan:
    """How texts would be batched.

    Attributes:
        edges: ascending bucket edges in tokens, the model's maximum the last.
        limits: of a batch.
        slots: batches at once.
        threads_per_slot: CPU threads of a batch; the cost model is one of this division.
    """

    edges: tuple[int, ...]
    limits: Limits
    slots: int
    threads_per_slot: int = 1


class Point(Struct, frozen=True):
    """A plan under one rate, predicted or measured.

    Attributes:
        rate: texts per second that arrive.
        texts_per_s: texts per second embedded before their deadline.
        good_per_s: texts per second embedded within the wanted latency.
        mean_rows: rows of a batch on average.
        padding: share of the computed tokens that were padding.
        p50_s: median latency, of what was embedded in time; None where nothing was.
        p99_s: 99th percentile.
        short_p99_s: 99th percentile of texts up to `SHORT_TOKENS`; None where there was none.
        n_rejected: texts refused on arrival because their deadline would have been missed.
        n_timed_out: admitted texts that missed their deadline.
    """

    rate: float
    texts_per_s: float
    good_per_s: float
    mean_rows: float
    padding: float
    p50_s: float | None
    p99_s: float | None
    short_p99_s: float | None
    n_rejected: int
    n_timed_out: int


class Series(Struct, frozen=True):
    """One configuration under several rates.

    `bench sweep` writes a JSON list of them, which `tune` lays over its predictions.

    Attributes:
        name: of the configuration, as shown.
        points: in ascending order of rates.
    """

    name: str
    points: list[Point]


def counts_of(lengths: Iterable[int], max_length: int) -> Counts:
    """Return `(max_length + 1,)` texts by length; longer ones count as truncated to the maximum."""
    known = np.minimum(np.fromiter(lengths, np.int64), max_length)
    return np.bincount(known, minlength=max_length + 1).astype(float)


def predict(
    lengths: Counts,
    cost: CostModel,
    plan: Plan,
    rate: float,
    n_texts: int,
    timeout_s: float = inf,
    *,
    slo_s: float = inf,
    overhead_s: float = 0.0,
    seed: int = 0,
) -> Point:
    """Return what happens to single texts that arrive at random times, over `n_texts / rate` s.

    Args:
        lengths: `(max_length + 1,)` weight of each length.
        cost: seconds of a batch with this division of the device.
        plan: how they are batched.
        rate: texts per second; a Poisson process with this many in all.
        n_texts: how many arrive.
        timeout_s: seconds until nobody waits for a text any more, as the engine counts them.
        slo_s: the wanted latency in seconds.
        overhead_s: seconds of a request outside queue and device: HTTP and tokenizing.
        seed: of lengths and times.
    """
    times_s = np.random.default_rng(seed).exponential(size=n_texts + 1).cumsum()
    arrivals = list(scaled(draw(lengths, n_texts, seed), times_s.tolist(), rate, timeout_s))
    return predict_arrivals(
        arrivals, cost, plan, rate, timeout_s, slo_s=slo_s, overhead_s=overhead_s
    )


def predict_arrivals(
    arrivals: Seq[Arrival],
    cost: CostModel,
    plan: Plan,
    rate: float,
    timeout_s: float = inf,
    *,
    slo_s: float = inf,
    overhead_s: float = 0.0,
) -> Point:
    """Return what happens to single texts that arrive at known times; arguments as of `predict`."""
    chooser = Admitting(plan, cost, timeout_s)
    outcome = replay(arrivals, chooser, plan.slots, cost, cold_s=cost.cold)
    seconds = max(outcome.end, arrivals[-1].at)
    waits = np.array([text.latency_s for text in outcome.served]) + overhead_s
    short = waits[[text.length <= SHORT_TOKENS for text in outcome.served]]
    return Point(
        rate=rate,
        texts_per_s=len(waits) / seconds,
        good_per_s=float(np.count_nonzero(waits <= slo_s)) / seconds,
        mean_rows=_mean_rows(outcome),
        padding=outcome.padding,
        p50_s=quantile(waits, 0.5),
        p99_s=quantile(waits, 0.99),
        short_p99_s=quantile(short, 0.99),
        n_rejected=chooser.n_rejected,
        n_timed_out=outcome.n_expired - chooser.n_rejected,
    )


def _mean_rows(outcome: Outcome) -> float:
    return float(np.mean([rows for rows, _, _ in outcome.batches])) if outcome.batches else 0.0


def quantile(seconds: Floats, q: float) -> float | None:
    """Return a quantile, as a `Point` has it."""
    return float(np.quantile(seconds, q)) if len(seconds) else None


def saturation(
    lengths: Counts,
    cost: CostModel,
    plan: Plan,
    n_clients: int = MANY_WAITING,
    n_texts: int = 6_000,
    seed: int = 0,
) -> float:
    """Return the texts per second when clients each send the next text once they are answered."""
    policy = Policy(plan.edges, cost, plan.limits)
    texts = draw(lengths, n_texts, seed)
    return n_texts / closed_loop(texts, n_clients, policy, plan.slots, cost).end


def draw(lengths: Counts, n: int, seed: int = 0) -> list[int]:
    """Return n lengths at random from a distribution `(max_length + 1,)`."""
    rng = np.random.default_rng(seed)
    drawn: list[int] = rng.choice(len(lengths), n, p=lengths / lengths.sum()).tolist()
    return drawn


class Admitting:
    """The policy behind the bound that a live engine sets: refuse what would come too late.

    As the engine does for interactive requests, a text is refused where the predicted work up to
    its end takes more than `admission.promised_s` of its time. Bounds on the length of the queue
    and clients that come back are not simulated.

    Args:
        plan: how texts are batched.
        cost: seconds of a batch.
        timeout_s: seconds that every text has.

    Attributes:
        n_rejected: texts refused.
    """

    def __init__(self, plan: Plan, cost: CostModel, timeout_s: float) -> None:
        self.n_rejected = 0
        self._policy = Policy(plan.edges, cost, plan.limits)
        self._price = self._policy.buckets.price
        self._bound_s = plan.slots * promised_s(timeout_s, plan.limits.max_age_s)
        self._pending_s = 0.0
        # Rows not yet settled; all have the same time, so the first has the nearest deadline.
        self._open: dict[Sequence, float] = {}
        self._running: list[tuple[float, int, Batch]] = []
        self._n_batches = 0

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue the rows of a request, or refuse them."""
        self._settle(now)
        own_s = sum(self._price(row.length) for row in sequences)
        if self._open and self._pending_s + own_s > self._bound_s:
            self.n_rejected += len(sequences)
            return
        self._pending_s += own_s
        self._open |= {row: self._price(row.length) for row in sequences}
        self._policy.add(sequences, now)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose as the policy does."""
        choice = self._policy.next(now, free_slots)
        if isinstance(choice, Batch):
            self._n_batches += 1
            heapq.heappush(self._running, (now + choice.predicted_s, self._n_batches, choice))
        return choice

    def _settle(self, now: float) -> None:
        """Forget the rows that are done or too late by now."""
        while self._running and self._running[0][0] <= now:
            for row in heapq.heappop(self._running)[2].sequences:
                self._pending_s -= self._open.pop(row, 0.0)
        while self._open and (first := next(iter(self._open))).request.deadline <= now:
            self._pending_s -= self._open.pop(first)
        if not self._open:
            self._pending_s = 0.0
