"""Slots of a device that several workers share: the order of grants, what a death gives back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.slots import SharedSlots
from embedsvc.supervisor.devices import SharedDevices
from embedsvc.supervisor.grants import Answer, Grants

LONG_S = 10.0


def granted(answers: list[Answer[str]]) -> list[str]:
    """Return who got a slot."""
    return [answer.who for answer in answers if answer.granted]


# --- the rule ------------------------------------------------------------------------------------


def test_slots_are_granted_in_the_order_of_asking() -> None:
    """At once while there are some, then as they come back."""
    grants = Grants[str](2)

    assert [granted(grants.want(who)) for who in "abcd"] == [["a"], ["b"], [], []]
    assert granted(grants.release("b")) == ["c"]
    assert granted(grants.release("a")) == ["d"]


def test_an_answer_says_what_is_free_and_who_contends() -> None:
    """Those who wait are counted too, each once."""
    grants = Grants[str](3)
    first, second = grants.want("a"), grants.want("a")
    third, fourth = grants.want("b"), grants.want("c")

    assert first == [Answer("a", granted=True, free=2, contenders=1)]
    assert second == [Answer("a", granted=True, free=1, contenders=1)]
    assert third == [Answer("b", granted=True, free=0, contenders=2)]
    assert fourth == []
    assert grants.release("a") == [Answer("c", granted=True, free=0, contenders=3)]


def test_a_wish_that_is_taken_back_is_answered_once() -> None:
    """As granted where that came first, or else as taken back."""
    grants = Grants[str](1)
    grants.want("a")
    too_late = grants.cancel("a")
    grants.want("b")
    in_time = grants.cancel("b")

    assert too_late == []
    assert in_time == [Answer("b", granted=False, free=0, contenders=1)]
    assert grants.release("a") == []


def test_who_leaves_gives_all_slots_back_and_wants_none() -> None:
    """The next in the row get them at once."""
    grants = Grants[str](2)
    for who in "aaabc":
        grants.want(who)

    assert granted(grants.leave("a")) == ["b", "c"]
    assert grants.leave("nobody") == []


def test_who_wants_all_slots_waits_for_them_and_holds_up_those_behind() -> None:
    """So that it is not overtaken for ever."""
    grants = Grants[str](2)
    grants.want("a")
    all_of_them = grants.want_all("b")
    behind = grants.want("c")

    assert (all_of_them, behind) == ([], [])
    assert granted(grants.release("a")) == ["b"]
    assert granted(grants.release("b")) == ["c"]


def test_those_behind_go_on_when_a_wish_for_all_is_taken_back() -> None:
    """Or when who had it is gone."""
    grants = Grants[str](2)
    grants.want("a")
    grants.want_all("b")
    grants.want("c")

    assert granted(grants.cancel("b")) == ["c"]


@given(
    n_slots=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["want", "want_all", "cancel", "release", "leave"]),
            st.sampled_from("abc"),
        )
    ),
)
def test_no_slot_is_lost_or_had_twice(n_slots: int, steps: list[tuple[str, str]]) -> None:
    """Law: never more slots are held than there are; who comes first waits only for slots that
    are held; every wish is answered once, unless who had it leaves."""
    grants = Grants[str](n_slots)
    held = dict.fromkeys("abc", 0)
    wanting: dict[str, int] = {}
    for step, who in steps:
        if step.startswith("want"):
            if who in wanting or (step == "want_all" and held[who]):
                continue
            wanting[who] = n_slots if step == "want_all" else 1
        elif step == "release":
            if not held[who]:
                continue
            held[who] -= 1
        elif step == "leave":
            wanting.pop(who, None)
            held[who] = 0
        for answer in getattr(grants, step)(who):
            n = wanting.pop(answer.who)
            held[answer.who] += n if answer.granted else 0

        assert sum(held.values()) <= n_slots
        assert not wanting or n_slots - sum(held.values()) < next(iter(wanting.values()))


# --- over sockets --------------------------------------------------------------------------------


class Workers:
    """Workers that share a device; their ends of the sockets are in this process."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._devices = SharedDevices()
        self._ends: list[socket.socket] = []

    def join(self) -> SharedSlots:
        """Return what one more worker sees."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._devices.open("cpu", self.n_slots, ours)
        self._ends.append(theirs)
        return SharedSlots(self.n_slots, theirs)

    def die(self, number: int) -> None:
        """Let the kernel close a worker's end."""
        self._ends[number].close()


@pytest.fixture
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    """Yield workers that share as many slots as the parameter says; at the end all are gone."""
    workers = Workers(getattr(request, "param", 1))
    yield workers
    for number in range(len(workers._ends)):
        workers.die(number)
    # Lets the other ends be closed.
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def acquire(slots: SharedSlots, timeout_s: float = LONG_S) -> bool:
    """Acquire on a thread, as a scheduler does."""
    return await asyncio.to_thread(slots.acquire, timeout_s)


async def test_a_slot_goes_from_worker_to_worker(workers: Workers) -> None:
    """Who waits gets it when it is given back; shares tell that there are others."""
    one, other = workers.join(), workers.join()
    assert await acquire(one)
    alone = one.share
    waiting = asyncio.create_task(acquire(other))
    assert not await acquire(one, 0.05)
    one.release()
    assert await waiting

    assert (alone, other.share) == (1, 1)
    assert (one.busy, other.busy, other.free) == (0, 1, 0)
    assert not await acquire(one, 0.05)


async def test_contenders_can_count_on_equal_shares(workers: Workers) -> None:
    """While they have or want slots; who is idle would have all of them."""
    one, other = workers.join(), workers.join()
    assert await acquire(one)
    waiting = asyncio.create_task(acquire(other))
    while not other._wishing.locked():  # noqa: ASYNC110  # the thread tells nobody
        await asyncio.sleep(0)
    again = asyncio.create_task(acquire(one))
    one.release()
    assert await waiting
    other.release()
    assert await again

    assert one.share in (0.5, 1)
    one.release()
    assert one.share == 1


async def test_a_wish_that_nobody_waits_for_takes_no_slot(workers: Workers) -> None:
    """The next one in the row gets it."""
    one, other = workers.join(), workers.join()
    assert await acquire(one)
    assert not await acquire(other, 0.0)
    one.release()

    assert await acquire(one)


async def test_a_dead_workers_slot_is_free_again(workers: Workers) -> None:
    """For whoever waits for it."""
    one, other = workers.join(), workers.join()
    assert await acquire(one)
    waiting = asyncio.create_task(acquire(other))
    workers.die(0)

    assert await waiting


@pytest.mark.parametrize("workers", [1, 3], indirect=True)
async def test_a_batch_that_must_be_alone_has_the_device_alone(workers: Workers) -> None:
    """It waits for the batches of others, and they for it; two such do not wait for ever."""
    one, other = workers.join(), workers.join()

    def alone(slots: SharedSlots) -> int:
        assert slots.acquire(LONG_S)
        with slots.alone():
            had = slots.busy
            slots.release()
        return had

    had = await asyncio.gather(*(asyncio.to_thread(alone, slots) for slots in (one, other)))

    assert had == [workers.n_slots] * 2
    assert (one.busy, other.busy) == (0, 0)
    assert [await acquire(one) for _ in range(workers.n_slots)] == [True] * workers.n_slots
