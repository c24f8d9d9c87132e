"""Measured figures beside predicted ones, as lines of text, and whether they agree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embedsvc.bench.open_loop import MAX_LAG_MS
from embedsvc.tuning.predict import Point

# What a prediction may be off.
MAX_RATE_ERROR, MAX_P50_ERROR = 0.10, 0.20


@dataclass(slots=True, frozen=True)
class Saturation:
    """What a setting embeds at most.

    Attributes:
        name: of the setting.
        measured: texts per second with so many calls at once.
        predicted: the same, expected.
    """

    name: str
    measured: float
    predicted: float

    @property
    def line(self) -> str:
        """The figures as text."""
        off = off_by(self.predicted, self.measured)
        verdict = "ok" if abs(off) <= MAX_RATE_ERROR else "MISS"
        return (
            f"{self.name}, saturated: {self.measured:.1f} texts/s, "
            f"predicted {self.predicted:.1f} ({off:+.0%}) {verdict}"
        )


@dataclass(slots=True, frozen=True)
class Row:
    """One setting at one rate.

    Attributes:
        name: of the setting.
        measured: what came of it.
        predicted: what was expected.
        lag_s: how late the client's calls left, 99th percentile; latencies include it.
    """

    name: str
    measured: Point
    predicted: Point
    lag_s: float

    @property
    def misses(self) -> list[str]:
        """Where the prediction is off by more than it may be."""
        rate = off_by(self.predicted.texts_per_s, self.measured.texts_per_s)
        p50 = off_by(self.predicted.p50_s or 0.0, self.measured.p50_s or 0.0)
        bars = (("ok/s", rate, MAX_RATE_ERROR), ("p50", p50, MAX_P50_ERROR))
        return [f"{what} {off:+.0%}" for what, off, most in bars if abs(off) > most]

    @property
    def line(self) -> str:
        """The figures as a line of the table."""
        verdict = f"MISS {', '.join(self.misses)}" if self.misses else "ok"
        if self.lag_s * 1e3 > MAX_LAG_MS:
            verdict += f" (the client was {self.lag_s * 1e3:.0f} ms late)"
        one, other = self.measured, self.predicted
        return (
            f"{self.name:14}{one.rate:8.1f}{_figures(one)}{one.n_rejected:9}{one.n_timed_out:6}"
            f" |{_figures(other)}  {verdict}"
        )


_TITLES = f"{'ok/s':>8}{'good/s':>8}{'rows':>6}{'p50 ms':>8}{'p99 ms':>8}"
HEADER = (
    f"{'':22}{'measured':^53} | predicted\n"
    f"{'':14}{'rate/s':>8}{_TITLES}{'refused':>9}{'late':>6} |{_TITLES}"
)


def _figures(point: Point) -> str:
    p50, p99 = (
        "-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in (point.p50_s, point.p99_s)
    )
    rates = f"{point.texts_per_s:8.1f}{point.good_per_s:8.1f}"
    return f"{rates}{point.mean_rows:6.1f}{p50:>8}{p99:>8}"


def off_by(predicted: float, measured: float) -> float:
    """Return by which share of the measured figure the prediction is off."""
    if predicted == measured:
        return 0.0
    return predicted / measured - 1 if measured else float("inf")


def summary(rows: Sequence[Row]) -> str:
    """Return how many predictions hold."""
    n_met = sum(not row.misses for row in rows)
    return (
        f"{n_met} of {len(rows)} predictions within {MAX_RATE_ERROR:.0%} of the texts per second "
        f"and {MAX_P50_ERROR:.0%} of the median"
    )
