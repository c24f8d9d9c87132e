"""Admission: bounds hold, bulk leaves room, what is reserved comes back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.admission import Admission, Bookings
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


@dataclass
class Fluid:
    """A queue that runs off at one second of work a second, in virtual time."""

    now: float = 0.0
    pending_s: float = 0.0

    def clock(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        self.pending_s = max(0.0, self.pending_s - (to - self.now))
        self.now = to


@pytest.mark.parametrize("own_s", [0.05, 0.5, 2.0])
def test_the_refused_find_room_when_they_come_back_as_told(own_s: float) -> None:
    """Bar: after a burst of 30 s of work, 80 % of the refused are admitted at their second try."""
    queue, room_s = Fluid(), 5.0
    bookings = Bookings(queue.clock)
    returns: list[float] = []
    for _ in range(int(30 / own_s)):
        if queue.pending_s + own_s <= room_s:
            queue.pending_s += own_s
        else:
            late_s = queue.pending_s + own_s - room_s
            returns.append(queue.now + bookings.book(late_s, own_s))
        queue.advance(queue.now + 0.001)

    admitted = 0
    for told in sorted(returns):
        queue.advance(told)
        if queue.pending_s + own_s <= room_s + 1e-6:
            queue.pending_s += own_s
            admitted += 1

    assert admitted >= 0.8 * len(returns)
    assert all(told - 30 / own_s * 0.001 <= 60 for told in returns)


def test_a_time_to_come_back_is_one_that_clients_obey() -> None:
    """Never under a second, never over a minute."""
    bookings = Bookings(lambda: 0.0)

    assert bookings.book(0.0, 0.1) == 1.0
    assert bookings.book(900.0, 0.1) == 60.0


def test_promises_are_forgotten_as_time_passes() -> None:
    """A server that has caught up sends nobody away for long."""
    queue = Fluid()
    bookings = Bookings(queue.clock)
    for _ in range(100):
        bookings.book(1.0, 0.5)
    queue.advance(60.0)

    assert bookings.book(1.0, 0.5) == 1.0
