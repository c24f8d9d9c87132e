"""A live engine's choices, replayed: the policy decides by what it is told, and by nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import pytest

from embedsvc.engine.buckets import Limits
from embedsvc.engine.correction import Corrected
from embedsvc.engine.cost import CostModel
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Batch, Key, Priority, Request, Sequence
from embedsvc.models.buffers import HostBuffer
from tests.fakes import SmallDevice, make_rig

COST = CostModel(4e-4, 2e-5, 1e-6, 0)
LIMITS = Limits(128, 1024, 16, max_batch_delay_s=0.001, max_age_s=0.01)
KEYS = [Key("a", 1.0), Key("b", 2.5)]
EDGES = [[128], [16, 64, 128], [*range(8, 136, 8)], [100, 128]]


@dataclass
class Crowded(SmallDevice):
    """Takes as long as it costs, and has no room for large batches."""

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Take the time, then compute or refuse."""
        time.sleep(COST(rows, length))
        super().forward(buffer, rows, length)


@dataclass
class Call:
    """One call into a policy, and what it returned."""

    name: str
    arguments: tuple[Any, ...]
    outcome: Batch | float | None = None


class Recorded(Policy):
    """A policy that writes down what it is told and what it says."""

    def __init__(self) -> None:
        super().__init__(EDGES[0], COST, LIMITS)
        self.calls: list[Call] = []

    def _note(self, name: str, *arguments: Any) -> Call:
        self.calls.append(Call(name, arguments))
        return self.calls[-1]

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        self._note("add", sequences, now)
        super().add(sequences, now)

    def discard(self, request: Request) -> None:
        self._note("discard", request)
        super().discard(request)

    def shrink(self, rows: int, length: int) -> None:
        self._note("shrink", rows, length)
        super().shrink(rows, length)

    def set_edges(self, edges: Seq[int]) -> None:
        self._note("set_edges", edges)
        super().set_edges(edges)

    def correct(self, corrected: Corrected) -> None:
        self._note("correct", corrected)
        super().correct(corrected)

    def next(self, now: float, free_slots: int) -> Batch | float:
        call = self._note("next", now, free_slots)
        call.outcome = super().next(now, free_slots)
        return call.outcome


async def live(seed: int, n_requests: int = 300) -> list[Call]:
    """Serve requests on two threads: some are cancelled, some expire, batches run out of memory."""
    rng = random.Random(seed)
    policy = Recorded()
    rig = make_rig(Crowded(fits=6), slots=2, policy=policy)
    requests: dict[asyncio.Future[Any], Request] = {}
    for k in range(n_requests):
        lengths = [rng.randint(1, 128) for _ in range(rng.choice([1, 1, 1, 2, 9]))]
        request = rig.send(
            lengths,
            timeout_s=rng.choice([0.005, 60, 60, 60]),
            priority=rng.choice(list(Priority)),
            key=rng.choice(KEYS),
        )
        requests[request.settled] = request
        if k % 10 == 9:
            rig.engine.abandon(rng.choice(list(requests.values())))
        if k % 50 == 49:
            rig.engine.set_edges(EDGES[k // 50 % len(EDGES)])
        if len(requests) > 40:
            done, _ = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            for settled in done:
                del requests[settled]
    await asyncio.wait(requests)
    # Few rows after many: the device waits for more.
    for _ in range(10):
        await rig.send([8]).settled
    await rig.close()
    return policy.calls


def replay(calls: list[Call]) -> list[Call]:
    """Make the calls on a fresh policy, with rows that were in no queue; return what came of them.

    Rows and requests of the outcomes are those of the recording, so that both can be compared.
    """
    policy = Policy(EDGES[0], COST, LIMITS)
    fresh: dict[Request, Request] = {}
    recorded: dict[Sequence, Sequence] = {}
    again = []
    for call in calls:
        arguments = call.arguments
        if call.name == "add":
            rows, now = arguments
            request = replace(rows[0].request, last_tag=0.0)
            fresh[rows[0].request] = request
            copies = [replace(row, request=request, tag=0.0) for row in rows]
            recorded |= dict(zip(copies, rows, strict=True))
            arguments = copies, now
        elif call.name == "discard":
            # One that was dropped before it was queued has no copy.
            arguments = (fresh.get(*arguments, *arguments),)
        outcome = getattr(policy, call.name)(*arguments)
        if isinstance(outcome, Batch):
            outcome = replace(outcome, sequences=[recorded[row] for row in outcome.sequences])
        again.append(Call(call.name, call.arguments, outcome))
    return again


def choices(calls: list[Call]) -> list[object]:
    """Return what was chosen: times to ask again; rows, width and predicted time of batches."""
    outcomes = [call.outcome for call in calls if call.name == "next"]
    return [
        (one.sequences, one.length, one.predicted_s) if isinstance(one, Batch) else one
        for one in outcomes
    ]


@pytest.mark.parametrize("seed", range(3))
async def test_a_live_run_replayed_gives_the_same_batches(seed: int) -> None:
    """Law: recorded arrivals and slot-free times, replayed through a fresh policy, give the batches
    of the live run: the same rows in the same order, the same widths, the same waits."""
    calls = await live(seed)

    assert {"add", "discard", "shrink", "set_edges", "next"} <= {call.name for call in calls}
    assert choices(replay(calls)) == choices(calls)
