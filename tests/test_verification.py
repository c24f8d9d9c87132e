"""What `embedsvc check` says of a model: its cost in units that can be read."""

from __future__ import annotations

from pathlib import Path

from embedsvc.engine.calibrate import Calibration, Errors
from embedsvc.engine.cost import CostModel
from embedsvc.verification import in_units, verify
from tests.test_service import make_config


def test_a_cost_is_told_in_units_that_can_be_read() -> None:
    """Each term has the unit that leaves it few digits, beside how far it is to be trusted."""
    cost = CostModel(6.7e-3, 0.6e-3, 116e-6, 0.2e-6)

    assert in_units(Calibration(cost, 512, Errors(0.0423, 0.101)), 2, 1) == (
        "6.7 ms a batch, 600 µs a row, 116 µs a token, 200 ns a token squared; "
        "error 4.2% (median), 10.1% (p90) on shapes not fitted; "
        "max_batch_tokens 512, slots 2, threads per slot 1"
    )


def test_floor_and_rest_are_told_where_they_cost() -> None:
    """A model too short to be judged says nothing of its error."""
    cost = CostModel(1e-3, 0.0, 1e-6, 0.0, floor=2.5e-3, cold=1.5e-3)

    line = in_units(Calibration(cost, 4096, None), 2, 8)

    assert "token squared, at least 2.5 ms, 1.5 ms more after a rest; max_batch_tokens" in line


def test_weightless_vectors_are_not_verified(tmp_path: Path) -> None:
    """One line says so; nothing is measured."""
    lines = list(verify(make_config(tmp_path)))

    assert [right for right, _ in lines] == [True]
    assert "no vectors to verify" in lines[0][1]
    assert list(tmp_path.iterdir()) == []
