"""Judges batching settings for given texts, costs and targets, by simulating them.

Pure: figures come from `predict`, so equal arguments give equal figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from embedsvc.config import Auto, BatchingConfig
from embedsvc.engine.buckets import Limits
from embedsvc.engine.calibrate import Calibration
from embedsvc.engine.cost import CostModel
from embedsvc.tuning.edges import Traffic, best_edges
from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.predict import Plan, Point, predict, saturation

# Anything else must be this much better than the default: predictions are no more exact.
MIN_GAIN = 0.02
# Draws that have to agree.
SEEDS = (0, 1)
# The rate sustained within the wanted latency is found to 0.4 % of saturation; where not even the
# least rate keeps the latency, saturation counts.
STEPS, LEAST_RATE = 8, 0.02
_DEFAULT = BatchingConfig()


class Division(NamedTuple):
    """How the cores of a device are shared out.

    Attributes:
        slots: batches at once.
        threads_per_slot: CPU threads of a batch.
    """

    slots: int
    threads_per_slot: int


@dataclass(slots=True, frozen=True)
class Settings:
    """What is searched for, as a configuration file says it; by default all defaults.

    Attributes:
        division: of the device.
        max_batch_tokens: padded tokens of a batch.
        max_batch_size: rows of a batch.
        max_batch_delay_ms: longest wait of a free device.
        buckets: upper edges of the length buckets in tokens.
    """

    division: Division | Auto = "auto"
    max_batch_tokens: int | Auto = "auto"
    max_batch_size: int = _DEFAULT.max_batch_size
    max_batch_delay_ms: float = _DEFAULT.max_batch_delay_ms
    buckets: tuple[int, ...] | Auto = "auto"


@dataclass(slots=True, frozen=True)
class Measured:
    """A division of the device and what was measured with it.

    Attributes:
        division: slots and threads.
        found: cost of a batch while all slots are busy, and the token budget `auto` takes.
    """

    division: Division
    found: Calibration


@dataclass(slots=True, frozen=True)
class Ground:
    """What no setting changes.

    Attributes:
        lengths: `(max_length + 1,)` weight of each length.
        divisions: of the device; the first is the one `auto` takes.
        max_age_s: `max_age_s` of the configuration.
        timeout_s: seconds a text has, as the engine counts them.
        slo_s: wanted 99th percentile of the latency, in seconds.
        rate: texts per second that must be served, where that is known.
        overhead_s: seconds of a request outside queue and device.
    """

    lengths: Counts
    divisions: tuple[Measured, ...]
    max_age_s: float
    timeout_s: float
    slo_s: float
    rate: float | None = None
    overhead_s: float = 0.0

    def measured(self, settings: Settings) -> Measured:
        """Return the division that settings mean."""
        if settings.division == "auto":
            return self.divisions[0]
        return next(m for m in self.divisions if m.division == settings.division)


class Figure(Enum):
    """What settings are ranked by, in texts per second; the value says it in words."""

    GOODPUT = "within the latency at the wanted rate"
    SUSTAINED = "sustained within the latency"
    SATURATION = "at saturation"


class Judge:
    """Simulates settings on one ground and remembers the figures.

    Args:
        ground: texts, costs and targets.
        n_texts: of one simulation.

    Attributes:
        n_waiting: clients that saturate a plan.
    """

    def __init__(self, ground: Ground, n_texts: int) -> None:
        self.ground = ground
        self.n_waiting = n_texts // 4
        self._n_texts = n_texts
        self._plans: dict[Settings, Plan] = {}
        self._points: dict[tuple[Settings, float, int], Point] = {}
        self._saturation: dict[tuple[Settings, int], float] = {}
        self._sustained: dict[Settings, float] = {}

    def plan(self, settings: Settings) -> Plan:
        """Return what a server with these settings does, automatic ones filled in."""
        if settings not in self._plans:
            measured = self.ground.measured(settings)
            budget = settings.max_batch_tokens
            limits = Limits(
                max_length=len(self.ground.lengths) - 1,
                max_batch_tokens=measured.found.max_batch_tokens if budget == "auto" else budget,
                max_batch_size=settings.max_batch_size,
                max_batch_delay_s=settings.max_batch_delay_ms / 1000,
                max_age_s=self.ground.max_age_s,
            )
            edges = self._edges(settings, measured.found.cost, limits)
            self._plans[settings] = Plan(edges, limits, *measured.division)
        return self._plans[settings]

    def _edges(self, settings: Settings, cost: CostModel, limits: Limits) -> tuple[int, ...]:
        if settings.buckets != "auto":
            return tuple(sorted({*settings.buckets, limits.max_length}))
        rate = self.ground.rate or float("inf")
        traffic = Traffic(self.ground.lengths, rate, self.ground.max_age_s)
        return tuple(best_edges(traffic, cost, limits))

    def point(self, settings: Settings, rate: float, seed: int = 0) -> Point:
        """Return the figures of settings at a rate."""
        key = settings, rate, seed
        if key not in self._points:
            ground = self.ground
            self._points[key] = predict(
                ground.lengths,
                ground.measured(settings).found.cost,
                self.plan(settings),
                rate,
                self._n_texts,
                ground.timeout_s,
                slo_s=ground.slo_s,
                overhead_s=ground.overhead_s,
                seed=seed,
            )
        return self._points[key]

    def saturation(self, settings: Settings, n_clients: int) -> float:
        """Return the texts per second of a closed loop."""
        key = settings, n_clients
        if key not in self._saturation:
            cost, plan = self.ground.measured(settings).found.cost, self.plan(settings)
            lengths = self.ground.lengths
            self._saturation[key] = saturation(lengths, cost, plan, n_clients, self._n_texts)
        return self._saturation[key]

    def most(self, settings: Settings) -> float:
        """Return the texts per second with many waiting: more cannot be served for long."""
        return self.saturation(settings, self.n_waiting)

    def meets(self, settings: Settings, rate: float) -> bool:
        """Say whether the wanted latency is kept at a rate, and nothing refused or late."""
        return rate <= self.most(settings) and all(
            self._good(self.point(settings, rate, seed)) for seed in SEEDS
        )

    def _good(self, point: Point) -> bool:
        missed = point.n_rejected + point.n_timed_out
        return missed == 0 and point.p99_s is not None and point.p99_s <= self.ground.slo_s

    def sustained(self, settings: Settings) -> float:
        """Return the highest rate that meets the wanted latency; 0 where none does."""
        if settings not in self._sustained:
            high = self.most(settings)
            low = LEAST_RATE * high
            if not self.meets(settings, low):
                low = 0.0
            elif self.meets(settings, high):
                low = high
            else:
                for _ in range(STEPS):
                    middle = (low + high) / 2
                    low, high = (middle, high) if self.meets(settings, middle) else (low, middle)
            self._sustained[settings] = low
        return self._sustained[settings]

    def goodput(self, settings: Settings) -> float:
        """Return the texts per second within the wanted latency at the wanted rate."""
        assert self.ground.rate is not None
        points = [self.point(settings, self.ground.rate, seed) for seed in SEEDS]
        return sum(point.good_per_s for point in points) / len(points)

    def better(self, settings: Settings, than: Settings) -> bool:
        """Say whether settings are better by more than `MIN_GAIN`.

        At the wanted rate, where that is too much for the others; else by the rate sustained within
        the wanted latency; where they sustain none, by saturation.
        """
        rate, enough = self.ground.rate, 1 + MIN_GAIN
        if rate is not None and not self.meets(than, rate):
            ours, theirs = self.goodput(settings), self.goodput(than)
            if max(ours, theirs) > enough * min(ours, theirs):
                return ours > theirs
        sustained = self.sustained(than)
        if sustained > 0:
            # The first look spares most of the losers a search for their own rate.
            higher = enough * sustained
            return self.meets(settings, higher) and self.sustained(settings) > higher
        return self.sustained(settings) > 0 or self.most(settings) > enough * self.most(than)

    def ranked_by(self, settings: Settings) -> Figure:
        """Return which figure ranks settings beside others."""
        rate = self.ground.rate
        if rate is not None and not self.meets(settings, rate):
            return Figure.GOODPUT
        return Figure.SUSTAINED if self.sustained(settings) > 0 else Figure.SATURATION

    def figure(self, which: Figure, settings: Settings) -> float:
        """Return a figure in texts per second."""
        match which:
            case Figure.GOODPUT:
                return self.goodput(settings)
            case Figure.SUSTAINED:
                return self.sustained(settings)
        return self.most(settings)
