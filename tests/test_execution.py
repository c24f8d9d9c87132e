"""Poisoned rows: every innocent request gets its vectors, every guilty one its error, in bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.execution import Failures, run_batch
from embedsvc.engine.quarantine import Quarantine
from embedsvc.engine.sequence import Batch, Sequence
from embedsvc.models.buffers import HostBuffer
from tests.fakes import BrokenModel, MortalModel, SmallDevice, SumModel, make_request

RAISE, NAN, GOOD, KILL = BrokenModel.RAISE, BrokenModel.NAN, 1, MortalModel.KILL
LENGTH = 8


def make_rows(first_ids: list[int]) -> list[Sequence]:
    return [make_request([LENGTH], first_id=first_id)[1][0] for first_id in first_ids]


def run(
    model: SumModel, rows: list[Sequence], told: list[tuple[int, int]] | None = None
) -> Failures:
    buffer = HostBuffer(len(rows) * LENGTH, len(rows), model.dim, model.pad_id)
    told = [] if told is None else told
    outcome = run_batch(
        model,
        Batch(rows, LENGTH, 0.0),
        buffer,
        Quarantine(lambda: 0.0),
        lambda n, length: told.append((n, length)),
    )
    assert outcome.undone == []
    return outcome.failures


def expected(row: Sequence) -> tuple[int, int, int, int]:
    ids = row.input_ids
    return (int(ids.sum()), len(ids), int(ids[0]), int(ids[-1]))


@given(st.lists(st.sampled_from([GOOD, GOOD, GOOD, RAISE, NAN]), min_size=1, max_size=40))
def test_only_the_guilty_fail(first_ids: list[int]) -> None:
    """Law: innocent rows get their vectors, guilty ones an error with their index, in any mix."""
    rows = make_rows(first_ids)
    model = BrokenModel()

    failures = run(model, rows)

    assert set(failures) == {r for r, first in zip(rows, first_ids, strict=True) if first != GOOD}
    for row, first in zip(rows, first_ids, strict=True):
        if first == GOOD:
            assert tuple(row.request.vectors[0]) == expected(row)
        else:
            assert "input[0]" in failures[row].message
            assert failures[row].should_retry is False
    assert len(model.batches) < 2 * len(rows)


def test_other_rows_of_a_guilty_request_are_dropped() -> None:
    """Once a request is known to fail, nothing more is computed for it."""
    _, rows = make_request([LENGTH] * 8)
    rows[0].input_ids = np.full(LENGTH, RAISE)
    model = BrokenModel()

    failures = run(model, rows)

    assert list(failures) == [rows[0]]
    assert len(model.batches) <= 4


def test_a_row_that_is_fine_at_second_sight_succeeds() -> None:
    """A value that is not finite once is computed again alone before anybody is blamed."""

    @dataclass
    class OnceModel(SumModel):
        def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
            super().forward(buffer, rows, length)
            if len(self.batches) == 1:
                buffer.output[0] = np.inf

    rows = make_rows([GOOD, GOOD])

    assert run(OnceModel(), rows) == {}
    assert tuple(rows[0].request.vectors[0]) == expected(rows[0])


@given(st.lists(st.sampled_from([GOOD, GOOD, GOOD, KILL]), min_size=1, max_size=20), st.booleans())
def test_only_those_who_end_the_process_are_blamed(first_ids: list[int], killed: bool) -> None:
    """Law: tried until nothing is left, each text that ends it is named, once, and no other is."""
    rows = make_rows(
        [first * 1000 + k if first == GOOD else first for k, first in enumerate(first_ids)]
    )
    model, quarantine = MortalModel(killed=killed), Quarantine(lambda: 0.0)
    buffer = HostBuffer(len(rows) * LENGTH, len(rows), model.dim, model.pad_id)
    failures: Failures = {}
    waiting = [Batch(rows, LENGTH, 0.0)]
    while waiting:
        outcome = run_batch(model, waiting.pop(0), buffer, quarantine, lambda n, length: None)
        failures |= outcome.failures
        waiting += outcome.undone
        if model.dead:
            model.load()

    guilty = [row for row, first in zip(rows, first_ids, strict=True) if first == KILL]
    assert set(failures) == set(guilty)
    for row in set(rows) - set(guilty):
        assert tuple(row.request.vectors[0]) == expected(row)
    # All of them have the same text, which is refused once it is known.
    assert model.loads == (0 if not guilty else 4 if killed else 3)


def test_a_row_is_not_blamed_where_somebody_killed_the_process() -> None:
    """Once may be chance, also where it was alone; it is tried again alone."""
    rows = make_rows([KILL])
    model, quarantine = MortalModel(killed=True), Quarantine(lambda: 0.0)
    buffer = HostBuffer(LENGTH, 1, model.dim, model.pad_id)
    batch = Batch(rows, LENGTH, 0.0, deaths=2)

    outcome = run_batch(model, batch, buffer, quarantine, lambda n, length: None)

    assert outcome.failures == {}
    assert quarantine.refusal(rows) is None
    assert [(again.sequences, again.deaths) for again in outcome.undone] == [(rows, 3)]


def test_a_batch_that_never_reached_the_process_is_not_suspected() -> None:
    """Rows that come while it is away are tried again as they are."""
    rows = make_rows([GOOD, GOOD])
    model = MortalModel(dead=True)
    buffer = HostBuffer(2 * LENGTH, 2, model.dim, model.pad_id)
    batch = Batch(rows, LENGTH, 1.0)

    outcome = run_batch(model, batch, buffer, Quarantine(lambda: 0.0), lambda n, length: None)

    assert outcome.failures == {}
    assert [(again.sequences, again.deaths) for again in outcome.undone] == [(rows, 0)]


def test_other_rows_of_a_request_that_ended_the_process_are_dropped() -> None:
    """One text is enough to fail it, however many others there are like it."""
    _, rows = make_request([LENGTH] * 8)
    for k, row in enumerate(rows):
        row.input_ids[:2] = (KILL, k)
    model, quarantine = MortalModel(), Quarantine(lambda: 0.0)
    buffer = HostBuffer(8 * LENGTH, 8, model.dim, model.pad_id)

    outcome = run_batch(
        model, Batch(rows, LENGTH, 0.0, deaths=2), buffer, quarantine, lambda n, length: None
    )

    assert list(outcome.failures) == [rows[0]]
    assert outcome.undone == []


@pytest.mark.parametrize("n", [1, 4, 32])
def test_out_of_memory_never_surfaces_while_single_rows_fit(n: int) -> None:
    """A batch too large is split until its parts fit, and the policy hears of it."""
    rows = make_rows([GOOD] * n)
    model, told = SmallDevice(), list[tuple[int, int]]()

    failures = run(model, rows, told)

    assert failures == {}
    assert all(tuple(r.request.vectors[0]) == expected(r) for r in rows)
    assert all(rows > 3 and length == LENGTH for rows, length in told)
    assert len(model.calls) < 2 * n + 1


def test_a_row_that_does_not_fit_alone_is_told_so() -> None:
    """The client learns that memory, not the text as such, is the reason."""
    (row,) = make_rows([GOOD])

    failures = run(SmallDevice(fits=0), [row])

    assert "not enough memory on input[0]" in failures[row].message


def test_rows_of_abandoned_requests_are_not_computed() -> None:
    """A client that left between choice and forward costs nothing."""
    gone, kept = make_rows([GOOD, GOOD])
    gone.request.abandoned = True
    model = SumModel()

    assert run(model, [gone, kept]) == {}
    assert model.batches == [[LENGTH]]
