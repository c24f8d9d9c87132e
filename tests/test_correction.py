"""Percentiles of measured over predicted time: exact, steady, bounded, told when they move."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.correction import NEWS, PRIOR, WINDOW, Correction, width_class
from embedsvc.metrics import WIDTH_CLASSES

ratio = st.floats(0.01, 100)
histories = st.lists(ratio, max_size=3 * WINDOW)


def after(ratios: list[float], width: int = 64) -> Correction:
    correction = Correction()
    for one in ratios:
        correction.observe(width, one)
    return correction


@given(histories)
def test_percentiles_are_those_of_the_last_batches(history: list[float]) -> None:
    """Law: order statistics of the window, whatever came before it."""
    correction, k = after(history), width_class(64)

    window = [*PRIOR, *history][-WINDOW:]
    assert correction.p50[k] == np.percentile(window, 50, method="inverted_cdf")
    assert correction.p95[k] == np.percentile(window, 95, method="inverted_cdf")


@pytest.mark.parametrize(("share", "name"), [(0.5, "p50"), (0.95, "p95")])
def test_they_converge_to_the_percentiles_of_the_device(share: float, name: str) -> None:
    """Over many windows of one distribution the percentiles are on average its own."""
    rng = random.Random(0)
    correction, seen = Correction(), []
    for turn in range(100 * WINDOW):
        correction.observe(64, rng.lognormvariate(0.3, 0.1))
        if turn % WINDOW == WINDOW - 1:
            seen.append(getattr(correction, name)[width_class(64)])

    true = np.quantile([rng.lognormvariate(0.3, 0.1) for _ in range(100_000)], share)
    assert np.mean(seen) == pytest.approx(true, rel=0.02)


@given(histories, st.one_of(st.just(0.0), st.just(1e9), ratio))
def test_an_outlier_moves_the_median_by_one_rank(history: list[float], outlier: float) -> None:
    """Law: after one more batch the median is within a rank of what it was, whatever it took."""
    correction, k = after(history), width_class(64)
    before = sorted([*PRIOR, *history][-WINDOW:])
    rank = before.index(correction.p50[k])
    last = len(before) - 1 - before[::-1].index(correction.p50[k])

    correction.observe(64, outlier)

    low, high = before[max(0, rank - 1)], before[min(last + 1, len(before) - 1)]
    assert low <= correction.p50[k] <= high


def test_one_slow_batch_changes_no_prediction() -> None:
    """At the start as later, a batch that something held up does not decide what is admitted."""
    assert after([50.0]).factor(64) == 1.0


def test_classes_learn_apart() -> None:
    """What long batches take says nothing of short ones."""
    correction = after([2.0] * WINDOW, width=256)

    assert correction.factor(256) == 2.0
    assert [correction.factor(n) for n in (8, 128, 257)] == [1.0] * 3


@given(st.integers(1, 10_000))
def test_a_class_holds_the_lengths_up_to_its_edge(length: int) -> None:
    """Law: the class of a length is the first whose edge is not below it."""
    k = width_class(length)

    assert k == len(WIDTH_CLASSES) or length <= WIDTH_CLASSES[k]
    assert k == 0 or length > WIDTH_CLASSES[k - 1]


@given(histories)
def test_memory_is_bounded(history: list[float]) -> None:
    """Law: no class remembers more than its window."""
    correction = after(history)

    assert max(map(len, correction._recent)) <= WINDOW


@given(st.lists(st.tuples(st.integers(1, 3000), ratio), max_size=100))
def test_the_scheduler_is_never_far_from_the_truth(batches: list[tuple[int, float]]) -> None:
    """Law: what was told last is within a tenth of what is known, and nothing is told twice."""
    correction = Correction()
    told = tuple(correction.p95)
    for width, one in batches:
        news = correction.observe(width, one)
        if news is not None:
            assert news.p95 != told
            told = news.p95
        assert all(abs(p - t) <= NEWS * t for p, t in zip(correction.p95, told, strict=True))
