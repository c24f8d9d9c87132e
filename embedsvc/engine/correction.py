"""How much longer batches take than predicted: percentiles by class of their padded width.

Pure; one owner. The cost model is fitted before there is traffic: what it cannot know (the event
loop's share of the cores, neighbours on the machine, rows copied in and out) shows in the ratio of
measured to predicted time and is learned here while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from embedsvc.metrics import WIDTH_CLASS_NAMES, WIDTH_CLASSES

# Batches of a class that are remembered: seconds of traffic, and enough to tell a 95th percentile.
WINDOW = 64
# What stands in for them at first: as predicted, with a tail.
PRIOR = (1.0,) * 7 + (1.25,)
# A 95th percentile that moved by less is not worth a message.
NEWS = 0.1


@dataclass(slots=True, frozen=True)
class Corrected:
    """What the scheduler is told.

    Attributes:
        p95: 95th percentile of measured over predicted time, by width class.
    """

    p95: tuple[float, ...]


def width_class(tokens: int) -> int:
    """Return the index of the fixed class of a padded width or length in tokens."""
    return bisect_left(WIDTH_CLASSES, tokens)


def percentile(ratios: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of the ascending ratios do not exceed."""
    return ratios[ceil(share * len(ratios)) - 1]


class Correction:
    """Percentiles of measured over predicted time of recent batches.

    Exact order statistics of a sliding window: no step size to choose, an outlier moves the median
    by one rank, and of a changed machine half a window tells.

    Source: sample quantiles converge to those of the distribution, with variance
    p·(1 - p) / (n·f²): R. J. Serfling, Approximation Theorems of Mathematical Statistics, 1980,
    section 2.3.

    Attributes:
        p50: median ratio by width class.
        p95: 95th percentile by width class.
    """

    def __init__(self) -> None:
        self._recent = [deque(PRIOR, WINDOW) for _ in WIDTH_CLASS_NAMES]
        self.p50 = [percentile(PRIOR, 0.5)] * len(self._recent)
        self.p95 = [percentile(PRIOR, 0.95)] * len(self._recent)
        self._told = list(self.p95)

    def factor(self, length: int) -> float:
        """Return what to multiply predicted seconds by, for texts of some tokens."""
        return self.p50[width_class(length)]

    def observe(self, width: int, ratio: float) -> Corrected | None:
        """Count a batch.

        Args:
            width: its padded length in tokens.
            ratio: its measured over its predicted seconds.

        Returns:
            What to tell the scheduler, where it moved notably since it was last told.
        """
        k = width_class(width)
        self._recent[k].append(ratio)
        ascending = sorted(self._recent[k])
        self.p50[k] = percentile(ascending, 0.5)
        self.p95[k] = percentile(ascending, 0.95)
        if abs(self.p95[k] - self._told[k]) <= NEWS * self._told[k]:
            return None
        self._told = list(self.p95)
        return Corrected(tuple(self.p95))
