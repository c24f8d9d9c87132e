"""The waiting rows of all keys: a lane for each, and how far each is ahead of the others.

Bookkeeping for `Policy`; decides which key is next and nothing else. One thread only.

Requests share the device in two steps: keys by their weights, whatever they send, and inside a key
its requests by their priorities. Without keys there is one lane, in which each request counts.

Source: J. C. R. Bennett, H. Zhang, "Hierarchical packet fair queueing algorithms", SIGCOMM 1996;
between keys P. Goyal, H. M. Vin, H. Cheng, "Start-time fair queueing", SIGCOMM 1996: rows are
charged when they leave, since which of them ride along is not known before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf

from embedsvc.engine.cost import CostModel
from embedsvc.engine.lane import Lane
from embedsvc.engine.sequence import Request, Sequence


class Waiting:
    """Lanes by key.

    Args:
        edges: ascending upper edges of the buckets in tokens.
        cost: prices the rows.

    Attributes:
        n_rows: rows that wait.
        n_tokens: their tokens.
        counts: rows by bucket.
    """

    def __init__(self, edges: Seq[int], cost: CostModel) -> None:
        self.n_rows = 0
        self.n_tokens = 0
        self.counts = [0] * len(edges)
        self._edges = list(edges)
        self._cost = cost
        self._virtual_time = 0.0
        self._lanes: dict[str, Lane] = {}

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue the rows of one request, in their order."""
        name = sequences[0].request.key.name
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(self._edges)
        if not lane.n_rows:
            # A key that was idle gets no credit for it.
            lane.place = max(lane.place, self._virtual_time)
        lane.add(sequences, self._cost, now)
        for row in sequences:
            self.counts[row.bucket] += 1
            self.n_tokens += row.length
        self.n_rows += len(sequences)

    def discard(self, request: Request) -> None:
        """Drop every waiting row of a request."""
        lane = self._lanes.get(request.key.name)
        if lane is not None:
            self._discard(lane, request)

    def expire(self, now: float) -> None:
        """Drop the rows of every request whose deadline has passed."""
        for lane in self._lanes.values():
            while (request := lane.expired(now)) is not None:
                self._discard(lane, request)

    def next_lane(self) -> Lane | None:
        """Return the lane of the key that has had least by weight, of those with rows."""
        backlogged = (lane for lane in self._lanes.values() if lane.n_rows)
        return min(backlogged, key=lambda lane: lane.place, default=None)

    def lead(self, leader: Sequence) -> None:
        """Take the row that leads the next batch; the clocks move to its places."""
        lane = self._lanes[leader.request.key.name]
        self._virtual_time = max(self._virtual_time, lane.place)
        lane.virtual_time = max(lane.virtual_time, leader.tag)
        self._leave(lane, leader)

    def take(self, bucket: int, n: int, batch_s: float) -> list[Sequence]:
        """Take up to n rows of a bucket: of the key that has had least by weight, by tag.

        A key gets no row that would bring it further ahead of another that waits, in whatever
        bucket, than one batch does: who rides along must not undo the choice of who leads.

        Args:
            bucket: index of the bucket.
            n: most rows.
            batch_s: predicted seconds of the rows of the largest batch.
        """
        lanes = list(self._lanes.values())
        behind = min((a.place for a in lanes if a.n_rows and not a.counts[bucket]), default=inf)
        holders = [(a.place, order, a) for order, a in enumerate(lanes) if a.counts[bucket]]
        heapq.heapify(holders)
        taken: list[Sequence] = []
        while holders and len(taken) < n:
            _, order, lane = holders[0]
            row = lane.first(bucket)
            if (lane.place + row.share_s - behind) * row.weight > batch_s:
                break
            self._leave(lane, row)
            taken.append(row)
            if lane.counts[bucket]:
                heapq.heapreplace(holders, (lane.place, order, lane))
            else:
                heapq.heappop(holders)
                behind = min(behind, lane.place if lane.n_rows else inf)
        return taken

    def advance(self, rows: Iterable[Sequence], now: float) -> None:
        """Move on the heads of the requests of which rows were taken, younger again."""
        requests = defaultdict[str, dict[Request, None]](dict)
        for row in rows:
            requests[row.request.key.name][row.request] = None
        for name, taken in requests.items():
            self._lanes[name].advance(taken, now)

    def rebucket(self, edges: Seq[int]) -> None:
        """Sort the waiting rows into other buckets; places and ages stay."""
        self._edges = list(edges)
        self.counts = [0] * len(edges)
        for lane in self._lanes.values():
            lane.rebucket(edges)
            self.counts = [n + more for n, more in zip(self.counts, lane.counts, strict=True)]

    def _discard(self, lane: Lane, request: Request) -> None:
        for row in lane.discard(request):
            self._forget(row)

    def _leave(self, lane: Lane, row: Sequence) -> None:
        """Take one row out, at the expense of its key."""
        lane.leave(row)
        lane.place += row.share_s
        self._forget(row)

    def _forget(self, row: Sequence) -> None:
        self.counts[row.bucket] -= 1
        self.n_rows -= 1
        self.n_tokens -= row.length
