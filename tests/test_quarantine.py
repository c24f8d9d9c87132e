"""Quarantine: exactly the texts that ended a process, for a while, in bounded memory."""

from __future__ import annotations

import pytest

from embedsvc.engine.quarantine import MAX_TEXTS, QUARANTINE_S, Quarantine
from embedsvc.engine.sequence import Sequence
from tests.fakes import make_request


class Clock:
    """A time that stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        """Return it."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(clock)


def rows_of(*first_ids: int) -> list[Sequence]:
    return [make_request([4], first_id=first_id)[1][0] for first_id in first_ids]


def test_the_same_ids_are_refused_and_others_are_not(quarantine: Quarantine) -> None:
    """Another request with the same text is refused, with the index that it has there."""
    quarantine.add(rows_of(7)[0])
    _, rows = make_request([4, 4, 4], first_id=8)
    rows[2].input_ids = rows_of(7)[0].input_ids

    found = quarantine.refusal(rows)

    assert found is not None
    assert found[0] is rows[2]
    assert "input[2]" in found[1].message
    assert found[1].should_retry is False
    assert quarantine.refusal(rows[:2]) is None


def test_it_ends(quarantine: Quarantine, clock: Clock) -> None:
    """After its time a text is tried again."""
    quarantine.add(rows_of(7)[0])

    clock.now += QUARANTINE_S - 1
    assert quarantine.refusal(rows_of(7)) is not None
    clock.now += 1
    assert quarantine.refusal(rows_of(7)) is None


def test_the_oldest_leave(quarantine: Quarantine) -> None:
    """However many texts there are, the memory for them is bounded."""
    for row in rows_of(*range(1, MAX_TEXTS + 2)):
        quarantine.add(row)

    assert quarantine.refusal(rows_of(1)) is None
    assert quarantine.refusal(rows_of(2)) is not None
    assert quarantine.refusal(rows_of(MAX_TEXTS + 1)) is not None
