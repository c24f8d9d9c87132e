"""The padded-cost model: predicted seconds of a batch from its rows and padded length.

Knows nothing of queues, threads or devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, frozen=True)
class CostModel:
    """`T(rows, length) = c0 + c1·rows + c2·rows·length + c3·rows·length²` seconds, all c >= 0.

    c0 is the price of a batch, c1 of a row, c2 of a padded token, c3 of a pair of padded tokens in
    one row (attention).
    """

    c0: float
    c1: float
    c2: float
    c3: float

    def __call__(self, rows: int, length: int) -> float:
        """Return the predicted seconds of a batch of `rows` padded to `length` tokens."""
        return self.c0 + rows * self.row(length)

    def row(self, length: int) -> float:
        """Return the seconds one more row of `length` tokens adds to a batch."""
        return self.c1 + length * (self.c2 + self.c3 * length)


# Measured with all-MiniLM-L6-v2 in bfloat16 on one AMD Zen 4 core; used until a fit is there.
DEFAULT_COST = CostModel(c0=6.7e-3, c1=0.60e-3, c2=0.116e-3, c3=0.0002e-3)


@dataclass(slots=True, frozen=True)
class Observation:
    """One measured batch."""

    rows: int
    length: int
    seconds: float


def fit(observations: Seq[Observation]) -> CostModel:
    """Fit the cost model by least squares of the relative error, coefficients never negative.

    Four unknowns have 15 non-empty sets of free coefficients: each is solved plainly and the best
    solution without a negative coefficient wins, which is the exact non-negative optimum.

    Source: relative errors as in weighted least squares; active sets as in Lawson and Hanson,
    Solving Least Squares Problems, 1974, chapter 23.

    Raises:
        ValueError: there is no observation.
    """
    if not observations:
        raise ValueError("no observations")
    rows = np.array([o.rows for o in observations], float)
    length = np.array([o.length for o in observations], float)
    seconds = np.array([o.seconds for o in observations], float)
    design = np.stack([np.ones_like(rows), rows, rows * length, rows * length**2], axis=1)
    weighted = design / seconds[:, None]
    scale = weighted.max(axis=0)
    target = np.ones_like(seconds)
    best, best_error = np.zeros(4), float("inf")
    for n_free in range(1, 5):
        for free in itertools.combinations(range(4), n_free):
            columns = weighted[:, free] / scale[list(free)]
            solution = np.linalg.lstsq(columns, target, rcond=None)[0]
            error = float(np.sum((columns @ solution - target) ** 2))
            if solution.min() >= 0 and error < best_error:
                best, best_error = np.zeros(4), error
                best[list(free)] = solution / scale[list(free)]
    return CostModel(*(float(c) for c in best))
