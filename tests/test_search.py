"""The search for settings, on cases whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embedsvc.engine.calibrate import Calibration
from embedsvc.engine.cost import CostModel
from embedsvc.tuning.judge import MIN_GAIN, Division, Figure, Ground, Judge, Measured, Settings
from embedsvc.tuning.predict import counts_of
from embedsvc.tuning.search import Choice, search

COST = CostModel(3e-3, 1e-4, 52e-6, 4e-8)
# A launch costs as much as a hundred rows: only large batches pay.
LAUNCH = CostModel(0.1, 1e-3, 0, 0)
MIXED = counts_of([8, 12, 16, 20] * 5 + [90, 120], 128)
SHORT = counts_of([8], 16)


def judge_of(*divisions: Measured, **ground: Any) -> Judge:
    """Return a quick judge on mixed texts, 300 ms wanted."""
    default: dict[str, Any] = {"lengths": MIXED, "max_age_s": 5.0, "timeout_s": 60.0, "slo_s": 0.3}
    return Judge(Ground(divisions=divisions, **default | ground), n_texts=400)


def measured(cost: CostModel = COST, slots: int = 2, budget: int = 512) -> Measured:
    return Measured(Division(slots, 2 // slots), Calibration(cost, budget, None))


def choice(judge: Judge, present: Settings, name: str) -> Choice:
    return next(c for c in search(judge, present).choices if c.name == name)


def test_defaults_stay_where_nothing_is_better() -> None:
    """A fitting budget, no delay, learned edges: the proposal is no change, and says so."""
    proposal = search(judge_of(measured(budget=1024)), Settings())

    assert proposal.proposed == Settings()
    assert {c.reason for c in proposal.choices} == {"the default; nothing tried is 2 % better"}


def test_a_useless_delay_goes() -> None:
    """Where a busy device does the waiting, a delay only costs latency."""
    delay = choice(judge_of(measured()), Settings(max_batch_delay_ms=20.0), "max_batch_delay_ms")

    assert (delay.present, delay.proposed) == (20.0, 0.0)
    assert "with 20" in delay.reason


def test_bad_edges_are_left_to_the_server() -> None:
    """One bucket of the user's own pads everything; learned edges are better by far."""
    buckets = choice(judge_of(measured()), Settings(buckets=(128,)), "buckets")

    assert (buckets.present, buckets.proposed) == ((128,), "auto")
    assert "with [128]" in buckets.reason
    assert "does as well" not in buckets.reason


def test_a_larger_budget_is_taken_where_batches_are_dear() -> None:
    """Twice the rows share a launch."""
    judge = judge_of(measured(LAUNCH, budget=64), lengths=SHORT, slo_s=2.0)

    assert search(judge, Settings()).proposed == Settings(max_batch_tokens=128)


def test_a_good_budget_of_the_users_own_is_kept() -> None:
    """The present value is tried too, however far from the automatic one."""
    judge = judge_of(measured(LAUNCH, budget=64), lengths=SHORT, slo_s=2.0)
    present = Settings(max_batch_tokens=1024)

    budget = choice(judge, present, "max_batch_tokens")

    assert budget.proposed == 1024
    assert "with auto" in budget.reason


@pytest.mark.parametrize(("faster", "expected"), [(0.9, "auto"), (1.5, Division(1, 2))])
def test_another_division_must_be_clearly_faster(faster: float, expected: object) -> None:
    """One wide slot against two narrow ones, by what was measured for each."""
    wide = replace(COST, **{c: getattr(COST, c) / 2 / faster for c in ("c0", "c1", "c2", "c3")})
    judge = judge_of(measured(), measured(wide, slots=1))

    assert search(judge, Settings()).proposed.division == expected


def test_a_rate_beyond_all_is_judged_by_what_still_comes_in_time() -> None:
    """With too many texts, goodput at the wanted rate ranks."""
    slow = measured(LAUNCH, budget=64)
    judge = judge_of(slow, lengths=SHORT, rate=800.0, timeout_s=2.0, slo_s=1.0)

    proposed = search(judge, Settings()).proposed

    assert judge.ranked_by(Settings()) is Figure.GOODPUT
    assert judge.goodput(proposed) > (1 + MIN_GAIN) * judge.goodput(Settings())


def test_a_latency_nothing_can_keep_leaves_saturation() -> None:
    """Where the longest text alone takes longer than wanted, throughput ranks."""
    judge = judge_of(measured(LAUNCH, budget=64), lengths=SHORT, slo_s=0.01)

    assert judge.sustained(Settings()) == 0
    assert judge.ranked_by(Settings()) is Figure.SATURATION
    assert search(judge, Settings()).proposed.max_batch_tokens == 128


def test_the_sustained_rate_keeps_the_latency_and_no_more() -> None:
    """The rate found meets the target; a few percent more do not."""
    judge = judge_of(measured())

    rate = judge.sustained(Settings())

    assert judge.meets(Settings(), rate)
    assert not judge.meets(Settings(), 1.1 * rate)


def test_equal_arguments_give_equal_proposals() -> None:
    """Law: nothing but the arguments decides."""
    present = Settings(max_batch_delay_ms=5.0, max_batch_size=16)

    one, other = (search(judge_of(measured()), present) for _ in "ab")

    assert one == other
