"""The cost model: its form and its fit."""

from __future__ import annotations

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


def test_fit_of_nothing_is_refused() -> None:
    """No measurement, no model."""
    with pytest.raises(ValueError, match="no observations"):
        fit([])
