"""The cost model: its form and its fit."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.cost import CostModel, Observation, fit

GRID = [(rows, length) for rows in (1, 2, 8, 32) for length in (8, 32, 128, 512)]
coefficient = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))


@given(c0=st.floats(1e-4, 1), c1=coefficient, c2=coefficient, c3=coefficient)
def test_fit_predicts_what_the_form_can_express(c0: float, c1: float, c2: float, c3: float) -> None:
    """Exact measurements of any non-negative model are predicted to 0.1 %."""
    true = CostModel(c0 * 1e-2, c1 * 1e-3, c2 * 1e-4, c3 * 1e-7)

    found = fit([Observation(r, s, true(r, s)) for r, s in GRID])

    for rows, length in GRID:
        assert found(rows, length) == pytest.approx(true(rows, length), rel=1e-3)


@given(st.lists(st.floats(1e-4, 10), min_size=len(GRID), max_size=len(GRID)))
def test_fit_never_gives_a_negative_coefficient(seconds: list[float]) -> None:
    """Noise of any kind leaves every coefficient at zero or above."""
    found = fit([Observation(r, s, t) for (r, s), t in zip(GRID, seconds, strict=True)])

    assert min(found.c0, found.c1, found.c2, found.c3) >= 0


@given(c0=coefficient, c2=st.floats(1e-4, 1.0), last_flat=st.integers(1, len(GRID) - 5))
def test_a_floor_is_found_where_small_shapes_are_flat(c0: float, c2: float, last_flat: int) -> None:
    """Exact measurements of a device that takes a while for any batch are predicted to 0.1 %."""
    terms = CostModel(c0 * 1e-3, 0.0, c2 * 1e-5, 0.0)
    true = replace(terms, floor=sorted(terms(r, s) for r, s in GRID)[last_flat])

    found = fit([Observation(r, s, true(r, s)) for r, s in GRID], floor=True)

    for rows, length in GRID:
        assert found(rows, length) == pytest.approx(true(rows, length), rel=1e-3)


@given(st.lists(st.floats(0.98, 1.02), min_size=len(GRID), max_size=len(GRID)))
def test_noise_is_no_floor(noise: list[float]) -> None:
    """A device without a floor gets none from measurements that err a little."""
    true = CostModel(6e-3, 6e-4, 1e-4, 2e-7)
    seen = [Observation(r, s, true(r, s) * f) for (r, s), f in zip(GRID, noise, strict=True)]

    found = fit(seen, floor=True)

    for rows, length in GRID:
        assert found(rows, length) == pytest.approx(true(rows, length), rel=0.05)


models = st.builds(CostModel, *[st.floats(0, 1)] * 4, floor=st.floats(0, 1))


@given(models, st.integers(1, 300), st.integers(1, 512))
def test_every_way_to_price_agrees(cost: CostModel, rows: int, length: int) -> None:
    """Law: a row's share of a batch is the batch divided by its rows, in arrays as in numbers."""
    batch_s, row_s = cost(rows, length), cost.row(length)

    assert cost.batch(rows, row_s) == batch_s
    assert cost.share(rows, row_s) == pytest.approx(batch_s / rows)
    assert cost.shares(rows, np.array([length, 1]))[0] == pytest.approx(batch_s / rows)
    assert cost.share(inf, row_s) == row_s


def test_no_batch_is_below_the_floor() -> None:
    """Rows are free until the batch takes longer than the least time."""
    cost = CostModel(1e-3, 1e-3, 0.0, 0.0, floor=10e-3)

    assert [cost(rows, 8) for rows in (1, 9, 10)] == pytest.approx([10e-3, 10e-3, 11e-3])


def test_fit_of_nothing_is_refused() -> None:
    """No measurement, no model."""
    with pytest.raises(ValueError, match="no observations"):
        fit([])
