"""What `tune` found, as tables of text: the same for the terminal and for the report. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.judge import MIN_GAIN, Ground, Judge, Settings
from embedsvc.tuning.predict import CLIENTS, SHORT_TOKENS, Plan, Point, Series
from embedsvc.tuning.search import Proposal, shown

# Rates of the predicted curves, as shares of the higher saturation.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
# The rate at which figures are compared where none is wanted, as a share of the lower saturation.
BUSY = 0.8
ABSENT = "-"


@dataclass(slots=True, frozen=True)
class Curve:
    """One plan under rising rates.

    Attributes:
        name: `present` or `proposed`.
        plan: how texts are batched.
        series: predicted points.
        here: the point at the rate of comparison.
        saturation: texts per second with many waiting.
        with_clients: texts per second with `CLIENTS` in a closed loop.
        sustained: highest rate that keeps the wanted latency; 0 where none does.
    """

    name: str
    plan: Plan
    series: Series
    here: Point
    saturation: float
    with_clients: float
    sustained: float


@dataclass(slots=True, frozen=True)
class Findings:
    """Everything that is shown.

    Attributes:
        facts: what was tuned, where and for what, by name.
        ground: texts, costs and targets.
        proposal: the settings.
        curves: the present plan, and the proposed one where it is another.
        measured: points of `bench sweep`.
        n_waiting: clients of saturation.
    """

    facts: dict[str, str]
    ground: Ground
    proposal: Proposal
    curves: list[Curve]
    measured: list[Series]
    n_waiting: int


@dataclass(slots=True, frozen=True)
class Table:
    """Rows of text under a heading.

    Attributes:
        title: in words.
        head: of the columns, units included.
        rows: cells.
        note: a sentence below; may be empty.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def is_numeric(self, column: int) -> bool:
        """Say whether the cells of a column are numbers, to be aligned on the right."""
        return all(re.fullmatch(r"[\d,.%-]+", row[column]) for row in self.rows)


def findings(
    facts: dict[str, str], judge: Judge, proposal: Proposal, measured: list[Series]
) -> Findings:
    """Return the figures of the present and the proposed settings."""
    named = {"present": proposal.present, "proposed": proposal.proposed}
    if judge.plan(proposal.present) == judge.plan(proposal.proposed):
        named = {"present and proposed": proposal.proposed}
    most = [judge.most(settings) for settings in named.values()]
    rate = judge.ground.rate or _round(BUSY * min(most))
    rates = sorted({*(_round(share * max(most)) for share in SHARES), rate})
    curves = [_curve(name, judge, settings, rates, rate) for name, settings in named.items()]
    return Findings(facts, judge.ground, proposal, curves, measured, judge.n_waiting)


def _curve(name: str, judge: Judge, settings: Settings, rates: list[float], rate: float) -> Curve:
    return Curve(
        name=name,
        plan=judge.plan(settings),
        series=Series(name, [judge.point(settings, one) for one in rates]),
        here=judge.point(settings, rate),
        saturation=judge.most(settings),
        with_clients=judge.saturation(settings, CLIENTS),
        sustained=judge.sustained(settings),
    )


def _round(rate: float) -> float:
    """Round to two digits: rates are to be read."""
    return float(f"{rate:.2g}")


# --- tables ---------------------------------------------------------------------------------------


def tables(found: Findings) -> list[Table]:
    """Return all tables in the order they are read."""
    return [
        _settings(found),
        _figures(found),
        _by_rate(found),
        *([_measured(found)] if found.measured else []),
        _costs(found.ground),
        _lengths(found),
    ]


def _settings(found: Findings) -> Table:
    rows = []
    for choice in found.proposal.choices:
        name = "slots x threads_per_slot" if choice.name == "division" else choice.name
        rows.append([name, shown(choice.present), shown(choice.proposed), choice.reason])
    note = f"Defaults stay unless another value is {100 * MIN_GAIN:g} % better."
    return Table("Settings", ["setting", "present", "proposed", "why"], rows, note)


def _figures(found: Findings) -> Table:
    columns: list[tuple[str, Callable[[Curve], str]]] = [
        (f"saturation, {CLIENTS} clients, texts/s", lambda c: number(c.with_clients)),
        (f"saturation, {found.n_waiting} waiting, texts/s", lambda c: number(c.saturation)),
        (
            f"sustained with p99 ≤ {milliseconds(found.ground.slo_s)} ms, texts/s",
            lambda c: number(c.sustained),
        ),
        ("p50, ms", lambda c: milliseconds(c.here.p50_s)),
        ("p99, ms", lambda c: milliseconds(c.here.p99_s)),
        (
            f"p99 of texts up to {SHORT_TOKENS} tokens, ms",
            lambda c: milliseconds(c.here.short_p99_s),
        ),
        ("embedded in time, texts/s", lambda c: number(c.here.texts_per_s)),
        ("within the wanted latency, texts/s", lambda c: number(c.here.good_per_s)),
        ("rows of a batch, mean", lambda c: f"{c.here.mean_rows:.1f}"),
        ("padding", lambda c: f"{c.here.padding:.1%}"),
        ("refused", lambda c: str(c.here.n_rejected)),
        ("timed out", lambda c: str(c.here.n_timed_out)),
    ]
    rate = found.curves[0].here.rate
    return Table(
        f"Predicted at {number(rate)} texts/s",
        ["figure", *(curve.name for curve in found.curves)],
        [[name, *(show(curve) for curve in found.curves)] for name, show in columns],
        _caution(found),
    )


