"""A deadline: it passes when it must, and sets few timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import cast

from embedsvc.http.timing import Deadline


class FakeLoop:
    """A clock that stands still, and the timers set on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.n_set = 0
        self._timers: list[Timer] = []

    def time(self) -> float:
        """Return the present."""
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Set a timer."""
        self.n_set += 1
        self._timers.append(Timer(when, call))
        return self._timers[-1]

    def advance(self, to: float) -> None:
        """Let time pass, timer by timer."""
        while due := [t for t in self._timers if t.at <= to]:
            timer = min(due, key=lambda t: t.at)
            self._timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = to


class Timer:
    """One call at one time."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call

    def when(self) -> float:
        """Return the time."""
        return self.at

    def cancel(self) -> None:
        """Never call."""
        self.at = inf


def deadline_on(loop: FakeLoop) -> tuple[Deadline, list[float]]:
    """Return a deadline and the times at which it passed."""
    passed: list[float] = []
    deadline = Deadline(cast("asyncio.AbstractEventLoop", loop), lambda: passed.append(loop.time()))
    return deadline, passed


def test_it_passes_once_at_its_time() -> None:
    """And no sooner."""
    loop = FakeLoop()
    deadline, passed = deadline_on(loop)
    deadline.within(5)
    loop.advance(4.9)
    assert passed == []
    loop.advance(100)

    assert passed == [5]


def test_it_can_be_moved_both_ways_and_cleared() -> None:
    """The last word counts."""
    loop = FakeLoop()
    deadline, passed = deadline_on(loop)
    deadline.within(5)
    deadline.within(9)
    loop.advance(6)
    deadline.within(1)
    loop.advance(8)
    deadline.within(5)
    deadline.clear()
    loop.advance(20)
    deadline.within(5)
    deadline.cancel()
    loop.advance(40)

    assert passed == [7]


def test_a_busy_connection_hardly_ever_sets_a_timer() -> None:
    """Ten thousand requests in a minute, each moving the deadline twice, take one timer."""
    loop = FakeLoop()
    deadline, passed = deadline_on(loop)
    for request in range(10_000):
        loop.advance(request * 0.006)
        deadline.clear()
        deadline.within(125)

    assert loop.n_set == 1
    assert passed == []
