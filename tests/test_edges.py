"""Best bucket edges: optimal, monotone in their number, right for the traffic."""

from __future__ import annotations

import itertools
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.engine.buckets import Limits
from embedsvc.engine.cost import CostModel
from embedsvc.tuning.edges import Traffic, best_edges, candidates, predicted_cost
from embedsvc.tuning.histogram import LengthHistogram

COST = CostModel(3e-3, 1e-4, 5e-5, 4e-8)
MAX_LENGTH = 56
LIMITS = Limits(MAX_LENGTH, 256, 16)

lengths = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=60)
traffics = st.builds(
    lambda texts, rate, static: Traffic(
        np.bincount(texts, minlength=MAX_LENGTH + 1).astype(float),
        rate=rate,
        static_shapes=static,
    ),
    lengths,
    st.sampled_from([inf, 10.0, 1000.0]),
    st.booleans(),
)


@settings(max_examples=60)
@given(traffics, st.integers(1, 4))
def test_edges_equal_brute_force(traffic: Traffic, max_edges: int) -> None:
    """Law: no other choice of at most k edges is predicted to be cheaper."""
    inner = candidates(MAX_LENGTH)[:-1]
    everything = min(
        predicted_cost([*chosen, MAX_LENGTH], traffic, COST, LIMITS)
        for n in range(max_edges)
        for chosen in itertools.combinations(inner, n)
    )

    found = best_edges(traffic, COST, LIMITS, max_edges)

    assert len(found) <= max_edges
    assert predicted_cost(found, traffic, COST, LIMITS) == pytest.approx(everything)


@settings(max_examples=60)
@given(traffics)
def test_more_edges_never_cost_more(traffic: Traffic) -> None:
    """Law: the best cost with at most k edges does not rise with k."""
    costs = [
        predicted_cost(best_edges(traffic, COST, LIMITS, k), traffic, COST, LIMITS)
        for k in range(1, 8)
    ]

    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(costs))


@given(traffics)
def test_edges_ascend_to_the_maximum(traffic: Traffic) -> None:
    """Law: every legal length has a bucket."""
    edges = best_edges(traffic, COST, LIMITS)

    assert edges == sorted(set(edges))
    assert edges[-1] == MAX_LENGTH


def test_buckets_that_cannot_fill_are_not_made() -> None:
    """Few texts a second share few buckets; many get their own."""
    counts = np.ones(MAX_LENGTH + 1)

    slow = best_edges(Traffic(counts, rate=5.0), COST, LIMITS)
    fast = best_edges(Traffic(counts, rate=5000.0), COST, LIMITS)

    assert len(slow) < len(fast)


def test_a_static_device_gets_edges_at_its_lengths() -> None:
    """Where batches are padded to the edge, edges move to where the texts are."""
    counts = np.zeros(513)
    counts[[20, 130, 510]] = [100, 100, 10]

    edges = best_edges(
        Traffic(counts, static_shapes=True), COST, Limits(512, 2048, 64), max_edges=3
    )

    assert edges == [24, 136, 512]


def test_long_models_have_few_candidates() -> None:
    """The tail of an 8,192-token model is sampled, ascending, up to its maximum."""
    tops = candidates(8192)

    assert len(tops) <= 257
    assert tops == sorted(set(tops))
    assert tops[-1] == 8192


@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_the_histogram_counts_newer_texts_more(texts: list[int]) -> None:
    """Law: a text weighs half of one that came half_life texts later."""
    histogram = LengthHistogram(64, half_life_texts=10)
    histogram.add(texts)

    expected = np.zeros(65)
    for age, length in enumerate(reversed(texts)):
        expected[length] += 0.5 ** ((age + 1) / 10)
    np.testing.assert_allclose(histogram.counts(), expected, rtol=1e-6)
    assert histogram.n_seen == len(texts)


def test_the_histogram_outlives_its_own_weights() -> None:
    """A million texts overflow nothing, and the old ones are forgotten."""
    histogram = LengthHistogram(64, half_life_texts=50)
    histogram.add([5] * 10_000)
    histogram.add([9] * 10_000)

    counts = histogram.counts()

    assert np.isfinite(counts).all()
    assert counts[5] < 1e-6 * counts[9]


@pytest.mark.parametrize("period", [2, 3, 4, 7, 8, 16])
def test_both_halves_of_the_histogram_see_every_kind(period: int) -> None:
    """Texts that come in turns are in both halves, or edges could not be judged."""
    histogram = LengthHistogram(64)
    histogram.add([1 + n % period for n in range(4000)])

    one, other = histogram.halves()

    shares = one[1 : period + 1] / (one + other)[1 : period + 1]
    assert ((shares > 0.3) & (shares < 0.7)).all()
