"""The laws of one key's waiting rows: deadlines, and what is kept of requests that are gone."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from embedsvc.engine.cost import DEFAULT_COST
from embedsvc.engine.lane import Lane
from embedsvc.engine.sequence import Request, Sequence
from tests.fakes import make_request

# What happens, to how many requests, and the time of those that arrive. Those that wait go as
# batches take them, for good or to be added again, or are discarded; those that pass do not wait.
steps_of_a_lane = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "pass", "take", "again", "discard", "wait"]),
        st.integers(1, 100),
        st.sampled_from([5.0, 60.0, 600.0]),
    ),
    max_size=30,
)


def take(lane: Lane, rows: Iterable[Sequence], now: float) -> None:
    """Take rows out as a batch does."""
    taken = list(rows)
    for row in taken:
        lane.leave(row)
    lane.advance({row.request: None for row in taken}, now)


def assert_within_the_law(lane: Lane, live: dict[Request, list[Sequence]], now: float) -> None:
    """Check the nearest deadline, and how many requests are held."""
    nearest = min((request.deadline for request in live), default=None)
    expired = lane.expired(now)

    assert len(lane._deadlines) <= 2 * len(live) + 64
    if nearest is None or nearest > now:
        assert expired is None
    else:
        assert expired is not None
        assert expired.deadline == nearest
    if live:
        head = lane.nearest_deadline()
        assert head is live[head.request][0]
        assert head.request.deadline == nearest


@given(steps_of_a_lane, st.randoms(use_true_random=False))
def test_the_gone_are_few_and_the_nearest_deadline_is_known(
    steps: list[tuple[str, int, float]], random: Random
) -> None:
    """Law: entries are at most twice the live ones and 64, whatever comes and goes."""
    lane, now, live = Lane([128]), 0.0, dict[Request, list[Sequence]]()
    for name, n, timeout_s in steps:
        if name == "wait":
            now += n
        elif name in ("arrive", "pass"):
            for _ in range(n):
                request, rows = make_request([20] * 2, deadline=now + timeout_s)
                lane.add(rows, DEFAULT_COST, now)
                if name == "arrive":
                    live[request] = rows
                else:
                    take(lane, rows, now)
        else:
            for request in random.sample(list(live), min(n, len(live))):
                rows = live.pop(request)
                if name == "discard":
                    lane.discard(request)
                else:
                    take(lane, rows, now)
                if name == "again":
                    lane.add(rows, DEFAULT_COST, now)
                    live[request] = rows

        assert_within_the_law(lane, live, now)


def test_one_that_waits_keeps_nothing_of_those_that_come_and_go_behind_it() -> None:
    """Its deadline is the nearest, so that theirs never come to the top."""
    lane = Lane([128])
    first, rows = make_request([20], deadline=1.0)
    lane.add(rows, DEFAULT_COST, 0.0)
    for _ in range(300):
        _, others = make_request([20], deadline=600.0)
        lane.add(others, DEFAULT_COST, 0.0)
        take(lane, others, 0.0)

        assert_within_the_law(lane, {first: rows}, 0.0)


def test_equal_deadlines_keep_their_order() -> None:
    """Who came first is urgent first, also once most of those between have gone."""
    lane = Lane([128])
    requests = [make_request([20], deadline=9.0) for _ in range(300)]
    for _, rows in requests:
        lane.add(rows, DEFAULT_COST, 0.0)
    for number, (request, _) in enumerate(requests):
        if number % 10:
            lane.discard(request)
    order = []
    while (expired := lane.expired(9.0)) is not None:
        order.append(expired)
        lane.discard(expired)

    assert order == [request for request, _ in requests[::10]]
