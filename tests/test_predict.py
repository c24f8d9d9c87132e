"""Predicted figures of a plan: nothing is lost, equal arguments agree, overload is refused."""

from __future__ import annotations

import random
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.engine.buckets import Limits, first_edges
from embedsvc.engine.cost import CostModel
from embedsvc.tuning.predict import (
    Admitting,
    Plan,
    Point,
    counts_of,
    draw,
    predict,
    saturation,
)
from embedsvc.tuning.simulate import Arrival, replay

COST = CostModel(3e-3, 1e-4, 52e-6, 4e-8)
PLAN = Plan(tuple(first_edges(256)), Limits(256, 512, 256), slots=2)
RNG = random.Random(1)
LENGTHS = counts_of(
    [RNG.randint(4, 24) if RNG.random() < 0.65 else RNG.randint(35, 256) for _ in range(3000)], 256
)


def test_a_lone_text_takes_its_batch_and_the_overhead() -> None:
    """Where nothing waits, latency is the predicted batch plus what HTTP takes."""
    point = predict(counts_of([16], 256), COST, PLAN, rate=0.1, n_texts=50, overhead_s=0.002)

    assert point.p50_s == pytest.approx(COST(1, 16) + 0.002)
    assert point.p99_s == point.short_p99_s == pytest.approx(point.p50_s)
    assert point.mean_rows == 1
    assert point.padding == 0


@settings(max_examples=15, deadline=None)
@given(st.floats(10, 3000), st.sampled_from([0.05, 0.5, inf]), st.integers(0, 99))
def test_no_text_is_lost_and_equal_arguments_agree(
    rate: float, timeout_s: float, seed: int
) -> None:
    """Law: embedded, refused and late texts are all texts, the same ones every time."""
    one, other = (predict(LENGTHS, COST, PLAN, rate, 300, timeout_s, seed=seed) for _ in "ab")

    assert one == other
    assert one.n_rejected >= 0
    assert one.n_timed_out >= 0
    assert one.n_rejected + one.n_timed_out <= 300
    if timeout_s == inf:
        assert one.n_rejected == one.n_timed_out == 0


def test_overload_is_refused_and_the_rest_kept() -> None:
    """At three times the saturation rate, refusals keep throughput and deadlines."""
    most = saturation(LENGTHS, COST, PLAN)

    point = predict(LENGTHS, COST, PLAN, 3 * most, 6000, timeout_s=2.0)

    assert point.n_rejected > 1000
    assert point.n_timed_out < 0.02 * 6000
    assert point.texts_per_s > 0.85 * most


def test_refusal_is_the_rule_of_the_engine() -> None:
    """A second a text and ten seconds each: as many as fit into the promised four are taken."""
    cost = CostModel(0, 1.0, 0, 0)
    plan = Plan((8,), Limits(8, 8, 1), slots=1)
    chooser = Admitting(plan, cost, timeout_s=10.0)

    burst = [Arrival(0.0, (8,), 10.0)] * 10
    later = Arrival(3.5, (8,), 10.0)
    outcome = replay([*burst, later], chooser, 1, cost)

    # Three of the first four are done by then, so the late one finds room.
    assert chooser.n_rejected == 6
    assert len(outcome.served) == 5


def test_a_text_that_alone_is_too_slow_is_taken() -> None:
    """An idle server refuses nothing, whatever the deadline; expired rows leave the count."""
    cost = CostModel(0, 1.0, 0, 0)
    plan = Plan((8,), Limits(8, 8, 1), slots=1)

    point = predict(counts_of([8], 8), cost, plan, rate=0.1, n_texts=100, timeout_s=0.5)

    assert point.n_rejected + point.n_timed_out == 100
    assert point.n_timed_out > 50
    assert point.p50_s is None


def test_goodput_counts_what_is_within_the_wanted_latency() -> None:
    """A latency between the quantiles splits the texts as the quantiles say."""
    loose = predict(LENGTHS, COST, PLAN, 400, 4000)
    assert loose.p50_s is not None

    tight = predict(LENGTHS, COST, PLAN, 400, 4000, slo_s=loose.p50_s)

    assert tight.good_per_s == pytest.approx(loose.texts_per_s / 2, rel=0.01)
    assert loose.good_per_s == loose.texts_per_s


def test_more_clients_saturate_more() -> None:
    """Whoever may choose from more waiting texts pads less."""
    few, many = (saturation(LENGTHS, COST, PLAN, n) for n in (16, 1500))

    assert few < many


def test_drawn_lengths_follow_the_counts() -> None:
    """Shares of the drawn texts are those of the counts; nothing is drawn that was not counted."""
    drawn = draw(counts_of([3, 3, 3, 7], 16), 4000)

    assert set(drawn) == {3, 7}
    assert drawn.count(3) == pytest.approx(3000, rel=0.05)


def test_longer_texts_count_as_cut() -> None:
    """What the server truncates has the model's maximum."""
    np.testing.assert_array_equal(counts_of([1, 9, 4], 4), [0, 1, 0, 0, 2])


def test_points_are_kept_as_json() -> None:
    """A point survives a file, also where there was no short text."""
    point = predict(counts_of([64], 256), COST, PLAN, 10, 20)
    assert point.short_p99_s is None

    again = msgspec.json.decode(msgspec.json.encode(point), type=Point)

    assert again == point
