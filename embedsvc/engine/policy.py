"""Which waiting sequences go next: one order, one pure choice.

Knows no thread, no clock, no device: the scheduler thread and the simulator both only call it, and
only one thread may. Three questions, answered in turn by `Policy.next`:

*Who leads?* Of the key that has had least by weight, the row with the least fair-queueing tag,
unless a row has waited longer than the age cap at the head of its request (oldest first) or its
deadline is near (earliest deadline first). Neither age nor haste takes another key's share.

*Who rides along?* Rows wait in length buckets. Each turn the whole queue is split into groups of
neighbouring buckets so that the predicted cost of serving it all is least; the leader's group goes,
and free rows are filled where riding is cheaper than a batch of their own.

*When?* At once, unless a delay is allowed and waiting is predicted to be cheaper per row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

from embedsvc.engine.buckets import Buckets, Limits, padded_width
from embedsvc.engine.correction import Corrected, Correction, width_class
from embedsvc.engine.cost import CostModel
from embedsvc.engine.lane import Lane
from embedsvc.engine.sequence import Batch, Request, Sequence
from embedsvc.engine.waiting import Waiting

# A queue head is urgent when its deadline is nearer than this many predicted batches.
URGENT_BATCHES = 2.0


class Policy:
    """The waiting sequences and the choice of the next batch."""

    def __init__(self, edges: Seq[int], cost: CostModel, limits: Limits) -> None:
        self.buckets = Buckets(edges, cost, limits)
        self.cost = cost
        self.limits = limits
        self._p95: Seq[float] = Correction().p95
        self._waiting = Waiting(edges, cost)
        self._arrival_gap_s = inf
        self._last_arrival = -inf

    @property
    def n_waiting(self) -> int:
        """Rows that wait."""
        return self._waiting.n_rows

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that wait."""
        return self._waiting.n_tokens

    # --- arrivals and departures ---------------------------------------------------------------

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue the rows of one request."""
        self._waiting.add(sequences, now)
        self._note_arrival(len(sequences), now)

    def discard(self, request: Request) -> None:
        """Drop every waiting row of a request."""
        self._waiting.discard(request)

    def shrink(self, rows: int, length: int) -> None:
        """Allow half of `rows` in batches at least `length` wide; grows back with full batches."""
        self.buckets.shrink(rows, length)

    def correct(self, corrected: Corrected) -> None:
        """Expect batches to take longer than predicted by other factors from now on."""
        self._p95 = corrected.p95

    def set_edges(self, edges: Seq[int]) -> None:
        """Use other bucket edges from now on; no waiting row loses its place."""
        buckets = Buckets(edges, self.cost, self.limits)
        buckets.inherit(self.buckets)
        self._waiting.rebucket(edges)
        self.buckets = buckets

    def _note_arrival(self, n_rows: int, now: float) -> None:
        gap = (now - self._last_arrival) / n_rows
        self._last_arrival = now
        # Ten arrivals of memory: long enough to be steady, short enough to follow a burst.
        known = self._arrival_gap_s
        self._arrival_gap_s = gap if known == inf else 0.9 * known + 0.1 * gap

    # --- the choice ----------------------------------------------------------------------------

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose the next batch, or say when to ask again.

        Args:
            now: monotonic seconds.
            free_slots: device slots free now, the one this batch takes included; at least 1.

        Returns:
            A batch of rows that left the queue, or the time to ask again (`inf`: when a row comes).
        """
        self._waiting.expire(now)
        lane = self._waiting.next_lane()
        if lane is None:
            return inf
        leader = self._leader(lane, now)
        low, high = self._group(leader.bucket)
        wait_until = self._worth_waiting(leader, low, high, now)
        if wait_until > now:
            return wait_until
        rows = self._pick(leader, low, high, self._share(low, high, free_slots))
        self._waiting.advance(rows, now)
        self.buckets.recover(len(rows), max(row.bucket for row in rows))
        width = padded_width(max(row.length for row in rows), self.limits.max_length)
        return Batch(rows, width, self.cost(len(rows), width))

    def _leader(self, lane: Lane, now: float) -> Sequence:
        """Return the row that the next batch is made around.

        Source: a batch starts at the latest at its nearest deadline less its time, as in L. Chen et
        al., "Symphony: optimized DNN model serving using deferred batch scheduling", 2023.
        """
        oldest, since = lane.oldest_head()
        if now - since > self.limits.max_age_s:
            return oldest
        urgent = lane.nearest_deadline()
        rows, row_s = self.buckets.rows[urgent.bucket], self.buckets.row_s[urgent.bucket]
        p95 = self._p95[width_class(self.buckets.edges[urgent.bucket])]
        batch_s = p95 * self.cost.batch(rows, row_s)
        if now + URGENT_BATCHES * batch_s >= urgent.request.deadline:
            return urgent
        return lane.least_tag()

    def _group(self, leader_bucket: int) -> tuple[int, int]:
        """Return the first and last bucket of the leader's group in the cheapest partition.

        `best[j]` is the least cost of serving all buckets up to the j-th; the last group of that
        prefix starts at `start[j]`. `alone[j]` is the price of the prefix's rows without that of
        their batches: once a group is dearer than another even after rows at that price, it stays
        so however wide it gets. O(n²) in the number n of buckets that hold rows, mostly near O(n).

        Source: the batch partition of TurboTransformers (Fang et al., PPoPP 2021), on buckets
        instead of single rows.
        """
        held = [b for b, count in enumerate(self._waiting.counts) if count]
        counts = [self._waiting.counts[b] for b in held]
        best, alone, start = [0.0], [0.0], [0]
        c0, floor = self.cost.c0, self.cost.floor
        for j, top in enumerate(held):
            cap, per_row = self.buckets.rows[top], self.buckets.row_s[top]
            least, least_i, rows = inf, j, 0
            for i in range(j, -1, -1):
                rows += counts[i]
                rows_s = per_row * rows
                if alone[i] + rows_s >= least:
                    break
                batches = -(-rows // cap)
                # `CostModel.batch`, for this many of them.
                group_s = c0 * batches + rows_s
                price = best[i] + (group_s if group_s > floor * batches else floor * batches)
                if price < least:
                    least, least_i = price, i
            best.append(least)
            alone.append(alone[j] + per_row * counts[j])
            start.append(least_i)
        j = len(held)
        while held[start[j]] > leader_bucket:
            j = start[j]
        return held[start[j]], held[j - 1]

    def _worth_waiting(self, leader: Sequence, low: int, high: int, now: float) -> float:
        """Return until when a free device should wait for more rows; `now` means go.

        Source: the wait follows from measured arrivals and batch times, as in A. Ali et al.,
        "BATCH: machine learning inference serving on serverless platforms with adaptive batching",
        SC 2020.
        """
        delay = self.limits.max_batch_delay_s
        due = leader.request.arrival + delay
        rows = sum(self._waiting.counts[low : high + 1])
        if delay <= 0 or now >= due or rows >= self.buckets.rows[high]:
            return now
        width, left = self.buckets.edges[high], due - now
        expected = rows + left / self._arrival_gap_s if self._arrival_gap_s > 0 else inf
        row_s = self.cost.row(width)
        late = left / expected + self.cost.share(expected, row_s)
        soon = self.cost.share(rows, row_s)
        return due if late < soon else now

    def _share(self, low: int, high: int, free_slots: int) -> int:
        """Return how many rows of the group to take: not all where another free slot gets nothing.

        Two half batches at once finish sooner than one whole, unless the price of a batch itself
        weighs more than its rows.
        """
        rows = sum(self._waiting.counts[low : high + 1])
        if free_slots < 2 or rows < self.n_waiting:
            return rows
        row_s = self.buckets.row_s[high]
        # Where rows are free, one batch takes them all.
        worth_a_batch = max(1.0, 2 * self.cost.batch(0, row_s) / row_s) if row_s > 0 else inf
        parts = max(1, min(free_slots, int(rows / worth_a_batch)))
        return -(-rows // parts)

    def _pick(self, leader: Sequence, low: int, high: int, n_rows: int) -> list[Sequence]:
        """Take the leader and rows of its group, nearest buckets first, by tag in each."""
        whole = n_rows >= sum(self._waiting.counts[low : high + 1])
        self._waiting.lead(leader)
        rows, top = [leader], leader.bucket
        for bucket in sorted(range(low, high + 1), key=lambda b: abs(b - leader.bucket)):
            room = min(n_rows, self.buckets.rows[max(top, bucket)]) - len(rows)
            taken = self._waiting.take(bucket, room, self.buckets.batch_s)
            rows.extend(taken)
            if taken:
                top = max(top, bucket)
        if whole:
            self._fill(rows, low, top)
        return rows

    def _fill(self, rows: list[Sequence], low: int, top: int) -> None:
        """Let whole shorter buckets ride where that costs less than a batch of their own."""
        top_s = self.buckets.row_s[top]
        for bucket in range(low - 1, -1, -1):
            count = self._waiting.counts[bucket]
            if not count:
                continue
            if count > self.buckets.rows[top] - len(rows):
                return
            own = self.cost.batch(count, self.buckets.row_s[bucket])
            with_them = self.cost.batch(len(rows) + count, top_s)
            if with_them - self.cost.batch(len(rows), top_s) > own:
                return
            rows.extend(self._waiting.take(bucket, count, self.buckets.batch_s))
