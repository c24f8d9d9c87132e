"""Models that die under an engine: real processes, killed, and what everybody gets meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from embedsvc.engine.engine import Engine
from embedsvc.engine.recovery import PATIENCE, Patience
from embedsvc.engine.sequence import Priority, Request
from embedsvc.errors import DeadlineExceeded, InferenceFailed, NotReady, RequestError
from tests.fakes import EngineRig, MortalModel, make_policy, make_request, make_rig
from tests.isolated import LONG_S, SHORT_S, expected, poisoned, processes
from tests.poisoned_worker import (
    CORRUPT,
    EXIT,
    FITS,
    FREEZE,
    HELD,
    HOLD,
    KILL,
    LOSE_DEVICE,
    RAISE,
    SEGFAULT,
    SLOW,
)

LENGTH = 3
# No pauses between loads, so that tests of many deaths do not wait.
AT_ONCE = Patience(hang_limit_s=LONG_S, first_pause_s=0.0)
Rigs = Callable[..., EngineRig]


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[Rigs]:
    """Start engines on isolated models; stop them and see that nothing is left behind."""
    started: list[EngineRig] = []

    def start(*, slots: int = 2, patience: Patience = AT_ONCE, rows: int = FITS) -> EngineRig:
        model = poisoned(tmp_path)
        model.load()
        policy = make_policy(model.max_length, max_batch_size=rows)
        started.append(make_rig(model, slots=slots, policy=policy, patience=patience))
        return started[-1]

    yield start

    for rig in started:
        await rig.close()
        assert rig.idle
    assert processes() == []


def send(rig: EngineRig, *first_ids: int, timeout_s: float = LONG_S) -> Request:
    """Submit a request with one short row a first id."""
    now = rig.engine._clock()
    request, rows = make_request(
        [LENGTH] * len(first_ids),
        settled=asyncio.get_running_loop().create_future(),
        deadline=now + timeout_s,
        arrival=now,
    )
    for row, first_id in zip(rows, first_ids, strict=True):
        row.input_ids[0] = first_id
    rig.engine.admission.reserve(len(rows), LENGTH * len(rows), bulk=False)
    rig.engine.submit(request, rows)
    return request


def assert_right(request: Request, *first_ids: int) -> None:
    """Check the vectors of a request."""
    rows = [[first_id, *range(2, LENGTH + 1)] for first_id in first_ids]
    np.testing.assert_array_equal(request.vectors, expected(rows))


def assert_blamed(error: RequestError | None, index: int) -> None:
    """Check that an error names the guilty text."""
    assert isinstance(error, InferenceFailed)
    assert f"process ended on input[{index}]" in error.message
    assert error.should_retry is False


async def restarts(rig: EngineRig, reason: str = "died") -> float:
    """Return how often the model was loaded again, once it serves again."""
    after = send(rig, 4)
    assert await after.settled is None
    assert_right(after, 4)
    return rig.value("embedsvc_model_restarts_total", reason=reason)


async def loaded_in_vain(rig: EngineRig) -> None:
    """Wait until loading again has failed, which only time tells."""
    while rig.engine._recovery.left_s() != inf:  # noqa: ASYNC110  # it happens on another thread
        await asyncio.sleep(0.01)


async def held(folder: Path) -> None:
    """Wait until a process is in a batch with a `HOLD`."""
    assert await asyncio.to_thread((folder / HELD).read_text) == "held"


async def loading(folder: Path) -> IO[str]:
    """Wait until a process loads the model; it goes on when what this returns is closed."""
    return await asyncio.to_thread((folder / SLOW).open, "w")


# --- who is to blame -----------------------------------------------------------------------------


async def test_a_poisoned_row_among_innocents_on_two_slots(rigs: Rigs, tmp_path: Path) -> None:
    """Law: whoever shared the process with the row that ends it gets their vectors."""
    os.mkfifo(tmp_path / HELD)
    rig = rigs()
    beside = send(rig, 5, HOLD, 6)
    await held(tmp_path)
    guilty, within = send(rig, 7, 8, KILL), send(rig, 9)

    assert_blamed(await guilty.settled, 2)

    assert [await beside.settled, await within.settled] == [None, None]
    assert_right(beside, 5, HOLD, 6)
    assert_right(within, 9)
    # With the others, with the others again, alone, and alone again since it looks like a kill.
    assert await restarts(rig) == 4


@pytest.mark.parametrize(
    ("poison", "reason"), [(EXIT, "died"), (SEGFAULT, "died"), (LOSE_DEVICE, "device")]
)
async def test_every_way_to_end_the_process(rigs: Rigs, poison: int, reason: str) -> None:
    """However it ends, the guilty request fails and the next ones are served."""
    rig = rigs(slots=1)

    assert_blamed(await send(rig, 5, poison).settled, 1)

    assert await restarts(rig, reason) == 3


async def test_who_is_suspected_runs_alone() -> None:
    """Law: at the death that a row is blamed for, no other batch was on the device."""
    model = MortalModel()
    rig = make_rig(model, slots=2, policy=make_policy(max_batch_size=1), patience=AT_ONCE)
    beside = send(rig, model.HOLD)
    await asyncio.to_thread(model.held.get, timeout=LONG_S)
    guilty, waiting = send(rig, model.KILL), [send(rig, n) for n in range(1, 9)]
    # The one that is held has a buffer; who waits to be alone has the other, and keeps it.
    while not (len(model.beside) == 2 and rig.engine._buffers.n_free == 0):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    model.permits.release()

    assert_blamed(await guilty.settled, 0)

    assert [await request.settled for request in (beside, *waiting)] == [None] * 9
    assert model.beside == [1, 1, 0]
    await rig.close()
    assert rig.idle


async def test_a_row_that_never_ends(rigs: Rigs) -> None:
    """A process that stops in a batch is killed when its time is over; so the row is found."""
    rig = rigs(slots=1, patience=Patience(hang_limit_s=SHORT_S, first_pause_s=0.0))

    assert_blamed(await send(rig, 5, FREEZE).settled, 1)

    assert await restarts(rig, "hung") == 3


async def test_a_text_that_ended_the_process_is_refused_at_once(rigs: Rigs) -> None:
    """Sent again, alone or among others, or waiting already, it costs no process."""
    rig = rigs(slots=1, rows=1)
    # Rows of one bucket go in the order in which they came, one a batch.
    first, waiting = send(rig, EXIT), send(rig, 5, EXIT)
    assert_blamed(await first.settled, 0)

    errors = [await waiting.settled, await send(rig, 5, 6, EXIT).settled]

    for index, error in enumerate(errors, 1):
        assert isinstance(error, InferenceFailed)
        assert f"input[{index}] ended the model's process a short time ago" in error.message
    assert await restarts(rig) == 3


async def test_a_guilty_text_is_found_though_its_client_left(rigs: Rigs, tmp_path: Path) -> None:
    """Whoever sends it with little time, again and again, ends the process three times only."""
    rig = rigs(slots=1)
    os.mkfifo(tmp_path / SLOW)
    impatient = send(rig, EXIT)
    with await loading(tmp_path):
        rig.engine.abandon(impatient)
        (tmp_path / SLOW).unlink()
    after = send(rig, 5)
    assert await after.settled is None

    again = await send(rig, EXIT).settled

    assert isinstance(again, InferenceFailed)
    assert "a short time ago" in again.message
    assert await restarts(rig) == 3


async def test_a_killed_process_is_nobodys_fault(rigs: Rigs, tmp_path: Path) -> None:
    """kill -9 in the middle of a batch, and of its second try, and while one of its rows is alone.

    They are computed by the next process.
    """
    os.mkfifo(tmp_path / HELD)
    rig = rigs()
    request = send(rig, 5, HOLD)
    for last in (False, False, True):
        await held(tmp_path)
        (process,) = processes()
        if not last:
            os.mkfifo(tmp_path / HELD)
        process.kill()

    assert await request.settled is None
    assert_right(request, 5, HOLD)
    assert await restarts(rig) == 3


async def test_a_stopped_process_is_replaced(rigs: Rigs) -> None:
    """SIGSTOP while it is idle: the next batch takes too long, and is computed anew."""
    rig = rigs(patience=Patience(hang_limit_s=SHORT_S))
    (process,) = processes()
    process.suspend()

    request = send(rig, 5, 6)

    assert await request.settled is None
    assert_right(request, 5, 6)
    assert await restarts(rig, "hung") == 1


async def test_out_of_memory_and_failures_reach_the_engine(rigs: Rigs) -> None:
    """Batches that do not fit or fail are split as in process; the process goes on."""
    rig = rigs(rows=4 * FITS)
    (process,) = processes()
    many = [*range(1, 3 * FITS)]
    whole, broken = send(rig, *many), send(rig, 5, RAISE)

    assert await whole.settled is None
    assert isinstance(await broken.settled, InferenceFailed)

    assert_right(whole, *many)
    assert processes() == [process]


@pytest.mark.parametrize("seed", range(2))
async def test_everybody_is_answered_once_whatever_dies(rigs: Rigs, seed: int) -> None:
    """Law: under poison, kills, deadlines and leavers every request settles once, rightly."""
    rng = random.Random(seed)
    rig = rigs()
    poison = rng.choice([KILL, SEGFAULT, LOSE_DEVICE])
    sent: list[tuple[Request, list[int]]] = []
    settled: list[asyncio.Future[RequestError | None]] = []
    for n in range(60):
        first_ids = [rng.randint(1, 800_000) for _ in range(rng.randint(1, 5))]
        if n in (10, 30):
            first_ids[-1] = poison
        request = send(rig, *first_ids, timeout_s=0.0 if rng.random() < 0.1 else LONG_S)
        request.settled.add_done_callback(settled.append)
        sent.append((request, first_ids))
        if n == 20:
            for process in processes():
                process.kill()
        if rng.random() < 0.2:
            rig.engine.abandon(rng.choice(sent)[0])
        await asyncio.sleep(0)

    errors = await asyncio.gather(*(request.settled for request, _ in sent))

    await asyncio.sleep(0)
    assert sorted(map(id, settled)) == sorted(id(request.settled) for request, _ in sent)
    for (request, first_ids), error in zip(sent, errors, strict=True):
        if error is None:
            assert_right(request, *first_ids)
        else:
            assert not isinstance(error, InferenceFailed) or poison in first_ids
    assert rig.engine.admission.sequences == rig.engine.admission.tokens == 0


# --- meanwhile -----------------------------------------------------------------------------------


async def test_an_idle_death_is_noticed_and_mended(rigs: Rigs, tmp_path: Path) -> None:
    """Nobody has to send anything; the state says what goes on, and requests wait for its end."""
    rig = rigs()
    os.mkfifo(tmp_path / SLOW)
    (process,) = processes()
    process.kill()
    with await loading(tmp_path):
        assert rig.engine.state == "restarting"
        assert rig.value("embedsvc_model_up") == 0
        request = send(rig, 5)

    assert await request.settled is None
    assert_right(request, 5)
    assert rig.value("embedsvc_model_up") == 1


async def test_deadlines_are_answered_while_the_model_is_away(rigs: Rigs, tmp_path: Path) -> None:
    """Nobody waits for a model longer than for anything else; what is left is served later."""
    rig = rigs(slots=1)
    os.mkfifo(tmp_path / SLOW)
    in_flight, patient = send(rig, KILL, timeout_s=SHORT_S), send(rig, 5)
    with await loading(tmp_path):
        waiting = send(rig, 6, timeout_s=0.01)

        errors = [await waiting.settled, await in_flight.settled]

        assert [type(error) for error in errors] == [DeadlineExceeded, DeadlineExceeded]
        (tmp_path / SLOW).unlink()
    assert await patient.settled is None
    assert_right(patient, 5)


def admit(engine: Engine, left_s: float) -> None:
    """Ask for room for a short text."""
    engine.withdraw(engine.admit(1, LENGTH, Priority.INTERACTIVE, left_s))


async def test_who_cannot_wait_for_the_model_is_told_when_to_come(
    rigs: Rigs, tmp_path: Path
) -> None:
    """Admitted is who has time for loading and computing; others get 503 and a time."""
    rig = rigs()
    rig.engine.model.load_s = load_s = 20.0
    admit(rig.engine, left_s=1.0)
    os.mkfifo(tmp_path / SLOW)
    (process,) = processes()
    process.kill()
    with await loading(tmp_path):
        admit(rig.engine, left_s=60.0)
        with pytest.raises(NotReady) as refused:
            admit(rig.engine, left_s=1.0)

    assert refused.value.retry_after_s == pytest.approx(load_s, abs=4.0)
    assert "restarting" in refused.value.message


async def test_a_model_that_cannot_be_loaded_is_tried_for_ever(rigs: Rigs, tmp_path: Path) -> None:
    """Its queue stays, new requests are refused; once it loads, all is well."""
    rig = rigs(patience=Patience(first_pause_s=0.05))
    (tmp_path / CORRUPT).touch()
    request = send(rig, KILL, 5)
    await loaded_in_vain(rig)
    with pytest.raises(NotReady):
        admit(rig.engine, left_s=600.0)
    waiting = send(rig, 6)

    (tmp_path / CORRUPT).unlink()

    assert await waiting.settled is None
    assert_blamed(await request.settled, 0)
    admit(rig.engine, left_s=600.0)


async def test_stopping_does_not_wait_for_a_model(rigs: Rigs, tmp_path: Path) -> None:
    """Who still waits is told; the process that was loading is gone."""
    rig = rigs()
    os.mkfifo(tmp_path / SLOW)
    (process,) = processes()
    process.kill()
    with await loading(tmp_path):
        request = send(rig, 5)

        await rig.engine.stop(drain_timeout_s=0.0)

    assert isinstance(await request.settled, NotReady)
    assert processes() == []


async def test_stopping_does_not_wait_for_a_pause(rigs: Rigs, tmp_path: Path) -> None:
    """Nor for the next try."""
    rig = rigs(patience=Patience(first_pause_s=3600.0, max_pause_s=3600.0))
    (tmp_path / CORRUPT).touch()
    request = send(rig, KILL)
    await loaded_in_vain(rig)

    await rig.engine.stop(drain_timeout_s=0.0)

    assert isinstance(await request.settled, NotReady)


def test_the_default_patience() -> None:
    """A batch has ten seconds, a long one twenty times what is predicted."""
    assert PATIENCE.batch_limit_s(0.1) == 10.0
    assert PATIENCE.batch_limit_s(3.0) == 60.0
