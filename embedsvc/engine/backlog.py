"""The work of open requests by key and priority, and when a newcomer beside it would be done.

Bookkeeping of the event loop. Mirrors the order of `Policy`, in which keys share the device by
weight and requests of a key by priority, as a fluid: without lengths and batches.

Source: refused on arrival is what is predicted to end late, as in A. Gujarati et al., "Serving DNNs
like clockwork", OSDI 2020.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

from embedsvc.engine.sequence import NO_KEY, Key, Priority, Request

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK
# Seconds to come back after that every client obeys.
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# The refused are told to come as if everything took so much longer than predicted: who comes late
# finds a queue that is still deep, who comes early is refused again.
RETRY_MARGIN = 1.1
# Promises fall due in steps of so many seconds.
STEP_S = 0.25


@dataclass(slots=True, eq=False)
class Claim:
    """Room and time of a request that is admitted and not yet submitted: it is being tokenized.

    Attributes:
        key: whom it counts for.
        priority: its share class.
        rows: texts it holds room for.
        tokens: their tokens, estimated.
        width_class: of the mean text.
        open_s: predicted slot seconds, not corrected.
    """

    key: Key
    priority: Priority
    rows: int
    tokens: int
    width_class: int
    open_s: float


class _Work:
    """What a key has open, and what it was told to bring again.

    Attributes:
        open_s: slot seconds of open requests by priority and width class, not corrected.
        n_open: how many requests that are, by priority.
        promised_s: slot seconds that were refused and will come back, by priority.
        n_promised: how many requests that are.
    """

    def __init__(self, n_classes: int) -> None:
        self.open_s = {priority: [0.0] * n_classes for priority in Priority}
        self.n_open = dict.fromkeys(Priority, 0)
        self.promised_s = dict.fromkeys(Priority, 0.0)
        self.n_promised = dict.fromkeys(Priority, 0)


class Backlog:
    """Open requests, and those that were refused until they are due to come back.

    Args:
        factors: what predicted seconds are multiplied by to be those of batches now, by width
            class; read at each question.
        slots: that can be counted on; read at each question.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        factors: Sequence[float],
        slots: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._factors = factors
        self._slots = slots
        self._clock = clock
        self._work = defaultdict[Key, _Work](lambda: _Work(len(factors)))
        # Promises by the step in which they fall due.
        self._due: list[int] = []
        self._promises: dict[int, list[tuple[Key, Priority, float]]] = {}

    # --- open requests ---------------------------------------------------------------------------

    def enter(self, request: Request | Claim) -> None:
        """Take in the open seconds of a request."""
        work = self._work[request.key]
        work.n_open[request.priority] += 1
        work.open_s[request.priority][request.width_class] += request.open_s

    def release(self, request: Request | Claim, seconds: float) -> None:
        """Take out some of a request's seconds."""
        by_class = self._work[request.key].open_s[request.priority]
        by_class[request.width_class] = max(0.0, by_class[request.width_class] - seconds)

    def close(self, request: Request | Claim) -> None:
        """Take out a request that has nothing open."""
        work = self._work[request.key]
        work.n_open[request.priority] -= 1
        if not work.n_open[request.priority]:
            # What rounding left.
            work.open_s[request.priority] = [0.0] * len(self._factors)
        self._forget_idle(request.key)

    @property
    def total_s(self) -> float:
        """Seconds until all of it is done, as batches are now."""
        return (
            sum(sum(self._pending(work).values()) for work in self._work.values()) / self._slots()
        )

    # --- newcomers -------------------------------------------------------------------------------

    def finish_s(self, slot_s: float, priority: Priority, key: Key = NO_KEY) -> float:
        """Return the seconds until a new request would be done.

        Args:
            slot_s: its own slot seconds.
            priority: its share class.
            key: whom it counts for.
        """
        return self._finish_s(slot_s, priority, key, promised=False)

    def invite(self, slot_s: float, priority: Priority, key: Key, room_s: float) -> float:
        """Return after how many seconds a refused request may come back, and expect it then.

        It is told when it would be done within `room_s`, those refused before it included, so that
        those who come when told find room instead of all at once finding it taken.

        Args:
            slot_s: its own slot seconds.
            priority: its share class.
            key: whom it counts for.
            room_s: seconds in which it must be predicted to be done.
        """
        now = self._clock()
        self._forget_due(now)
        wait_s = RETRY_MARGIN * self._finish_s(slot_s, priority, key, promised=True) - room_s
        told_s = min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
        work = self._work[key]
        work.promised_s[priority] += slot_s
        work.n_promised[priority] += 1
        step = int((now + told_s) / STEP_S) + 1
        if step not in self._promises:
            self._promises[step] = []
            heapq.heappush(self._due, step)
        self._promises[step].append((key, priority, slot_s))
        return told_s

    def _finish_s(self, slot_s: float, priority: Priority, key: Key, *, promised: bool) -> float:
        """Return the seconds until a new request would be done.

        In a key bulk waits for everything, while an interactive request shares with the bulk
        requests by weight, so they take no more than their share before it is done. Nor do other
        keys.
        """
        ahead = {INTERACTIVE: 0.0, BULK: 0.0}
        n_bulk, n_interactive = 0, 1
        if key in self._work:
            work = self._work[key]
            ahead = self._pending(work, promised=promised)
            n_bulk += work.n_open[BULK] + promised * work.n_promised[BULK]
            n_interactive += work.n_open[INTERACTIVE] + promised * work.n_promised[INTERACTIVE]
        ahead[priority] += slot_s
        if priority is INTERACTIVE:
            share = float(BULK) * n_bulk / (INTERACTIVE * n_interactive)
            ahead[BULK] = min(ahead[BULK], share * ahead[INTERACTIVE])
        # Seconds by weight, as the queue charges them to a key.
        charged_s = sum(seconds / priority for priority, seconds in ahead.items()) / key.weight
        others_s = sum(
            _served_s(other, self._pending(work, promised=promised), charged_s)
            for other, work in self._work.items()
            if other != key
        )
        return (sum(ahead.values()) + others_s) / self._slots()

    def _pending(self, work: _Work, *, promised: bool = False) -> dict[Priority, float]:
        """Return the slot seconds of a key by priority, as batches are now; interactive first."""
        pending = {INTERACTIVE: 0.0, BULK: 0.0}
        for priority in pending:
            if work.n_open[priority]:
                pending[priority] = sum(map(mul, work.open_s[priority], self._factors))
            if promised:
                pending[priority] += work.promised_s[priority]
        return pending

    def _forget_due(self, now: float) -> None:
        while self._due and self._due[0] * STEP_S <= now:
            for key, priority, slot_s in self._promises.pop(heapq.heappop(self._due)):
                work = self._work[key]
                work.n_promised[priority] -= 1
                work.promised_s[priority] -= slot_s
                if not work.n_promised[priority]:
                    work.promised_s[priority] = 0.0
                self._forget_idle(key)

    def _forget_idle(self, key: Key) -> None:
        work = self._work[key]
        if not any(work.n_open.values()) and not any(work.n_promised.values()):
            del self._work[key]


def _served_s(key: Key, pending: dict[Priority, float], charged_s: float) -> float:
    """Return the slot seconds that a key gets at most while another is charged some by weight."""
    served_s = 0.0
    for priority, pending_s in pending.items():
        weight = key.weight * priority
        seconds = min(pending_s, charged_s * weight)
        charged_s -= seconds / weight
        served_s += seconds
    return served_s
