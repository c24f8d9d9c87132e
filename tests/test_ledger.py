"""Predicted end of a new request beside open ones."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from embedsvc.engine.admission import PROMISED_LONG_SHARE, PROMISED_SHARE
from embedsvc.engine.sequence import Priority
from embedsvc.errors import Overloaded
from tests.fakes import GateModel, make_policy, make_rig

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK


async def test_a_request_that_would_end_late_is_refused_with_a_time() -> None:
    """Admission compares the predicted end with the deadline; the refused hear when to return."""
    model = GateModel()
    rig = make_rig(model)
    held = rig.send([100] * 200)
    queue_s = rig.engine.queue_s

    with pytest.raises(Overloaded) as refusal:
        rig.engine.admit(1, 10, INTERACTIVE, left_s=queue_s)
    rig.engine.admit(1, 10, INTERACTIVE, left_s=3 * queue_s)

    late_s = queue_s * (1 - PROMISED_SHARE)
    assert refusal.value.retry_after_s == pytest.approx(max(1.0, late_s), rel=0.1)
    rig.engine.admission.release(1, 10)
    rig.engine.abandon(held)
    model.open(10)
    await asyncio.wait_for(rig.close(), 10)
    assert rig.idle


async def test_long_deadlines_are_promised_nearly_whole() -> None:
    """Nobody overtakes a row for longer than the age cap: a burst may fill a minute, not 24 s."""
    model = GateModel()
    rig = make_rig(model, policy=make_policy(max_age_s=0.5))
    held = rig.send([100] * 200)
    queue_s = rig.engine.queue_s
    assert queue_s > 1.0

    rig.engine.admit(1, 10, INTERACTIVE, left_s=(queue_s * 1.1 + 0.5) / PROMISED_LONG_SHARE)
    with pytest.raises(Overloaded):
        rig.engine.admit(1, 10, INTERACTIVE, left_s=(queue_s * 0.9 + 0.5) / PROMISED_LONG_SHARE)

    rig.engine.admission.release(1, 10)
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

    rig.engine.admit(1, 100, INTERACTIVE, left_s=queue_s / 10)
    with pytest.raises(Overloaded):
        rig.engine.admit(1, 100, BULK, left_s=queue_s / 10)

    rig.engine.admission.release(1, 100)
    rig.engine.abandon(upload)
    model.open(10)
    await rig.close()
    assert rig.idle


async def test_an_idle_engine_admits_whatever_the_deadline() -> None:
    """On an idle server the prediction is no reason to refuse."""
    rig = make_rig()

    rig.engine.admit(1000, 100_000, INTERACTIVE, left_s=0.001)

    rig.engine.admission.release(1000, 100_000)
    await rig.close()


async def test_predictions_follow_the_pace_of_the_device() -> None:
    """A device that turns slow makes later predictions longer, within a bound."""
    ticks = itertools.count()
    rig = make_rig(clock=lambda: float(next(ticks)))
    before = rig.engine.own_s(1, 100)
    for _ in range(100):
        assert await rig.send([100], timeout_s=1e6).settled is None

    after = rig.engine.own_s(1, 100)

    assert 2 * before < after <= 4 * before
    await rig.close()
