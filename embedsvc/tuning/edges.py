"""The best bucket edges for a distribution of lengths and a cost model.

Knows nothing of queues or threads; pure functions on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedsvc.engine.buckets import MAX_EDGES, WIDTH_STEP, Limits
from embedsvc.engine.cost import CostModel, Floats
from embedsvc.tuning.histogram import Counts

# Longer models have more multiples of 8 than can be tried; the long tail is sampled.
MAX_CANDIDATES = 256


@dataclass(slots=True, frozen=True)
class Traffic:
    """What the edges are for.

    Attributes:
        counts: `(max_length + 1,)` weight of each length.
        rate: texts per second; `inf` where every bucket always fills.
        window_s: how long rows of a bucket gather before they leave, in seconds.
        static_shapes: batches are padded to the edge, not to their longest row.
    """

    counts: Counts
    rate: float = float("inf")
    window_s: float = 0.1
    static_shapes: bool = False


def candidates(max_length: int) -> list[int]:
    """Return the possible edges: multiples of 8 up to the maximum, the tail sampled where many."""
    steps = range(WIDTH_STEP, max_length, WIDTH_STEP)
    if len(steps) < MAX_CANDIDATES:
        return [*steps, max_length]
    fine = MAX_CANDIDATES // 2
    tail = np.geomspace(steps[fine], max_length, MAX_CANDIDATES - fine)
    return sorted({*steps[:fine], *(int(x) // WIDTH_STEP * WIDTH_STEP for x in tail), max_length})


def best_edges(
    traffic: Traffic, cost: CostModel, limits: Limits, max_edges: int = MAX_EDGES
) -> list[int]:
    """Return the edges of least predicted cost, at most `max_edges`, the maximum the last.

    Where one more edge saves nothing, it is left out. O(max_edges · m²) for m candidates.

    Source: optimal one-dimensional partition by dynamic programming, as W. D. Fisher, "On grouping
    for maximum homogeneity", JASA 1958.
    """
    tops = candidates(limits.max_length)
    prices = bucket_prices(traffic, cost, limits, tops)
    m = len(tops)
    best = np.full((max_edges + 1, m + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((max_edges + 1, m + 1), int)
    for k in range(1, max_edges + 1):
        totals = best[k - 1, :m, None] + prices
        origin[k, 1:] = totals.argmin(axis=0)
        best[k, 1:] = totals.min(axis=0)
    k = int(best[:, m].argmin())
    edges, j = [], m
    while j > 0:
        edges.append(tops[j - 1])
        j, k = int(origin[k, j]), k - 1
    return edges[::-1]


def predicted_cost(
    edges: Sequence[int], traffic: Traffic, cost: CostModel, limits: Limits
) -> float:
    """Return the predicted slot seconds of all texts of the traffic with these edges."""
    prices = bucket_prices(traffic, cost, limits, list(edges))
    return float(np.trace(prices))


def bucket_prices(traffic: Traffic, cost: CostModel, limits: Limits, tops: Sequence[int]) -> Floats:
    """Return `(m, m)`: slot seconds of one bucket from after candidate i-1 up to candidate j.

    Entry (i, j) is infinite for i > j. A bucket holds `b` rows when it goes: what its limits allow,
    or what arrives in the window. It is priced at the longest of `b` rows drawn from it (or at its
    edge), and pays a batch for every `b` rows: a bucket that cannot fill is dear.

    Source: what a bucket more saves against what its rows wait longer for each other, as in
    O. Guldogan et al., "Multi-bin batching for increasing LLM inference throughput", 2024.
    """
    m = len(tops)
    prices = np.full((m, m), np.inf)
    ends, counts = _by_width(traffic.counts, tops)
    widths = np.minimum(-(-ends // WIDTH_STEP) * WIDTH_STEP, limits.max_length)
    up_to = np.concatenate([[0.0], np.cumsum(counts)])
    bounds = np.searchsorted(ends, [0, *tops], side="right")
    most_rows = np.array([float(limits.rows(top)) for top in tops])
    for i, start in enumerate(bounds[:-1]):
        totals = up_to[bounds[i + 1 :]] - up_to[start]
        held = np.where(totals > 0, totals, 1.0)
        arrive = traffic.rate * traffic.window_s * held / up_to[-1]
        rows = np.minimum(most_rows[i:], np.maximum(1.0, arrive))
        if traffic.static_shapes:
            row_s = cost.shares(rows, np.array(tops[i:]))
        else:
            # P(longest of b <= l) = P(one <= l)^b; by logarithms, which are a vector each.
            one = np.log(up_to[start + 1 :] - up_to[start]) - np.log(held)[:, None]
            longest = np.diff(np.exp(np.minimum(rows[:, None] * one, 0.0)), axis=1, prepend=0.0)
            row_s = (longest * cost.shares(rows[:, None], widths[start:])).sum(axis=1)
        prices[i, i:] = totals * row_s
    return prices


def _by_width(counts: Counts, tops: Sequence[int]) -> tuple[npt.NDArray[np.int64], Counts]:
    """Group lengths that are in the same bucket and padded to the same width, whatever the edges.

    Returns:
        The last length of each group that has texts, and its texts.
    """
    longest = len(counts) - 1
    ends = np.union1d(np.arange(WIDTH_STEP, longest, WIDTH_STEP), [*tops, longest])
    texts = np.add.reduceat(counts, np.concatenate([[1], ends[:-1] + 1]))
    return ends[texts > 0], texts[texts > 0]
