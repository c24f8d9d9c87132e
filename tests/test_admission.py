"""Admission: bounds hold, bulk leaves room, what is reserved comes back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.admission import Admission
from embedsvc.errors import Overloaded

asks = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 600), st.booleans()), max_size=40)


@given(asks)
def test_bounds_hold_and_everything_comes_back(asks: list[tuple[int, int, bool]]) -> None:
    """Law: never over a bound, all or nothing, and zero after the last release."""
    admission = Admission(max_sequences=100, max_tokens=1000)
    held = []
    for sequences, tokens, bulk in asks:
        before = (admission.sequences, admission.tokens)
        with contextlib.suppress(Overloaded):
            admission.reserve(sequences, tokens, bulk=bulk, drain_s=3)
            held.append((sequences, tokens))
            before = (before[0] + sequences, before[1] + tokens)

        assert (admission.sequences, admission.tokens) == before
        assert admission.sequences <= 100
        assert admission.tokens <= 1000
    for sequences, tokens in held:
        admission.release(sequences, tokens)

    assert (admission.sequences, admission.tokens) == (0, 0)


def test_bulk_leaves_a_quarter_free() -> None:
    """Bulk requests are refused where interactive ones are still welcome."""
    admission = Admission(max_sequences=100, max_tokens=10_000)
    admission.reserve(75, 75, bulk=True, drain_s=1)

    with pytest.raises(Overloaded, match="for bulk requests"):
        admission.reserve(1, 1, bulk=True, drain_s=1)
    admission.reserve(25, 25, bulk=False, drain_s=1)

    assert admission.sequences == 100


@pytest.mark.parametrize(("drain_s", "told"), [(0.0, 1.0), (7.0, 7.0), (900.0, 60.0)])
def test_refusal_says_when_to_come_back(drain_s: float, told: float) -> None:
    """The time to come back is the predicted drain, within what clients obey."""
    admission = Admission(max_sequences=1, max_tokens=1)

    with pytest.raises(Overloaded) as refusal:
        admission.reserve(2, 1, bulk=False, drain_s=drain_s)

    assert refusal.value.retry_after_s == told
