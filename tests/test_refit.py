"""Edges follow the traffic: soon, only where it pays, and back again."""

from __future__ import annotations

import random

import pytest

from embedsvc.engine.buckets import Limits, half_powers_of_two
from embedsvc.engine.cost import CostModel
from embedsvc.engine.policy import Policy
from embedsvc.tuning.edges import Traffic, best_edges
from embedsvc.tuning.histogram import LengthHistogram
from embedsvc.tuning.refit import Refit
from embedsvc.tuning.simulate import Arrival, poisson, replay

COST = CostModel(3e-3, 1e-4, 52e-6, 4e-8)
LIMITS = Limits(512, 1024, 256)
RATE = 250.0


def short(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(4, 24) for _ in range(n)]


def long(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice((200, 210, 215, 350, 355)) + rng.randint(0, 4) for _ in range(n)]


def test_too_few_texts_say_nothing() -> None:
    """No proposal before there is something to judge it by."""
    refit = Refit(LengthHistogram(512), [512], COST, LIMITS)
    refit.histogram.add(short(100))

    assert refit.propose(RATE) is None


def test_better_edges_are_proposed_with_their_gain() -> None:
    """One bucket for everything is worse than edges at the texts."""
    refit = Refit(LengthHistogram(512), [512], COST, LIMITS)
    refit.histogram.add(short(1000))

    switch = refit.propose(RATE)

    assert switch is not None
    assert switch.former == (512,)
    assert switch.gain > 0.02


@pytest.mark.parametrize("seed", range(5))
def test_once_switched_the_same_traffic_changes_nothing(seed: int) -> None:
    """Hysteresis: noise between equal halves of traffic does not flip edges to and fro."""
    refit = Refit(LengthHistogram(512), half_powers_of_two(512), COST, LIMITS)
    switches = 0
    for turn in range(20):
        refit.histogram.add(short(600, seed * 100 + turn))
        if switch := refit.propose(RATE):
            refit.accept(switch)
            switches += 1

    assert switches <= 1


def test_edges_follow_a_shift_within_a_minute() -> None:
    """Bar: a minute after short traffic turns long, padding is within 2 points of the best."""
    policy = Policy([8, 16, 24, 512], COST, LIMITS)
    refit = Refit(LengthHistogram(512), policy.buckets.edges, COST, LIMITS)
    rate = 55.0
    texts = short(1500) + long(int(90 * rate))
    arrivals = list(poisson(texts, rate))
    shift_s = arrivals[1500].at
    look_s = 10.0

    def look(arrival: Arrival) -> None:
        nonlocal look_s
        refit.histogram.add(arrival.lengths)
        if arrival.at >= look_s:
            look_s += 10.0
            if switch := refit.propose(rate):
                refit.accept(switch)
                policy.set_edges(switch.edges)

    outcome = replay(arrivals, policy, 2, COST, look)

    best = LengthHistogram(512)
    best.add(long(2000, 7))
    ideal = Policy(
        best_edges(Traffic(best.counts(), rate, LIMITS.max_age_s), COST, LIMITS), COST, LIMITS
    )
    late = [a for a in arrivals if a.at > shift_s + 60]
    reference = replay(late, ideal, 2, COST)
    # Padding of our batches a minute after the shift, from what each batch computed.
    computed = sum(rows * width for rows, width, start in outcome.batches if start > late[0].at)
    real = sum(sum(a.lengths) for a in late)
    assert any(200 <= edge <= 224 for edge in policy.buckets.edges)
    assert 1 - real / computed <= reference.padding + 0.02
    assert len(outcome.served) == len(texts)
