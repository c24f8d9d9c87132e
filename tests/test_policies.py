"""The comparison of batching rules: its tables on traffic whose figures are known."""

from __future__ import annotations

import pytest

from embedsvc.engine.cost import DEFAULT_COST
from loadtest.policies import (
    LOADS,
    OURS,
    RULES,
    SLOTS,
    Timed,
    judge_choices,
    load_table,
    saturated_table,
)
from loadtest.target import Bars

ALONE_S = DEFAULT_COST(1, 8)


def cells(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, its titles left out."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_saturated_figures_of_equal_texts() -> None:
    """Texts of one width have no padding; one at a time they take what the cost model says."""
    rows = {rule: figures for rule, *figures in cells(saturated_table([8] * 400))}

    assert list(rows) == list(RULES)
    assert {padding for *_, padding in rows.values()} == {"0%"}
    assert rows["no batching"][0] == f"{SLOTS / ALONE_S:.0f}"
    assert rows["no batching"][2] == "1.0"
    assert rows[OURS][1] == "1.00"


def test_figures_of_a_light_load() -> None:
    """Where nobody waits, every rule that does not wait for more texts takes the time of one."""
    table = load_table("poisson", [8], saturation=1.0, seconds=40.0)
    rows = cells(table)

    assert len(rows) == len(LOADS) * len(RULES)
    for load, rule, good, served, padding, p50, *_ in rows:
        assert (load, padding) in {(f"{one:.0%}", "0%") for one in LOADS}
        assert good == served
        waits_s = {"4 buckets, 8 or 2 ms": 0.002, "4 buckets, 32 or 20 ms": 0.020}.get(rule, 0.0)
        assert p50 == f"{(ALONE_S + waits_s) * 1e3:.0f}"
    assert table == load_table("poisson", [8], saturation=1.0, seconds=40.0)


def test_choices_are_timed_while_enough_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """Every choice from a full queue is timed, none from one that runs empty."""
    timed = Timed(n_waiting=10)
    judge_choices(Bars(), [8, 200], n_waiting=50)

    assert timed.next(0.0, 1) == float("inf")
    assert timed.seconds == []
    assert "choices, 50 texts waiting, median" in capsys.readouterr().out
