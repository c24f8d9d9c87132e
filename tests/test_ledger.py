"""Predicted end of a new request beside open ones."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from embedsvc.engine.admission import PROMISED_LONG_SHARE, PROMISED_SHARE
from embedsvc.engine.backlog import RETRY_MARGIN
from embedsvc.engine.correction import WINDOW
from embedsvc.engine.sequence import Priority
from embedsvc.errors import Overloaded
from tests.fakes import EngineRig, GateModel, make_policy, make_rig

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK


async def test_a_request_that_would_end_late_is_refused_with_a_time() -> None:
    """Admission compares the predicted end with the deadline; the refused hear when to return."""
    model = GateModel()
    rig = make_rig(model)
    held = rig.send([100] * 200)
    queue_s = rig.engine.queue_s

    with pytest.raises(Overloaded) as refusal:
        rig.engine.admit(1, 10, INTERACTIVE, left_s=queue_s)
    claim = rig.engine.admit(1, 10, INTERACTIVE, left_s=3 * queue_s)

    late_s = queue_s * (RETRY_MARGIN - PROMISED_SHARE)
    assert refusal.value.retry_after_s == pytest.approx(max(1.0, late_s), rel=0.1)
    rig.engine.withdraw(claim)
    rig.engine.abandon(held)
    model.open(10)
    await asyncio.wait_for(rig.close(), 10)
    assert rig.idle


async def test_what_is_being_tokenized_counts_for_those_who_come() -> None:
    """Of many requests at once only as many are admitted as can be done, none queued yet."""
    rig = make_rig(GateModel())
    claims = [rig.engine.admit(16, 1600, INTERACTIVE, left_s=1.0)]

    with contextlib.suppress(Overloaded):
        while len(claims) < 1000:
            claims.append(rig.engine.admit(16, 1600, INTERACTIVE, left_s=1.0))

    assert 0 < rig.engine.queue_s <= PROMISED_SHARE
    assert len(claims) < 1000
    for claim in claims:
        rig.engine.withdraw(claim)
    await rig.close()
    assert rig.idle


async def test_long_deadlines_are_promised_nearly_whole() -> None:
    """Nobody overtakes a row for longer than the age cap: a burst may fill a minute, not 24 s."""
    model = GateModel()
    rig = make_rig(model, policy=make_policy(max_age_s=0.5))
    held = rig.send([100] * 200)
    queue_s = rig.engine.queue_s
    assert queue_s > 1.0

    left_s = (queue_s * 1.1 + 0.5) / PROMISED_LONG_SHARE
    claim = rig.engine.admit(1, 10, INTERACTIVE, left_s)
    with pytest.raises(Overloaded):
        rig.engine.admit(1, 10, INTERACTIVE, left_s=(queue_s * 0.9 + 0.5) / PROMISED_LONG_SHARE)

    rig.engine.withdraw(claim)
    rig.engine.abandon(held)
    model.open(10)
    await rig.close()
    assert rig.idle


async def test_a_query_is_not_priced_as_if_an_upload_went_first() -> None:
    """Interactive work waits for its share only; bulk work waits for everything."""
    model = GateModel()
    rig = make_rig(model, policy=make_policy(max_batch_size=8))
    upload = rig.send([100] * 1000, priority=BULK)
    queue_s = rig.engine.queue_s

    claim = rig.engine.admit(1, 100, INTERACTIVE, left_s=queue_s / 10)
    with pytest.raises(Overloaded):
        rig.engine.admit(1, 100, BULK, left_s=queue_s / 10)

    rig.engine.withdraw(claim)
    rig.engine.abandon(upload)
    model.open(10)
    await rig.close()
    assert rig.idle


async def test_an_idle_engine_admits_whatever_the_deadline() -> None:
    """On an idle server the prediction is no reason to refuse."""
    rig = make_rig()

    claim = rig.engine.admit(1000, 100_000, INTERACTIVE, left_s=0.001)

    rig.engine.withdraw(claim)
    await rig.close()


async def slow_engine() -> EngineRig:
    """Return an engine whose batches of texts of 100 tokens took far longer than predicted."""
    ticks = itertools.count()
    rig = make_rig(clock=lambda: float(next(ticks)))
    for _ in range(30):
        assert await rig.send([100], timeout_s=1e6).settled is None
    return rig


async def test_predictions_follow_the_device_by_length() -> None:
    """A device that turns slow for some length makes predictions of that length longer."""
    fresh, rig = make_rig(), await slow_engine()

    slower, same = (rig.engine.own_s(1, n) / fresh.engine.own_s(1, n) for n in (100, 10))

    # A batch took one tick of the clock, a second.
    assert slower == pytest.approx(1 / make_policy().cost(1, 104), rel=1e-6)
    assert same == 1
    await asyncio.gather(rig.close(), fresh.close())


async def test_what_waits_already_is_priced_as_batches_are_now() -> None:
    """The predicted end of a queue follows the time of batches, for rows taken in before too."""
    model = GateModel()
    rig = make_rig(model)
    held = rig.send([100] * 50)
    correction, before_s = rig.engine._ledger.correction, rig.engine.queue_s
    for _ in range(WINDOW):
        correction.observe(104, 3.0)

    assert rig.engine.queue_s == pytest.approx(3 * before_s)
    rig.engine.abandon(held)
    model.open(100)
    await rig.close()
    assert rig.idle


async def test_the_scheduler_hears_of_slow_batches() -> None:
    """The policy expects long batches after it was told, and was told through its inbox."""
    rig = await slow_engine()

    assert await rig.send([100], timeout_s=1e6).settled is None

    assert rig.engine.policy._p95 == tuple(rig.engine._ledger.correction.p95)
    assert rig.value("embedsvc_cost_correction", width="le_128", quantile="0.95") > 10
    assert rig.value("embedsvc_cost_error_ratio_count", width="le_128") == 31
    await rig.close()


async def test_rows_that_left_on_the_way_teach_nothing() -> None:
    """A batch that lost rows to a vanished client says nothing of its cost."""
    model = GateModel()
    rig = make_rig(model)
    held, gone = rig.send([10]), rig.send([10])
    assert await model.wait_entered() == 2
    rig.engine.abandon(gone)

    model.open(10)
    assert await held.settled is None
    assert await rig.send([10]).settled is None

    assert rig.value("embedsvc_cost_error_ratio_count", width="le_16") == 1
    await rig.close()
