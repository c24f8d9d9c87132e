"""The waiting rows: length buckets, each in fair-queueing order, with every request's head.

Bookkeeping for `Policy`; decides nothing. One thread only.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf

from embedsvc.engine.cost import CostModel
from embedsvc.engine.sequence import Request, Sequence


class Waiting:
    """Rows by bucket, requests by deadline and by the age of their heads.

    Args:
        edges: ascending upper edges of the buckets in tokens.

    Attributes:
        n_rows: rows that wait.
        n_tokens: their tokens.
        counts: rows by bucket.
    """

    def __init__(self, edges: Seq[int]) -> None:
        self.edges = list(edges)
        self.n_rows = 0
        self.n_tokens = 0
        self.counts = [0] * len(edges)
        # One heap of (tag, order, sequence) per bucket. A row that left otherwise stays in it
        # with `waiting` false and is skipped.
        self._queues: list[list[tuple[float, int, Sequence]]] = [[] for _ in edges]
        self._order = itertools.count()
        # Rows of each request in their order; the first one waits and is its head.
        self._flows: dict[Request, deque[Sequence]] = {}
        # Ordered by how long the heads have been heads.
        self._head_since: dict[Request, float] = {}
        self._deadlines: list[tuple[float, int, Request]] = []

    def add(
        self, sequences: Seq[Sequence], virtual_time: float, cost: CostModel, now: float
    ) -> None:
        """Queue the rows of one request, in their order.

        A row's tag is the finish time of its flow in a fluid server that shares itself by weight.

        Source: S. J. Golestani, "A self-clocked fair queueing scheme for broadband applications",
        INFOCOM 1994.
        """
        request = sequences[0].request
        tag = max(virtual_time, request.last_tag)
        weight = float(request.priority)
        for sequence in sequences:
            tag += cost.row(sequence.length) / weight
            sequence.tag = tag
            sequence.bucket = bisect_left(self.edges, sequence.length)
            sequence.waiting = True
            self.counts[sequence.bucket] += 1
            self.n_tokens += sequence.length
            heapq.heappush(self._queues[sequence.bucket], (tag, next(self._order), sequence))
        request.last_tag = tag
        self.n_rows += len(sequences)
        if request not in self._flows:
            self._flows[request] = deque()
            self._head_since[request] = now
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), request))
        self._flows[request].extend(sequences)

    def discard(self, request: Request) -> None:
        """Drop every waiting row of a request."""
        for sequence in self._flows.pop(request, ()):
            if sequence.waiting:
                self._leave(sequence)
        self._head_since.pop(request, None)

    def remove(self, rows: Iterable[Sequence], now: float) -> None:
        """Let rows go to the device; the heads of their requests move on, younger again."""
        requests = set()
        for row in rows:
            self._leave(row)
            requests.add(row.request)
        for request in requests:
            self._advance(request, now)

    def expire(self, now: float) -> None:
        """Drop the rows of every request whose deadline has passed."""
        while self._deadlines:
            deadline, _, request = self._deadlines[0]
            if request in self._flows and deadline > now:
                return
            heapq.heappop(self._deadlines)
            self.discard(request)

    def nearest_deadline(self) -> Sequence | None:
        """Return the head of the request with the nearest deadline, after `expire`."""
        return self._flows[self._deadlines[0][2]][0] if self._deadlines else None

    def oldest_head(self) -> tuple[Sequence | None, float]:
        """Return the head that has been one for longest, and since when."""
        for request, since in self._head_since.items():
            return self._flows[request][0], since
        return None, inf

    def least_tag(self) -> Sequence | None:
        """Return the first row in fair-queueing order."""
        least: tuple[float, int, Sequence] | None = None
        for queue, count in zip(self._queues, self.counts, strict=True):
            if not count:
                continue
            while not queue[0][2].waiting:
                heapq.heappop(queue)
            if least is None or queue[0] < least:
                least = queue[0]
        return None if least is None else least[2]

    def take(self, bucket: int, n: int) -> list[Sequence]:
        """Take up to n rows of a bucket by tag; they are still to be removed."""
        queue, taken = self._queues[bucket], list[Sequence]()
        while queue and len(taken) < n:
            sequence = heapq.heappop(queue)[2]
            if sequence.waiting:
                sequence.waiting = False
                taken.append(sequence)
        return taken

    def rebucket(self, edges: Seq[int]) -> None:
        """Sort the waiting rows into other buckets; places and ages stay."""
        rows = [entry for queue in self._queues for entry in queue if entry[2].waiting]
        self.edges = list(edges)
        self.counts = [0] * len(edges)
        self._queues = [[] for _ in edges]
        for entry in sorted(rows):
            row = entry[2]
            row.bucket = bisect_left(self.edges, row.length)
            self.counts[row.bucket] += 1
            self._queues[row.bucket].append(entry)

    def _leave(self, sequence: Sequence) -> None:
        sequence.waiting = False
        self.counts[sequence.bucket] -= 1
        self.n_rows -= 1
        self.n_tokens -= sequence.length
        queue = self._queues[sequence.bucket]
        if len(queue) > 64 and len(queue) > 2 * self.counts[sequence.bucket]:
            queue[:] = [entry for entry in queue if entry[2].waiting]
            heapq.heapify(queue)

    def _advance(self, request: Request, now: float) -> None:
        """Restart the age of a request whose head left; forget one without rows."""
        flow = self._flows[request]
        if flow[0].waiting:
            return
        while flow and not flow[0].waiting:
            flow.popleft()
        del self._head_since[request]
        if flow:
            self._head_since[request] = now
        else:
            del self._flows[request]