def _caution(found: Findings) -> str:
    if any(curve.sustained > 0 for curve in found.curves):
        return "Saturation and the sustained rate do not depend on this rate."
    cost = found.ground.measured(found.proposal.proposed).found.cost
    longest = int(np.flatnonzero(found.ground.lengths)[-1])
    alone = milliseconds(cost(1, longest) + found.ground.overhead_s)
    return (
        "No rate keeps the wanted latency, so settings are ranked by saturation. "
        f"A text of {longest} tokens alone takes {alone} ms."
    )


def _by_rate(found: Findings) -> Table:
    head = ["texts/s"]
    for curve in found.curves:
        head += [f"{curve.name}: p50, ms", "p99, ms", f"p99 ≤ {SHORT_TOKENS} tokens, ms"]
    rows = []
    for points in zip(*(curve.series.points for curve in found.curves), strict=True):
        row = [number(points[0].rate)]
        for point in points:
            row += map(milliseconds, (point.p50_s, point.p99_s, point.short_p99_s))
        rows.append(row)
    return Table("Predicted latency by rate", head, rows)


def _measured(found: Findings) -> Table:
    head = ["configuration", "sent/s", "embedded/s", "rows, mean", "padding", "p50, ms", "p99, ms",
            "refused", "timed out"]  # fmt: skip
    rows = [
        [
            series.name, number(p.rate), number(p.texts_per_s), f"{p.mean_rows:.1f}",
            f"{p.padding:.1%}", milliseconds(p.p50_s), milliseconds(p.p99_s),
            str(p.n_rejected), str(p.n_timed_out),
        ]
        for series in found.measured
        for p in series.points
    ]  # fmt: skip
    return Table("Measured", head, rows)


def _costs(ground: Ground) -> Table:
    head = ["slots x threads", "a batch, ms", "a row, µs", "a token, µs", "a token squared, ns",
            "at least, ms", "rested, ms", "median error", "max_batch_tokens auto"]  # fmt: skip
    rows = []
    for measured in ground.divisions:
        cost, errors = measured.found.cost, measured.found.held_out_error
        terms = [1e3 * cost.c0, 1e6 * cost.c1, 1e6 * cost.c2, 1e9 * cost.c3]
        terms += [1e3 * cost.floor, 1e3 * cost.cold]
        known = ABSENT if errors is None else f"{errors.median:.1%}"
        budget = str(measured.found.max_batch_tokens)
        rows.append([shown(measured.division), *(f"{t:.3g}" for t in terms), known, budget])
    note = (
        "Measured with all slots busy, padding counted; rested: more for a batch that finds the "
        "device at rest; the error is of shapes not fitted."
    )
    return Table("Cost of a batch", head, rows, note)


def _lengths(found: Findings) -> Table:
    counts = found.ground.lengths
    longest = len(counts) - 1
    rows = [["texts", number(counts.sum())], ["tokens, mean", f"{mean(counts):.1f}"]]
    rows += [[f"tokens, {share:.0%}", str(quantile(counts, share))] for share in (0.5, 0.9, 0.99)]
    rows += [[f"at the maximum of {longest} or cut", f"{counts[-1] / counts.sum():.1%}"]]
    rows += [
        [f"edges, {curve.name}", " ".join(map(str, curve.plan.edges))] for curve in found.curves
    ]
    note = 'With buckets = "auto" the server learns these edges and follows the traffic.'
    return Table("Lengths", ["", "value"], rows, note)


def mean(counts: Counts) -> float:
    """Return the average length."""
    return float(counts @ np.arange(len(counts)) / counts.sum())


def quantile(counts: Counts, share: float) -> int:
    """Return the length that a share of the texts does not exceed."""
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum() - 1e-9))


def number(value: float) -> str:
    """Return a number to four digits, without an exponent."""
    return f"{float(f'{value:.4g}'):,.10g}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds to three digits."""
    return ABSENT if seconds is None else f"{float(f'{1e3 * seconds:.3g}'):,.10g}"


def as_text(found: Findings) -> Iterator[str]:
    """Yield the lines for the terminal."""
    width = max(map(len, found.facts))
    yield from (f"{name:{width}}  {value}" for name, value in found.facts.items())
    for table in tables(found):
        yield ""
        yield table.title
        grid = [table.head, *table.rows]
        widths = [max(len(row[k]) for row in grid) for k in range(len(table.head))]
        right = [table.is_numeric(k) for k in range(len(table.head))]
        for row in grid:
            places = zip(row, widths, right, strict=True)
            cells = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in places)
            yield ("  " + "  ".join(cells)).rstrip()
        if table.note:
            yield f"  {table.note}"
