"""The policy in simulated time: the simulator's laws, and the bars against other rules."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.engine.buckets import Limits
from embedsvc.engine.cost import CostModel
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import NO_KEY, Key, Priority
from embedsvc.tuning.baselines import Fifo, SizeOrTimeout, SortedWindow
from embedsvc.tuning.edges import Traffic, best_edges
from embedsvc.tuning.histogram import LengthHistogram
from embedsvc.tuning.simulate import (
    Arrival,
    Chooser,
    Outcome,
    closed_loop,
    poisson,
    replay,
    scaled,
    sorted_limit_s,
)

# A MiniLM on one core in bfloat16.
COST = CostModel(3e-3, 1e-4, 52e-6, 4e-8)
LIMITS = Limits(256, 512, 256)
SLOTS = 2


def mixed_lengths(n: int = 6000) -> list[int]:
    """Return lengths like those of queries and documents together."""
    rng = random.Random(1)
    return [
        min(256, 2 + round(rng.lognormvariate(2.3, 0.4)))
        if rng.random() < 0.65
        else rng.randint(35, 256)
        for _ in range(n)
    ]


MIXED = mixed_lengths()


def learned() -> Policy:
    histogram = LengthHistogram(256)
    histogram.add(MIXED)
    return Policy(best_edges(Traffic(histogram.counts(), 400, 0.5), COST, LIMITS), COST, LIMITS)


CHOOSERS: dict[str, Callable[[], Chooser]] = {
    "ours": learned,
    "no batching": lambda: Fifo(Limits(256, 10**9, 1), 1),
    "FIFO of 8": lambda: Fifo(Limits(256, 10**9, 8), 8),
    "token budget": lambda: Fifo(Limits(256, 16_384, 256), 256),
    "sort within 8": lambda: SortedWindow(LIMITS),
    "size or timeout": lambda: SizeOrTimeout(LIMITS, [32, 64, 128, 256], 32, 0.02),
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_no_text_is_lost(name: str) -> None:
    """Law: every text of an open or closed loop is served once."""
    texts = MIXED[:500]

    open_loop = replay(poisson(texts, rate=300), CHOOSERS[name](), SLOTS, COST)
    closed = closed_loop(texts, 64, CHOOSERS[name](), SLOTS, COST)

    for outcome in (open_loop, closed):
        assert sorted(s.length for s in outcome.served) == sorted(texts)
        assert outcome.n_expired == 0
        assert outcome.real_tokens == sum(texts)
        assert sum(rows for rows, _, _ in outcome.batches) == len(texts)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_a_replay_is_deterministic(seed: int) -> None:
    """Law: equal arguments, equal batches."""
    one, other = (replay(poisson(MIXED[:200], 400, seed), learned(), SLOTS, COST) for _ in "ab")

    assert one == other


def test_expired_texts_are_counted_and_never_computed() -> None:
    """A text whose deadline passed in the queue takes no slot."""
    arrivals = [Arrival(0.0, (256,)), Arrival(0.0, (256,)), Arrival(0.001, (8,), timeout_s=0.001)]

    outcome = replay(arrivals, learned(), 1, CostModel(1.0, 0, 0, 0))

    assert outcome.n_expired == 1
    assert 8 not in [s.length for s in outcome.served]
    assert sum(rows for rows, _, _ in outcome.batches) == 2


def test_a_batch_that_finds_the_device_at_rest_takes_longer() -> None:
    """One right behind another does not."""
    arrivals = [Arrival(1.0, (8,)), Arrival(1.05, (8,)), Arrival(3.0, (8,))]

    outcome = replay(arrivals, learned(), 1, lambda rows, length: 0.1, cold_s=0.01)

    assert [one.latency_s for one in outcome.served] == pytest.approx([0.11, 0.16, 0.11])


def test_recorded_times_are_stretched_to_the_rate() -> None:
    """A trace keeps its shape at another rate."""
    arrivals = list(scaled([5] * 4, [10.0, 11.0, 11.5, 14.0], rate=10.0))

    assert [a.at for a in arrivals] == pytest.approx([0.0, 0.1, 0.15, 0.4])


def test_nearly_the_sorted_order_with_many_waiting() -> None:
    """Bar: with 1,000 or more waiting, at least 0.96 of the rate of the sorted order."""
    limit_s = sorted_limit_s(MIXED, LIMITS, SLOTS, COST)

    outcome = closed_loop(MIXED, 1500, learned(), SLOTS, COST)

    assert limit_s / outcome.end >= 0.96


def test_nine_tenths_of_the_sorted_order_with_64_clients() -> None:
    """Bar: with 64 clients in a closed loop, at least 0.90 of the rate of the sorted order."""
    limit_s = sorted_limit_s(MIXED, LIMITS, SLOTS, COST)

    outcome = closed_loop(MIXED, 64, learned(), SLOTS, COST)

    assert limit_s / outcome.end >= 0.90


def saturation(chooser: Chooser) -> float:
    return len(MIXED) / closed_loop(MIXED, 1500, chooser, SLOTS, COST).end


def test_short_texts_stay_fast_near_saturation() -> None:
    """Bar: at 80 % of saturation, p99 of short texts within 5 x the longest text alone."""
    rate = 0.8 * saturation(learned())

    outcome = replay(poisson(MIXED, rate), learned(), SLOTS, COST)

    assert outcome.latency_s(0.99, longest=32) <= 5 * COST(1, 256)


def test_a_quarter_of_the_latency_of_fifo_where_fifo_still_copes() -> None:
    """Bar: at 80 % of the saturation of FIFO of 8, at most a quarter of its p99 for short texts."""
    rate = 0.8 * saturation(CHOOSERS["FIFO of 8"]())

    fifo = replay(poisson(MIXED, rate), CHOOSERS["FIFO of 8"](), SLOTS, COST)
    ours = replay(poisson(MIXED, rate), learned(), SLOTS, COST)

    assert ours.latency_s(0.99, longest=32) <= fifo.latency_s(0.99, longest=32) / 4


def tokens_per_s(outcome: Outcome, until: float) -> float:
    """Return the rate of bulk tokens up to a time."""
    in_time = (s for s in outcome.served if s.at + s.latency_s <= until)
    return sum(s.length for s in in_time if s.priority is Priority.BULK) / until


@pytest.mark.parametrize("keys", [(NO_KEY, NO_KEY), (Key("uploads", 1.0), Key("asks", 1.0))])
def test_queries_beside_an_endless_upload(keys: tuple[Key, Key]) -> None:
    """Bar: p99 of 1,000 queries within 3 x idle + 250 ms; the upload keeps 85 % of its rate."""
    texts = tuple(MIXED[:2048])
    once = Arrival(0.0, texts, priority=Priority.BULK)
    upload_s = replay([once], learned(), SLOTS, COST).end
    queries = [replace(a, key=keys[1]) for a in poisson([12] * 1000, rate=30)]
    until = queries[-1].at
    # The next begins before the last has ended, so there is always one.
    starts = np.arange(0, until, 0.97 * upload_s).tolist()
    uploads = [replace(once, at=at, key=keys[0]) for at in starts]

    idle = replay(queries, learned(), SLOTS, COST)
    alone = replay(uploads, learned(), SLOTS, COST)
    beside = replay(heapq.merge(uploads, queries, key=lambda a: a.at), learned(), SLOTS, COST)

    waits = [s.latency_s for s in beside.served if s.priority is Priority.INTERACTIVE]
    assert float(np.quantile(waits, 0.99)) <= 3 * idle.latency_s(0.99) + 0.25
    assert tokens_per_s(beside, until) >= 0.85 * tokens_per_s(alone, until)


@pytest.mark.parametrize("max_age_s", [0.2, 1.0, 5.0])
def test_one_long_text_in_a_hundred_is_not_starved(max_age_s: float) -> None:
    """At 95 % load the p99 of rare long texts is at most the age cap and three batches.

    A head over the cap is in the next batch, the oldest first: it waits for the batch that is on
    the device, for one led by an older head, and for its own.
    """
    rng = random.Random(2)
    texts = [256 if rng.random() < 0.01 else rng.randint(4, 24) for _ in range(8000)]
    rate = 0.95 * len(texts) / closed_loop(texts, 1500, learned(), SLOTS, COST).end
    policy = learned()
    policy.limits = replace(LIMITS, max_age_s=max_age_s)

    outcome = replay(poisson(texts, rate), policy, SLOTS, COST)

    batch_s = max(COST(rows, width) for rows, width, _ in outcome.batches)
    assert outcome.latency_s(0.99, inf, shortest=256) <= max_age_s + 3 * batch_s
