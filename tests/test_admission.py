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
            admission.reserve(sequences, tokens, bulk=bulk)
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
    admission.reserve(75, 75, bulk=True)

    with pytest.raises(Overloaded, match="for bulk requests"):
        admission.reserve(1, 1, bulk=True)
    admission.reserve(25, 25, bulk=False)

    assert admission.sequences == 100
