"""Which waiting sequences go next: one order, one pure choice.

Knows no thread, no clock, no device: the scheduler thread and the simulator both only call it, and
only one thread may. Three questions, answered in turn by `Policy.next`:

*Who leads?* The row with the least fair-queueing tag, unless a row has waited longer than the age
cap at the head of its request (oldest first) or its deadline is near (earliest deadline first).

*Who rides along?* Rows wait in length buckets. Each turn the whole queue is split into groups of
neighbouring buckets so that the predicted cost of serving it all is least; the leader's group goes,
and free rows are filled where riding is cheaper than a batch of their own.

*When?* At once, unless a delay is allowed and waiting is predicted to be cheaper per row.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

from embedsvc.engine.cost import CostModel
from embedsvc.engine.sequence import Batch, Request, Sequence

WIDTH_STEP = 8
# A queue head is urgent when its deadline is nearer than this many predicted batches.
URGENT_BATCHES = 2.0
# 95th percentile of measured over predicted batch time, until it is learned online.
P95_FACTOR = 1.25


@dataclass(slots=True, frozen=True)
class Limits:
    """Bounds of one batch.

    Attributes:
        max_length: tokens of the longest sequence; the last bucket edge.
        max_batch_tokens: padded tokens; a single row is always legal.
        max_batch_size: rows.
        max_batch_delay_s: longest wait of a free device for more rows.
        max_age_s: wait after which the head of a request is in the next batch.
    """

    max_length: int
    max_batch_tokens: int
    max_batch_size: int
    max_batch_delay_s: float = 0.0
    max_age_s: float = 5.0

    def rows(self, length: int) -> int:
        """Return the most rows a batch padded to `length` may have."""
        return max(1, min(self.max_batch_size, self.max_batch_tokens // length))


def padded_width(longest: int, max_length: int) -> int:
    """Return the tokens a batch is padded to: its longest row rounded up to 8, within limits."""
    return min(-(-longest // WIDTH_STEP) * WIDTH_STEP, max_length)


def half_powers_of_two(max_length: int) -> list[int]:
    """Return ascending bucket edges 8, 16, 24, 32, 48, 64, 96, … up to `max_length` tokens."""
    powers = (padded_width(round(2 ** (step / 2)), max_length) for step in range(6, 64))
    return sorted({edge for edge in powers if edge < max_length} | {max_length})


class Policy:
    """The waiting sequences and the choice of the next batch."""

    def __init__(self, edges: Seq[int], cost: CostModel, limits: Limits) -> None:
        if list(edges) != sorted(set(edges)) or edges[-1] != limits.max_length:
            raise ValueError(f"edges must ascend to {limits.max_length}, got {list(edges)}")
        self.edges = list(edges)
        self.cost = cost
        self.limits = limits
        self.n_waiting = 0
        self.waiting_tokens = 0
        self._counts = [0] * len(edges)
        # One heap of (tag, order, sequence) per bucket. A row that left otherwise stays in it
        # with `waiting` false and is skipped.
        self._queues: list[list[tuple[float, int, Sequence]]] = [[] for _ in edges]
        self._order = itertools.count()
        self._virtual_time = 0.0
        # Rows of each request in their order; the first waiting one is its head. The dict itself is
        # ordered by how long the heads have been heads.
        self._flows: dict[Request, deque[Sequence]] = {}
        self._head_since: dict[Request, float] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrival_gap_s = inf
        self._last_arrival = -inf
        widths = [padded_width(edge, limits.max_length) for edge in edges]
        self._width_cost = [cost.row(width) for width in widths]
        self._width_rows = [limits.rows(width) for width in widths]

    # --- arrivals and departures ---------------------------------------------------------------

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue the rows of one request.

        A row's tag is the finish time of its flow in a fluid server that shares itself by weight.

        Source: S. J. Golestani, "A self-clocked fair queueing scheme for broadband applications",
        INFOCOM 1994.
        """
        request = sequences[0].request
        tag = max(self._virtual_time, request.last_tag)
        weight = float(request.priority)
        for sequence in sequences:
            tag += self.cost.row(sequence.length) / weight
            sequence.tag = tag
            sequence.bucket = bisect_left(self.edges, sequence.length)
            sequence.waiting = True
            self._counts[sequence.bucket] += 1
            self.waiting_tokens += sequence.length
            heapq.heappush(self._queues[sequence.bucket], (tag, next(self._order), sequence))
        request.last_tag = tag
        self.n_waiting += len(sequences)
        if request not in self._flows:
            self._flows[request] = deque()
            self._head_since[request] = now
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), request))
        self._flows[request].extend(sequences)
        self._note_arrival(len(sequences), now)

    def discard(self, request: Request) -> None:
        """Drop every waiting row of a request."""
        for sequence in self._flows.pop(request, ()):
            if sequence.waiting:
                self._leave(sequence)
        self._head_since.pop(request, None)

    def oldest_s(self, now: float) -> float:
        """Return how long the longest waiting head has been one, in seconds."""
        for since in self._head_since.values():
            return now - since
        return 0.0

    def _leave(self, sequence: Sequence) -> None:
        sequence.waiting = False
        self._counts[sequence.bucket] -= 1
        self.n_waiting -= 1
        self.waiting_tokens -= sequence.length
        queue = self._queues[sequence.bucket]
        if len(queue) > 64 and len(queue) > 2 * self._counts[sequence.bucket]:
            queue[:] = [entry for entry in queue if entry[2].waiting]
            heapq.heapify(queue)

    def _note_arrival(self, n_rows: int, now: float) -> None:
        gap = (now - self._last_arrival) / n_rows
        self._last_arrival = now
        # Ten arrivals of memory: long enough to be steady, short enough to follow a burst.
        self._arrival_gap_s = (
            gap if self._arrival_gap_s == inf else (0.9 * self._arrival_gap_s + 0.1 * gap)
        )

    # --- the choice ----------------------------------------------------------------------------

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose the next batch, or say when to ask again.

        Args:
            now: monotonic seconds.
            free_slots: device slots free now, the one this batch takes included; at least 1.

        Returns:
            A batch of rows that left the queue, or the time to ask again (`inf`: when a row comes).
        """
        self._expire(now)
        leader = self._leader(now)
        if leader is None:
            return inf
        low, high = self._group(leader.bucket)
        wait_until = self._worth_waiting(leader, low, high, now)
        if wait_until > now:
            return wait_until
        n_rows = self._share(low, high, free_slots)
        rows = self._pick(leader, low, high, n_rows)
        self._virtual_time = max(self._virtual_time, leader.tag)
        for row in rows:
            self._leave(row)
        self._advance_heads(rows, now)
        width = padded_width(max(row.length for row in rows), self.limits.max_length)
        return Batch(rows, width, self.cost(len(rows), width))

    def _expire(self, now: float) -> None:
        while self._deadlines:
            deadline, _, request = self._deadlines[0]
            if request in self._flows and deadline > now:
                return
            heapq.heappop(self._deadlines)
            self.discard(request)

    def _leader(self, now: float) -> Sequence | None:
        for request, since in self._head_since.items():
            if now - since > self.limits.max_age_s:
                return self._flows[request][0]
            break
        if self._deadlines:
            deadline, _, request = self._deadlines[0]
            head = self._flows[request][0]
            width = self.edges[head.bucket]
            batch_s = P95_FACTOR * self.cost(self._width_rows[head.bucket], width)
            if now + URGENT_BATCHES * batch_s >= deadline:
                return head
        return self._least_tag()

    def _least_tag(self) -> Sequence | None:
        least: tuple[float, int, Sequence] | None = None
        for bucket, queue in enumerate(self._queues):
            if not self._counts[bucket]:
                continue
            while not queue[0][2].waiting:
                heapq.heappop(queue)
            if least is None or queue[0] < least:
                least = queue[0]
        return None if least is None else least[2]

    def _group(self, leader_bucket: int) -> tuple[int, int]:
        """Return the first and last bucket of the leader's group in the cheapest partition.

        `best[j]` is the least cost of serving all buckets up to the j-th; the last group of that
        prefix starts at `start[j]`. O(n²) in the number of buckets that hold rows.

        Source: the batch partition of TurboTransformers (Fang et al., PPoPP 2021), on buckets
        instead of single rows.
        """
        held = [b for b, count in enumerate(self._counts) if count]
        best, start = [0.0], [0]
        c0 = self.cost.c0
        for j, top in enumerate(held):
            cap, per_row = self._width_rows[top], self._width_cost[top]
            least, least_i, rows = inf, j, 0
            for i in range(j, -1, -1):
                rows += self._counts[held[i]]
                price = best[i] + c0 * -(-rows // cap) + per_row * rows
                if price < least:
                    least, least_i = price, i
            best.append(least)
            start.append(least_i)
        j = len(held)
        while held[start[j]] > leader_bucket:
            j = start[j]
        return held[start[j]], held[j - 1]

    def _worth_waiting(self, leader: Sequence, low: int, high: int, now: float) -> float:
        """Return until when a free device should wait for more rows; `now` means go."""
        delay = self.limits.max_batch_delay_s
        due = leader.request.arrival + delay
        rows = sum(self._counts[low : high + 1])
        if delay <= 0 or now >= due or rows >= self._width_rows[high]:
            return now
        width, left = self.edges[high], due - now
        expected = rows + left / self._arrival_gap_s if self._arrival_gap_s > 0 else inf
        late = (left + self.cost.c0) / expected + self.cost.row(width)
        soon = self.cost.c0 / rows + self.cost.row(width)
        return due if late < soon else now

    def _share(self, low: int, high: int, free_slots: int) -> int:
        """Return how many rows of the group to take: not all where another free slot gets nothing.

        Two half batches at once finish sooner than one whole, unless the price of a batch itself
        weighs more than its rows.
        """
        rows = sum(self._counts[low : high + 1])
        if free_slots < 2 or rows < self.n_waiting:
            return rows
        worth_a_batch = max(1.0, 2 * self.cost.c0 / self._width_cost[high])
        parts = max(1, min(free_slots, int(rows / worth_a_batch)))
        return -(-rows // parts)

    def _pick(self, leader: Sequence, low: int, high: int, n_rows: int) -> list[Sequence]:
        """Take the leader and rows of its group, nearest buckets first, by tag in each."""
        rows, top = [leader], leader.bucket
        leader.waiting = False
        for bucket in sorted(range(low, high + 1), key=lambda b: abs(b - leader.bucket)):
            room = min(n_rows, self._width_rows[max(top, bucket)]) - len(rows)
            taken = self._take(bucket, room)
            rows.extend(taken)
            if taken:
                top = max(top, bucket)
        if n_rows >= sum(self._counts[low : high + 1]):
            self._fill(rows, low, top)
        return rows

    def _fill(self, rows: list[Sequence], low: int, top: int) -> None:
        """Let whole shorter buckets ride where that costs less than a batch of their own."""
        for bucket in range(low - 1, -1, -1):
            count = self._counts[bucket]
            if not count:
                continue
            if count > self._width_rows[top] - len(rows):
                return
            own = self.cost.c0 + count * self._width_cost[bucket]
            if count * self._width_cost[top] > own:
                return
            rows.extend(self._take(bucket, count))

    def _take(self, bucket: int, n: int) -> list[Sequence]:
        queue, taken = self._queues[bucket], list[Sequence]()
        while queue and len(taken) < n:
            sequence = heapq.heappop(queue)[2]
            if sequence.waiting:
                sequence.waiting = False
                taken.append(sequence)
        return taken

    def _advance_heads(self, rows: list[Sequence], now: float) -> None:
        """Restart the age of every request whose head left; forget requests without rows."""
        for request in {row.request for row in rows}:
            flow = self._flows[request]
            head_left = not flow[0].waiting
            while flow and not flow[0].waiting:
                flow.popleft()
            if not flow:
                del self._flows[request], self._head_since[request]
            elif head_left:
                del self._head_since[request]
                self._head_since[request] = now
