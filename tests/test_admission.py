"""Admission: bounds hold, bulk leaves room, what is reserved comes back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.admission import Admission
from embedsvc.engine.sequence import NO_KEY, Key
from embedsvc.errors import Overloaded

keys = st.sampled_from([NO_KEY, Key("one", 1.0), Key("other", 2.0)])
asks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 600), st.booleans(), keys), max_size=40
)


@given(asks)
def test_bounds_hold_and_everything_comes_back(asks: list[tuple[int, int, bool, Key]]) -> None:
    """Law: never over a bound, all or nothing, and zero after the last release."""
    admission = Admission(max_sequences=100, max_tokens=1000)
    held = []
    for sequences, tokens, bulk, key in asks:
        before = (admission.sequences, admission.tokens)
        with contextlib.suppress(Overloaded):
            admission.reserve(sequences, tokens, bulk=bulk, key=key)
            held.append((sequences, tokens, key))
            before = (before[0] + sequences, before[1] + tokens)

        assert (admission.sequences, admission.tokens) == before
        assert admission.sequences <= 100
        assert admission.tokens <= 1000
    for sequences, tokens, key in held:
        admission.release(sequences, tokens, key)

    assert (admission.sequences, admission.tokens) == (0, 0)
    assert admission._held == {}


def test_bulk_leaves_a_quarter_free() -> None:
    """Bulk requests are refused where interactive ones are still welcome."""
    admission = Admission(max_sequences=100, max_tokens=10_000)
    admission.reserve(75, 75, bulk=True)

    with pytest.raises(Overloaded, match="for bulk requests"):
        admission.reserve(1, 1, bulk=True)
    admission.reserve(25, 25, bulk=False)

    assert admission.sequences == 100


def test_an_idle_queue_takes_whatever_fits_it() -> None:
    """An upload as large as the bound is not refused for ever."""
    admission = Admission(max_sequences=100, max_tokens=10_000)

    admission.reserve(100, 100, bulk=True)

    assert admission.sequences == 100


@given(st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_key_leaves_a_quarter_of_the_room_it_finds(n_keys: int, step: int, bulk: bool) -> None:
    """Law: after k keys that take all they may, a k-th power of a quarter is left for another."""
    admission = Admission(max_sequences=4096, max_tokens=100_000)
    for k in range(n_keys):
        for _ in range(4096):
            with contextlib.suppress(Overloaded):
                admission.reserve(step, step, bulk=bulk, key=Key(f"greedy-{k}", 1.0))

    left = 4096 - admission.sequences
    assert left >= 4096 // 4**n_keys
    admission.reserve(left // 2, left, bulk=False, key=Key("other", 1.0))


def test_without_keys_all_of_the_queue_is_used() -> None:
    """Nobody is kept from room that nobody else could ask for."""
    admission = Admission(max_sequences=100, max_tokens=10_000)

    for _ in range(100):
        admission.reserve(1, 1, bulk=False)

    assert admission.sequences == 100
