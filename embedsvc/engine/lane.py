"""The waiting rows of one key: length buckets, each in fair-queueing order, and request heads.

Bookkeeping for `Waiting`; decides nothing and knows of no other key. One thread only.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from embedsvc.engine.cost import CostModel
from embedsvc.engine.sequence import Request, Sequence


class Lane:
    """Rows by bucket, requests by deadline and by the age of their heads.

    Args:
        edges: ascending upper edges of the buckets in tokens.

    Attributes:
        place: what this key was served by weight, in seconds of the virtual time between keys.
        virtual_time: the same between its requests: the tag of the last row that led a batch.
        n_rows: rows that wait.
        counts: rows by bucket.
    """

    def __init__(self, edges: Seq[int]) -> None:
        self.place = 0.0
        self.virtual_time = 0.0
        self.n_rows = 0
        self.counts = [0] * len(edges)
        self._edges = list(edges)
        # One heap of (tag, order, sequence) per bucket. A row that left otherwise stays in it
        # with `waiting` false and is skipped.
        self._queues: list[list[tuple[float, int, Sequence]]] = [[] for _ in edges]
        self._order = itertools.count()
        # Rows of each request in their order; the first one waits and is its head.
        self._flows: dict[Request, deque[Sequence]] = {}
        # Ordered by how long the heads have been heads.
        self._head_since: dict[Request, float] = {}
        self._deadlines: list[tuple[float, int, Request]] = []

    def add(self, sequences: Seq[Sequence], cost: CostModel, now: float) -> None:
        """Queue the rows of one request, in their order.

        A row's tag is the finish time of its flow in a fluid server that shares itself by weight.

        Source: S. J. Golestani, "A self-clocked fair queueing scheme for broadband applications",
        INFOCOM 1994.
        """
        request = sequences[0].request
        tag = max(self.virtual_time, request.last_tag)
        weight = float(request.priority)
        for sequence in sequences:
            seconds = cost.row(sequence.length) / weight
            tag += seconds
            sequence.tag = tag
            sequence.share_s = seconds / request.key.weight
            sequence.bucket = bisect_left(self._edges, sequence.length)
            sequence.waiting = True
            self.counts[sequence.bucket] += 1
            heapq.heappush(self._queues[sequence.bucket], (tag, next(self._order), sequence))
        request.last_tag = tag
        self.n_rows += len(sequences)
        if request not in self._flows:
            self._flows[request] = deque()
            self._head_since[request] = now
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), request))
        self._flows[request].extend(sequences)

    def discard(self, request: Request) -> list[Sequence]:
        """Drop a request; return its rows that waited."""
        rows = [sequence for sequence in self._flows.pop(request, ()) if sequence.waiting]
        for row in rows:
            self.leave(row)
        self._head_since.pop(request, None)
        self._forget_gone()
        return rows

    def expired(self, now: float) -> Request | None:
        """Return a request whose deadline has passed, if one waits."""
        while self._deadlines:
            deadline, _, request = self._deadlines[0]
            if request in self._flows:
                return request if deadline <= now else None
            heapq.heappop(self._deadlines)
        return None

    # What follows asks a lane that holds rows.

    def nearest_deadline(self) -> Sequence:
        """Return the head of the request with the nearest deadline, after `expired`."""
        return self._flows[self._deadlines[0][2]][0]

    def oldest_head(self) -> tuple[Sequence, float]:
        """Return the head that has been one for longest, and since when."""
        request, since = next(iter(self._head_since.items()))
        return self._flows[request][0], since

    def least_tag(self) -> Sequence:
        """Return the first row in fair-queueing order."""
        return min(self._entry(bucket) for bucket, n in enumerate(self.counts) if n)[2]

    def first(self, bucket: int) -> Sequence:
        """Return the first row of a bucket that holds some."""
        return self._entry(bucket)[2]

    def leave(self, row: Sequence) -> None:
        """Let a row go; heaps forget it once it is first, or once such rows are most of them."""
        row.waiting = False
        self.counts[row.bucket] -= 1
        self.n_rows -= 1
        queue = self._queues[row.bucket]
        if len(queue) > 64 and len(queue) > 2 * self.counts[row.bucket]:
            queue[:] = [entry for entry in queue if entry[2].waiting]
            heapq.heapify(queue)

    def advance(self, requests: Iterable[Request], now: float) -> None:
        """Move on the heads of requests that had rows taken, younger again."""
        for request in requests:
            flow = self._flows[request]
            if flow[0].waiting:
                continue
            while flow and not flow[0].waiting:
                flow.popleft()
            del self._head_since[request]
            if flow:
                self._head_since[request] = now
            else:
                del self._flows[request]
        self._forget_gone()

    def rebucket(self, edges: Seq[int]) -> None:
        """Sort the rows into other buckets; places and ages stay."""
        rows = [entry for queue in self._queues for entry in queue if entry[2].waiting]
        self._edges = list(edges)
        self.counts = [0] * len(edges)
        self._queues = [[] for _ in edges]
        for entry in sorted(rows):
            row = entry[2]
            row.bucket = bisect_left(self._edges, row.length)
            self.counts[row.bucket] += 1
            self._queues[row.bucket].append(entry)

    def _forget_gone(self) -> None:
        """Let the requests that are gone, and their vectors, go once they are most of the heap.

        They would stay for as long as one with a nearer deadline waits.
        """
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * len(self._flows):
            self._deadlines = [(r.deadline, next(self._order), r) for r in self._flows]
            heapq.heapify(self._deadlines)

    def _entry(self, bucket: int) -> tuple[float, int, Sequence]:
        queue = self._queues[bucket]
        while not queue[0][2].waiting:
            heapq.heappop(queue)
        return queue[0]
