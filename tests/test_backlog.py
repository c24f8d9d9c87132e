"""Who is done when beside what is open, and that the refused find room when they come as told."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import pytest

from embedsvc.engine.backlog import RETRY_MARGIN, STEP_S, Backlog
from embedsvc.engine.cost import CostModel
from embedsvc.engine.sequence import NO_KEY, Batch, Key, Priority, Request
from embedsvc.errors import DeadlineExceeded, Overloaded
from tests.fakes import make_policy, make_request, make_rig

BULK, INTERACTIVE = Priority.BULK, Priority.INTERACTIVE
# Ten times as long as a small model takes, so that fewer requests are many seconds.
COST = CostModel(67e-3, 6e-3, 1.16e-3, 0.002e-3)
SLOTS = 2
BURST_S = 30.0
ONE, EQUAL, THREE = Key("one", 1.0), Key("equal", 1.0), Key("three", 3.0)


# --- when a newcomer would be done ---------------------------------------------------------------


def backlog_of(*open_: tuple[Key, Priority, float], slots: int = 1) -> Backlog:
    """Return a backlog of requests of some seconds."""
    backlog = Backlog([1.0], lambda: slots, lambda: 0.0)
    for key, priority, seconds in open_:
        request, _ = make_request([1], priority=priority, key=key)
        request.open_s = seconds
        backlog.enter(request)
    return backlog


@pytest.mark.parametrize(
    ("open_", "priority", "finish_s"),
    [
        ([], BULK, 2.0),
        # Of the same key: bulk waits for everything, the interactive for their share.
        ([(ONE, BULK, 90.0)], BULK, 92.0),
        ([(ONE, BULK, 90.0)], INTERACTIVE, 2.0 + 2.0 / 8),
        ([(ONE, BULK, 90.0)] * 4, INTERACTIVE, 2.0 + 4 * 2.0 / 8),
        ([(ONE, INTERACTIVE, 90.0)], INTERACTIVE, 92.0),
        # Of other keys: never more than their share, nor more than they have.
        ([(EQUAL, BULK, 90.0)], BULK, 4.0),
        ([(EQUAL, BULK, 0.5)], BULK, 2.5),
        ([(EQUAL, BULK, 90.0)], INTERACTIVE, 2.0 + 2.0 / 8),
        ([(EQUAL, INTERACTIVE, 90.0)], INTERACTIVE, 4.0),
        ([(EQUAL, INTERACTIVE, 90.0)] * 9, INTERACTIVE, 4.0),
        ([(THREE, BULK, 90.0)], BULK, 8.0),
        ([(EQUAL, BULK, 90.0), (THREE, BULK, 90.0)], BULK, 10.0),
        ([(EQUAL, INTERACTIVE, 8.0), (EQUAL, BULK, 90.0)], BULK, 2.0 + 8.0 + 1.0),
    ],
)
def test_a_newcomer_waits_for_its_key_and_for_the_share_of_others(
    open_: list[tuple[Key, Priority, float]], priority: Priority, finish_s: float
) -> None:
    """The predicted end of two seconds of work beside what is open."""
    for slots in (1, 2):
        found = backlog_of(*open_, slots=slots).finish_s(2.0, priority, ONE)

        assert found == pytest.approx(finish_s / slots)


def test_a_time_to_come_back_is_one_that_clients_obey() -> None:
    """Never under a second, never over a minute; each behind those refused before."""
    backlog = backlog_of((ONE, BULK, 100.0))

    told = [backlog.invite(10.0, BULK, ONE, room_s=100.0) for _ in range(9)]

    assert told[0] == pytest.approx(RETRY_MARGIN * 110 - 100)
    assert told[1] == pytest.approx(RETRY_MARGIN * 120 - 100)
    assert told[-1] == 60.0
    assert backlog.invite(0.1, INTERACTIVE, EQUAL, room_s=100.0) == 1.0


def test_promises_end_when_they_fall_due() -> None:
    """A server that has caught up sends nobody away for long, and keeps nothing."""
    now = [0.0]
    backlog = Backlog([1.0], lambda: 1, lambda: now[0])
    for _ in range(100):
        last = backlog.invite(1.0, BULK, ONE, room_s=0.0)
    now[0] = last + STEP_S

    assert backlog.invite(0.5, BULK, EQUAL, room_s=0.0) == 1.0
    assert list(backlog._work) == [EQUAL]


# --- admission, queue and device -----------------------------------------------------------------


class Site:
    """An engine without its threads: admission, queue and device in virtual time.

    Args:
        slower: seconds of a batch over its predicted seconds.
        max_sequences: that may be queued.
    """

    def __init__(self, slower: float, max_sequences: int) -> None:
        self.now = 0.0
        self.n_late = 0
        self.rig = make_rig(
            policy=make_policy(cost=COST),
            slots=SLOTS,
            clock=lambda: self.now,
            max_queue_sequences=max_sequences,
            start=False,
        )
        self._slower = slower
        self._order = itertools.count()
        self._running: list[tuple[float, int, float, Batch]] = []
        self._deadlines: list[tuple[float, int, Request]] = []

    def ask(
        self,
        lengths: list[int],
        priority: Priority = INTERACTIVE,
        key: Key = NO_KEY,
        timeout_s: float = 60.0,
    ) -> float | None:
        """Send a request; return when it may come back where it is refused."""
        engine = self.rig.engine
        try:
            claim = engine.admit(len(lengths), sum(lengths), priority, timeout_s, key)
        except Overloaded as refusal:
            return self.now + (refusal.retry_after_s or 0.0)
        deadline = self.now + timeout_s
        request, rows = make_request(
            lengths, deadline=deadline, arrival=self.now, priority=priority, key=key
        )
        request.settled = asyncio.get_running_loop().create_future()
        engine.confirm(claim, sum(lengths))
        engine._ledger.enter(request, rows)
        engine.policy.add(rows, self.now)
        heapq.heappush(self._deadlines, (deadline, next(self._order), request))
        self._dispatch()
        return None

    def run(self, until: float) -> None:
        """Let batches begin and end up to a time."""
        while self._running and self._running[0][0] <= until:
            self.now, _, started, batch = heapq.heappop(self._running)
            self.rig.engine._ledger.settle(batch, started, self.now, {})
            self._dispatch()
        self.now = until

    def _dispatch(self) -> None:
        while len(self._running) < SLOTS:
            self._expire()
            batch = self.rig.engine.policy.next(self.now, SLOTS - len(self._running))
            if not isinstance(batch, Batch):
                return
            end = self.now + self._slower * batch.predicted_s
            heapq.heappush(self._running, (end, next(self._order), self.now, batch))

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.settled.done():
                self.n_late += 1
                self.rig.engine._ledger.close(request, DeadlineExceeded("late"))


Sites = Callable[..., Site]


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    """Open sites; see afterwards that all they admitted has come to an end."""
    opened = []

    def open_site(slower: float = 1.0, max_sequences: int = 100_000) -> Site:
        opened.append(Site(slower, max_sequences))
        return opened[-1]

    yield open_site

    for site in opened:
        site.run(site.now + 120.0)
        assert site.rig.engine.queue_s == 0
        assert site.rig.engine.admission.sequences == 0
        await site.rig.close()


@dataclass
class Asker:
    """What a client asks for, again and again."""

    lengths: list[int]
    priority: Priority = INTERACTIVE
    key: Key = NO_KEY


def seconds(site: Site, asker: Asker) -> float:
    return site.rig.engine.own_s(len(asker.lengths), sum(asker.lengths))


def come_back(site: Site, refused: list[tuple[float, Asker]]) -> float:
    """Let the refused ask once more, each when told; return the share that is admitted."""
    n_admitted = 0
    for told, asker in sorted(refused, key=lambda one: one[0]):
        site.run(told)
        n_admitted += site.ask(asker.lengths, asker.priority, asker.key) is None
    return n_admitted / len(refused)


def burst(
    site: Site, askers: Iterator[Asker], refused_s: float = BURST_S
) -> list[tuple[float, Asker]]:
    """Have clients ask at once until so many seconds of work are refused."""
    refused = []
    while refused_s > 0:
        asker = next(askers)
        told = site.ask(asker.lengths, asker.priority, asker.key)
        if told is not None:
            refused.append((told, asker))
            refused_s -= seconds(site, asker)
    return refused


def singles(rng: random.Random) -> Iterator[Asker]:
    while True:
        yield Asker([rng.randint(4, 24) if rng.random() < 0.65 else rng.randint(30, 128)])


def uploads(rng: random.Random, n: int = 40) -> Iterator[Asker]:
    while True:
        yield Asker([rng.randint(4, 128) for _ in range(n)], BULK)


def calls(rng: random.Random) -> Iterator[Asker]:
    while True:
        yield Asker([one.lengths[0] for one in islice(singles(rng), 16)])


def both(rng: random.Random) -> Iterator[Asker]:
    for single in singles(rng):
        yield single if rng.random() < 0.98 else next(uploads(rng))


KINDS = {"singles": singles, "uploads": uploads, "calls": calls, "both": both}


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.05])
@pytest.mark.parametrize("max_sequences", [100_000, 400])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_refused_are_admitted_when_they_come_back(
    sites: Sites, kind: str, max_sequences: int, slower: float
) -> None:
    """Bar: of those refused in a burst, 80 % are admitted when they come back once, as told."""
    site = sites(slower, max_sequences)
    refused = burst(site, KINDS[kind](random.Random(1)))
    share = come_back(site, refused)

    assert share >= 0.8
    assert site.n_late == 0


def of_keys(*keys: Key) -> Iterator[Asker]:
    rng = random.Random(2)
    for single in singles(rng):
        single.key = rng.choice(keys)
        yield single


async def test_the_refused_of_several_keys_are_admitted_too(sites: Sites) -> None:
    """Bar: the same where keys of other weights take their shares meanwhile."""
    site = sites()
    refused = burst(site, of_keys(ONE, THREE), refused_s=2 * BURST_S)

    assert {asker.key.name for _, asker in refused} == {"one", "three"}
    assert come_back(site, refused) >= 0.8


async def test_a_flood_of_one_key_leaves_room_for_another(sites: Sites) -> None:
    """A key is refused for what it has waiting itself, and little for what others have."""
    site = sites()
    burst(site, of_keys(ONE))
    other = Asker([20], key=EQUAL)

    assert site.ask(other.lengths, other.priority, other.key, timeout_s=1.0) is None
