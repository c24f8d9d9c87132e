"""The padded-cost model: predicted seconds of a batch from its rows and padded length.

Knows nothing of queues, threads or devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A device is at rest once nothing has run on it for so long.
REST_S = 0.005
# A floor must leave this share of the squared error at most, or there is none.
FLOOR_ERROR = 0.5


@dataclass(slots=True, frozen=True)
class CostModel:
    """`T(rows, length) = max(floor, c0 + c1·rows + c2·rows·length + c3·rows·length²)` seconds.

    c0 is the price of a batch, c1 of a row, c2 of a padded token, c3 of a pair of padded tokens in
    one row (attention); none is negative. Launching its kernels takes a GPU the time of the floor,
    however small the batch; a CPU has none. A batch that finds the device at rest takes `cold`
    seconds more: caches are others' by then, and clocks are low.
    """

    c0: float
    c1: float
    c2: float
    c3: float
    floor: float = 0.0
    cold: float = 0.0

    def __call__(self, rows: int, length: int) -> float:
        """Return the predicted seconds of a batch of `rows` padded to `length` tokens."""
        return self.batch(rows, self.row(length))

    def row(self, length: int) -> float:
        """Return the seconds one more row of `length` tokens adds to a batch above the floor."""
        return self.c1 + length * (self.c2 + self.c3 * length)

    def batch(self, rows: float, row_s: float) -> float:
        """Return the seconds of a batch of rows that add `row_s` seconds each."""
        return max(self.floor, self.c0 + rows * row_s)

    def share(self, rows: float, row_s: float) -> float:
        """Return the seconds of one of the rows of such a batch; `rows` may be infinite."""
        return max(self.floor / rows, self.c0 / rows + row_s)

    def shares(self, rows: float | Floats, lengths: npt.NDArray[np.int64]) -> Floats:
        """Return `share` for batches of these rows padded to each of the lengths."""
        row_s = self.c1 + lengths * (self.c2 + self.c3 * lengths)
        return np.maximum(self.floor / rows, self.c0 / rows + row_s)


# Measured with all-MiniLM-L6-v2 in bfloat16 on one AMD Zen 4 core; used until a fit is there.
DEFAULT_COST = CostModel(c0=6.7e-3, c1=0.60e-3, c2=0.116e-3, c3=0.0002e-3)


@dataclass(slots=True, frozen=True)
class Observation:
    """One measured batch."""

    rows: int
    length: int
    seconds: float


def fit(observations: Seq[Observation], *, floor: bool = False) -> CostModel:
    """Fit the cost model by least squares of the relative error, coefficients never negative.

    Args:
        observations: measured batches of several shapes.
        floor: whether small batches may all take the same time, as on a GPU.

    Raises:
        ValueError: there is no observation.
    """
    if not observations:
        raise ValueError("no observations")
    plain = _fit_terms(observations)
    if not floor:
        return plain
    quickest_first = sorted(observations, key=lambda o: o.seconds)
    models = [_with_floor(quickest_first, n) for n in range(2, len(observations))]
    best = min(models, key=lambda model: squared_error(model, observations), default=plain)
    enough = FLOOR_ERROR * squared_error(plain, observations)
    return best if squared_error(best, observations) < enough else plain


def squared_error(model: CostModel, observations: Seq[Observation]) -> float:
    """Return the sum of the squared relative errors."""
    return sum((model(o.rows, o.length) / o.seconds - 1) ** 2 for o in observations)


def _with_floor(quickest_first: Seq[Observation], n_flat: int) -> CostModel:
    """Fit a floor to the quickest observations and the terms to the others."""
    inverse = [1 / o.seconds for o in quickest_first[:n_flat]]
    # The constant of least squared relative error.
    floor = sum(inverse) / sum(x * x for x in inverse)
    return replace(_fit_terms(quickest_first[n_flat:]), floor=floor)


def _fit_terms(observations: Seq[Observation]) -> CostModel:
    """Fit the four terms.

    Four unknowns have 15 non-empty sets of free coefficients: each is solved plainly and the best
    solution without a negative coefficient wins, which is the exact non-negative optimum.

    Source: relative errors as in weighted least squares; active sets as in Lawson and Hanson,
    Solving Least Squares Problems, 1974, chapter 23.
    """
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
