"""The engine: every request settled exactly once, rows where they belong, counters back at zero."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from embedsvc.engine.messages import Arrivals
from embedsvc.engine.sequence import Key, Priority, Request
from embedsvc.errors import DeadlineExceeded, InferenceFailed, InternalError, NotReady, Overloaded
from tests.fakes import (
    BrokenModel,
    EngineRig,
    GateModel,
    SmallDevice,
    SumModel,
    make_policy,
    make_rig,
)

Rigs = Callable[..., EngineRig]


@pytest.fixture
async def rigs() -> AsyncIterator[Rigs]:
    """Start engines; stop them all afterwards and see that nothing is left behind."""
    started: list[EngineRig] = []

    def start(*args: object, **kwargs: object) -> EngineRig:
        started.append(make_rig(*args, **kwargs))  # type: ignore[arg-type]  # passed through
        return started[-1]

    yield start

    for rig in started:
        if isinstance(rig.model, GateModel):
            rig.model.open(10_000)
        await rig.close()
        assert rig.idle


def expected(lengths: list[int], first_id: int = 1) -> np.ndarray:
    rows = [np.arange(first_id, first_id + n) for n in lengths]
    return np.array([(r.sum(), len(r), r[0], r[-1]) for r in rows], np.float32)


async def test_row_i_lands_at_i(rigs: Rigs) -> None:
    """Law: rows come back in the order of the request, whatever batches they went through."""
    rig = rigs(slots=2)
    random.seed(0)
    sent = []
    for k in range(100):
        lengths = [random.randint(1, 128) for _ in range(random.randint(1, 30))]
        sent.append((lengths, k + 1, rig.send(lengths, first_id=k + 1)))

    for lengths, first_id, request in sent:
        assert await request.settled is None
        np.testing.assert_array_equal(request.vectors, expected(lengths, first_id))


async def test_late_arrivals_join_the_batch_that_waits_for_a_slot(rigs: Rigs) -> None:
    """What arrives while the device is busy leaves together."""
    model = GateModel()
    rig = rigs(model)
    first = rig.send([10])
    assert await model.wait_entered() == 1
    later = [rig.send([10]) for _ in range(5)]

    model.open(2)

    await asyncio.gather(first.settled, *(r.settled for r in later))
    assert model.batches == [[10], [10] * 5]


async def test_two_slots_hold_two_batches(rigs: Rigs) -> None:
    """The semaphore lets exactly as many batches onto the device as it has slots."""
    model = GateModel()
    rig = rigs(model, slots=2, policy=make_policy(max_batch_size=1))
    requests = [rig.send([10]) for _ in range(3)]

    await model.wait_entered()
    await model.wait_entered()

    assert rig.engine.device.busy == 2
    assert model.entered.empty()
    model.open(3)
    await asyncio.gather(*(r.settled for r in requests))


async def test_abandoned_rows_never_reach_the_device(rigs: Rigs) -> None:
    """A request dropped while it waits costs nothing and frees its place at once."""
    model = GateModel()
    rig = rigs(model)
    held = rig.send([10])
    await model.wait_entered()
    gone, kept = rig.send([20, 20]), rig.send([30])

    rig.engine.abandon(gone)

    assert rig.engine.admission.sequences == 2
    model.open(2)
    await asyncio.gather(held.settled, kept.settled)
    assert model.batches == [[10], [30]]
    assert rig.value("embedsvc_texts_total", outcome="abandoned") == 2


async def test_a_deadline_is_answered_on_time_while_the_device_is_stuck(rigs: Rigs) -> None:
    """An expired request gets its error although nothing moves, and is never computed."""
    model = GateModel()
    rig = rigs(model)
    held = rig.send([10])
    await model.wait_entered()
    late = rig.send([20], timeout_s=0.01)

    error = await late.settled

    assert isinstance(error, DeadlineExceeded)
    model.open(1)
    assert await held.settled is None
    assert model.batches == [[10]]
    assert rig.value("embedsvc_texts_total", outcome="expired") == 1


async def test_a_poisoned_row_fails_its_request_only(rigs: Rigs) -> None:
    """Whoever shares the batch with a row that breaks the model still gets their vectors."""
    rig = rigs(BrokenModel())
    broken, good = rig.send([5], first_id=BrokenModel.RAISE), rig.send([5])

    error = await broken.settled

    assert isinstance(error, InferenceFailed)
    assert error.should_retry is False
    assert await good.settled is None
    assert rig.engine.state == "ready"


async def test_a_batch_that_did_not_fit_makes_later_ones_smaller(rigs: Rigs) -> None:
    """The limit of that length halves and grows back with full batches."""
    model = SmallDevice(fits=4)
    policy = make_policy(max_batch_size=16, max_batch_tokens=10_000, edges=[128])
    rig = rigs(model, policy=policy)
    assert await rig.send([10] * 16).settled is None
    # What the device said is read before the next choice.
    assert await rig.send([10]).settled is None
    assert policy.buckets.memory_share < 1
    model.fits = 16

    for _ in range(40):
        assert await rig.send([10] * 16).settled is None

    assert policy.buckets.memory_share == 1


async def test_a_row_that_is_not_finite_fails_its_request_only(rigs: Rigs) -> None:
    """NaN becomes an error that names the input; neighbours in the batch get their vectors."""
    model = BrokenModel()
    rig = rigs(model)
    good, bad = rig.send([5]), rig.send([5], first_id=BrokenModel.NAN)

    error = await bad.settled

    assert isinstance(error, InferenceFailed)
    assert "input[0]" in error.message
    assert await good.settled is None


async def test_tokens_are_counted_by_key(rigs: Rigs) -> None:
    """Whoever runs the server sees what each key takes; without keys there is nothing to tell."""
    rig = rigs()
    one, other = Key("one", 1.0), Key("other", 2.0)
    sent = [rig.send([10, 20], key=one), rig.send([40], key=other), rig.send([3], key=one)]
    await asyncio.gather(*(request.settled for request in sent), rig.send([99]).settled)
    # The count comes after the answer.
    await rig.close()

    counted = [rig.value("embedsvc_key_tokens_total", key=name) for name in ("one", "other", "")]
    assert counted == [33, 40, 0]


async def test_the_death_of_the_scheduler_fails_everyone(rigs: Rigs) -> None:
    """Waiters get an answer, the engine says failed, later requests are refused at once."""
    model = GateModel()
    rig = rigs(model)
    held = rig.send([10])
    await model.wait_entered()
    waiting = rig.send([10])

    rig.engine._inbox.put(Arrivals([[]]))  # a message the scheduler cannot digest
    errors = [await held.settled, await waiting.settled, await rig.send([1]).settled]

    assert [type(e) for e in errors] == [InternalError, InternalError, NotReady]
    assert rig.engine.state == "failed"


async def test_stop_finishes_what_is_in_flight(rigs: Rigs) -> None:
    """Stopping waits for submitted requests and refuses new ones."""
    model = GateModel()
    rig = rigs(model)
    inside = [rig.send([10]), rig.send([20])]
    await model.wait_entered()
    stopping = asyncio.create_task(rig.engine.stop(drain_timeout_s=10))
    await asyncio.sleep(0)

    refused = await rig.send([10]).settled
    model.open(2)
    await stopping

    assert isinstance(refused, NotReady)
    assert [await r.settled for r in inside] == [None, None]


async def test_stop_answers_what_the_drain_time_did_not_cover(rigs: Rigs) -> None:
    """When the drain time ends, whoever still waits is told."""
    model = GateModel()
    rig = rigs(model)
    stuck = rig.send([10])
    await model.wait_entered()
    stopping = asyncio.create_task(rig.engine.stop(drain_timeout_s=0))

    error = await stuck.settled

    assert isinstance(error, NotReady)
    model.open(1)
    await stopping


async def test_admission_is_all_or_nothing(rigs: Rigs) -> None:
    """A request over the bound is refused whole and holds nothing."""
    rig = rigs(max_queue_sequences=10)

    with pytest.raises(Overloaded) as refusal:
        rig.engine.admit(11, 11, Priority.INTERACTIVE, left_s=60)

    assert refusal.value.retry_after_s is not None
    assert 1 <= refusal.value.retry_after_s <= 60
    assert rig.engine.admission.sequences == 0


async def test_a_buffer_is_not_reused_before_its_batch_left(rigs: Rigs) -> None:
    """Law: while a batch is on the device its buffer is not written by another."""
    model = GateModel()
    rig = rigs(model, slots=2, policy=make_policy(max_batch_size=2))
    requests = [rig.send([3, 4], first_id=k) for k in range(1, 20)]
    model.open(len(requests))

    await asyncio.gather(*(r.settled for r in requests))

    for k, request in enumerate(requests, 1):
        np.testing.assert_array_equal(request.vectors, expected([3, 4], k))


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_is_settled_exactly_once(rigs: Rigs, seed: int) -> None:
    """Law: under random arrivals, cancels, deadlines and failures all settle, counters return."""
    rng = random.Random(seed)
    rig = rigs(BrokenModel(), slots=2, policy=make_policy(max_batch_size=4))
    settled: dict[Request, int] = {}

    def count(request: Request, _: object) -> None:
        settled[request] = settled.get(request, 0) + 1

    requests = []
    for _ in range(150):
        broken = rng.choice([1, 1, 1, 1, BrokenModel.RAISE, BrokenModel.NAN])
        lengths = [rng.randint(1, 128) for _ in range(rng.randint(1, 6))]
        request = rig.send(lengths, first_id=broken, timeout_s=rng.choice([0.0, 0.002, 60]))
        request.settled.add_done_callback(functools.partial(count, request))
        requests.append((request, lengths, broken))
        if rng.random() < 0.3:
            rig.engine.abandon(rng.choice(requests)[0])
        if rng.random() < 0.3:
            await asyncio.sleep(0)

    outcomes = await asyncio.gather(*(r.settled for r, _, _ in requests))

    await asyncio.sleep(0)
    assert set(settled.values()) == {1}
    assert len(settled) == len(requests)
    assert rig.engine.admission.sequences == rig.engine.admission.tokens == 0
    for (request, lengths, first_id), error in zip(requests, outcomes, strict=True):
        if error is None:
            np.testing.assert_array_equal(request.vectors, expected(lengths, first_id))


async def test_a_closed_loop_is_tolerated() -> None:
    """A batch that outlives its event loop ends quietly."""
    model = GateModel()

    def run() -> EngineRig:
        async def inner() -> EngineRig:
            rig = make_rig(model)
            rig.send([10])
            await model.wait_entered()
            rig.engine._inbox.put(None)
            return rig

        return asyncio.run(inner())

    rig = await asyncio.to_thread(run)
    model.open(1)
    await asyncio.to_thread(rig.engine._thread.join, 10)

    assert not rig.engine._thread.is_alive()
    await asyncio.to_thread(rig.engine.device.close)


def test_sum_model_is_a_model() -> None:
    """The fake satisfies the protocol the engine relies on."""
    from embedsvc.models import Model

    model: Model = SumModel()

    assert model.dim == 4
