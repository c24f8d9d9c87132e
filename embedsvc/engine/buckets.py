"""Length buckets: their edges, what a row costs in each, and how many rows fit a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from embedsvc.engine.cost import CostModel

WIDTH_STEP = 8
MAX_EDGES = 32


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


def first_edges(max_length: int) -> list[int]:
    """Return the bucket edges to start with, before any traffic was seen: as many as are allowed.

    Batches join neighbouring buckets, so fine ones cost little. Simulated on mixed lengths up to
    256 tokens with 64 clients: half powers of two reach 0.87 of the sorted order, these 0.91.
    """
    if max_length <= MAX_EDGES * WIDTH_STEP:
        return [*range(WIDTH_STEP, max_length, WIDTH_STEP), max_length]
    growth = (max_length / WIDTH_STEP) ** (1 / (MAX_EDGES - 1))
    steps = (padded_width(round(WIDTH_STEP * growth**k), max_length) for k in range(MAX_EDGES))
    return sorted({*steps, max_length})


class Buckets:
    """One set of edges and what follows from it.

    Only the scheduler thread changes it (`shrink`, `recover`); a new set is a new object, so other
    threads that hold one read it whole.

    Attributes:
        edges: ascending upper edges in tokens, the model's maximum the last.
        row_s: predicted seconds a row adds to a batch as wide as the bucket.
        full_rows: rows of a full batch.
        rows: rows of a batch that the device's memory allows now.
        batch_s: predicted seconds of the rows of the largest batch.

    Raises:
        ValueError: the edges do not ascend to the maximum.
    """

    __slots__ = ("_prices", "_widths", "batch_s", "edges", "full_rows", "row_s", "rows")

    def __init__(self, edges: Sequence[int], cost: CostModel, limits: Limits) -> None:
        if list(edges) != sorted(set(edges)) or edges[-1] != limits.max_length:
            raise ValueError(f"edges must ascend to {limits.max_length}, got {list(edges)}")
        self.edges = list(edges)
        self._widths = [padded_width(edge, limits.max_length) for edge in edges]
        self.row_s = [cost.row(width) for width in self._widths]
        self.full_rows = [limits.rows(width) for width in self._widths]
        self.rows = list(self.full_rows)
        shares = zip(self.row_s, self.full_rows, strict=True)
        self._prices = [cost.share(rows, row_s) for row_s, rows in shares]
        self.batch_s = max(map(mul, self.row_s, self.full_rows))

    def index(self, length: int) -> int:
        """Return the bucket of a text of `length` tokens."""
        return bisect_left(self.edges, length)

    def price(self, length: int) -> float:
        """Return the predicted slot seconds of a row, its share of a full batch included."""
        return self._prices[bisect_left(self.edges, length)]

    def shrink(self, rows: int, length: int) -> None:
        """Halve what may go into batches at least this wide: `rows` of them did not fit."""
        fits = max(1, rows // 2)
        for bucket, width in enumerate(self._widths):
            if width >= length:
                self.rows[bucket] = min(self.rows[bucket], fits)

    def recover(self, rows: int, bucket: int) -> None:
        """Allow one row more after a batch that filled a shrunk bucket."""
        if rows >= self.rows[bucket] < self.full_rows[bucket]:
            self.rows[bucket] += 1

    def inherit(self, former: Buckets) -> None:
        """Take over what is known of the device's memory."""
        for bucket, edge in enumerate(self.edges):
            then = former.index(edge)
            if former.rows[then] < former.full_rows[then]:
                self.rows[bucket] = min(self.rows[bucket], former.rows[then])

    @property
    def memory_share(self) -> float:
        """Least share of a full batch that memory allows now; 1 is all."""
        return min(now / full for now, full in zip(self.rows, self.full_rows, strict=True))
