"""Batching rules of other servers, to compare the policy with in simulated time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from math import inf

from embedsvc.engine.buckets import Limits, padded_width
from embedsvc.engine.sequence import Batch, Sequence


class Fifo:
    """First in, first out, whatever the lengths; up to some rows and padded tokens.

    `rows=8` is Text Embeddings Inference on a CPU, `rows=inf` with a token budget the same on a
    GPU, `rows=1` no batching.

    Args:
        limits: of a batch.
        max_rows: rows of a batch.
    """

    def __init__(self, limits: Limits, max_rows: int) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._queue: deque[Sequence] = deque()

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue rows."""
        self._queue.extend(sequences)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Take the oldest rows at once."""
        rows: list[Sequence] = []
        width = 0
        while self._queue and len(rows) < self._max_rows:
            wider = max(width, padded_width(self._queue[0].length, self._limits.max_length))
            if rows and wider * (len(rows) + 1) > self._limits.max_batch_tokens:
                break
            width = wider
            rows.append(self._queue.popleft())
        return Batch(rows, width, 0.0) if rows else inf


class SortedWindow:
    """The oldest rows of several batches, sorted by length and cut into batches (Infinity).

    Args:
        limits: of a batch; only its maximum length is used.
        max_rows: rows of a batch.
        n_batches: batches in the window.
    """

    def __init__(self, limits: Limits, max_rows: int = 32, n_batches: int = 8) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._window = max_rows * n_batches
        self._queue: deque[Sequence] = deque()
        self._sorted: deque[Sequence] = deque()

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue rows."""
        self._queue.extend(sequences)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Take the next batch of the window; sort a new one when it is used up."""
        if not self._sorted:
            taken = [self._queue.popleft() for _ in range(min(self._window, len(self._queue)))]
            self._sorted.extend(sorted(taken, key=lambda row: row.length))
        rows = [self._sorted.popleft() for _ in range(min(self._max_rows, len(self._sorted)))]
        if not rows:
            return inf
        longest = max(row.length for row in rows)
        return Batch(rows, padded_width(longest, self._limits.max_length), 0.0)


class SizeOrTimeout:
    """Fixed buckets, each sent when it is full or its oldest row has waited: the classic race.

    Args:
        limits: of a batch; only its maximum length is used.
        edges: ascending bucket edges in tokens.
        max_rows: rows that send a bucket.
        timeout_s: wait that sends a bucket.
    """

    def __init__(self, limits: Limits, edges: Seq[int], max_rows: int, timeout_s: float) -> None:
        self._limits = limits
        self._buckets = [(edge, deque[Sequence]()) for edge in edges]
        self._max_rows = max_rows
        self._timeout_s = timeout_s

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue rows in the first bucket that takes them."""
        for row in sequences:
            next(queue for edge, queue in self._buckets if row.length <= edge).append(row)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Send a full bucket, else the one that waited longest beyond the time-out."""
        held = [queue for _, queue in self._buckets if queue]
        if not held:
            return inf
        oldest = min(held, key=lambda queue: queue[0].request.arrival)
        full = [queue for queue in held if len(queue) >= self._max_rows]
        due = oldest[0].request.arrival + self._timeout_s
        if not full and now < due:
            return due
        queue = min(full, key=lambda q: q[0].request.arrival) if full else oldest
        rows = [queue.popleft() for _ in range(min(self._max_rows, len(queue)))]
        width = padded_width(max(row.length for row in rows), self._limits.max_length)
        return Batch(rows, width, 0.0)
