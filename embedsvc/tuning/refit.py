"""Bucket edges that follow the traffic: proposes another set when it is predicted to pay.

Pure; knows nothing of threads, and time only as texts and rates it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embedsvc.engine.buckets import Limits
from embedsvc.engine.cost import CostModel
from embedsvc.tuning.edges import Traffic, best_edges, predicted_cost
from embedsvc.tuning.histogram import LengthHistogram

# Other edges must be predicted to cost this much less on texts they were not fitted to.
MIN_GAIN = 0.02
# Fewer texts since the last look say too little.
MIN_TEXTS = 500


@dataclass(slots=True, frozen=True)
class Switch:
    """A set of edges to use from now on.

    Attributes:
        edges: the new set.
        former: the set they replace.
        gain: share of the predicted cost that they save on held-out texts.
    """

    edges: tuple[int, ...]
    former: tuple[int, ...]
    gain: float


class Refit:
    """The edges in use for the lengths of one model's texts.

    Args:
        histogram: counts the texts.
        edges: in use now.
        cost: prices buckets.
        limits: of a batch.
    """

    def __init__(
        self, histogram: LengthHistogram, edges: Sequence[int], cost: CostModel, limits: Limits
    ) -> None:
        self.histogram = histogram
        self.edges = tuple(edges)
        self.former: tuple[int, ...] = ()
        self._cost = cost
        self._limits = limits
        self._seen_before = 0

    def propose(self, rate: float) -> Switch | None:
        """Return better edges, where there are some that held-out texts confirm.

        Edges are fitted to one half of the texts and judged on the other. Rows may gather until the
        age cap sends them, so a bucket that cannot fill by then is too fine. (Shorter windows make
        fewer buckets, which only costs: batches join neighbouring buckets anyway.)

        Args:
            rate: texts per second now.
        """
        if self.histogram.n_seen - self._seen_before < MIN_TEXTS:
            return None
        self._seen_before = self.histogram.n_seen
        fitted, held_out = (
            Traffic(half, rate / 2, self._limits.max_age_s) for half in self.histogram.halves()
        )
        edges = tuple(best_edges(fitted, self._cost, self._limits))
        now_s = predicted_cost(self.edges, held_out, self._cost, self._limits)
        then_s = predicted_cost(edges, held_out, self._cost, self._limits)
        gain = 1 - then_s / now_s if now_s > 0 else 0.0
        if edges == self.edges or gain <= MIN_GAIN:
            return None
        return Switch(edges, self.edges, gain)

    def accept(self, switch: Switch) -> None:
        """Remember that a switch was made."""
        self.former, self.edges = switch.former, switch.edges
