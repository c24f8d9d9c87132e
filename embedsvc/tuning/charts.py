"""The three charts of `tune`'s report: lengths, cost, latency. Pure; `axes` draws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from embedsvc.engine.buckets import WIDTH_STEP, Limits
from embedsvc.engine.cost import CostModel
from embedsvc.tuning import axes
from embedsvc.tuning.findings import Curve, Findings, milliseconds, number
from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.predict import Point, Series

MAX_BARS = 96
# Cells of the cost chart.
MAX_COLUMNS, MAX_LINES = 12, 10
# Latency beyond this many times the wanted one is not worth a place in the chart.
HIGHEST_LATENCY = 20.0
# Classes of colour for measured configurations; they repeat.
COLOURS = 5


def lengths_chart(found: Findings) -> str:
    """Return the histogram of lengths, with a line of ticks for the edges of each plan."""
    counts = found.ground.lengths
    bars = _bars(counts)
    shares = [100 * share for _, _, share in bars]
    rug = axes.TOP + 20 * len(found.curves)
    x = axes.across(0, bars[-1][1])
    y = axes.upwards(0, 1.08 * max(shares), rug)
    parts = axes.frame(x, y, "length, tokens", "texts, %")
    for (low, high, _), share in zip(bars, shares, strict=True):
        hint = f"{low + 1} to {high} tokens: {share:.2f} %"
        parts.append(axes.box("bar", x(low) + 0.5, y(share), x(high) - 0.5, y(0), hint))
    for row, curve in enumerate(found.curves):
        parts += _edges(curve, row, x, y(0))
    return axes.chart("Lengths of the texts and bucket edges", parts)


def _bars(counts: Counts) -> list[tuple[int, int, float]]:
    """Return (above, up to, share of the texts) of each bar, up to the longest text."""
    longest = int(np.flatnonzero(counts)[-1])
    step = WIDTH_STEP * math.ceil(longest / WIDTH_STEP / MAX_BARS)
    last = math.ceil(longest / step) * step
    total = counts.sum()
    return [
        (low, low + step, float(counts[low + 1 : low + step + 1].sum() / total))
        for low in range(0, last, step)
    ]


def _edges(curve: Curve, row: int, x: axes.Scale, bottom: float) -> Iterator[str]:
    kind, top = f"edge {style(curve)}", axes.TOP + 18 * row
    words = curve.name if len(curve.name) <= len("proposed") else "edges"
    yield axes.text(axes.LEFT - 8, top + 10, words, "end", "key")
    for edge in curve.plan.edges:
        if edge <= x.high:
            yield axes.line(kind, [(x(edge), top), (x(edge), top + 12)], f"{edge} tokens")
            yield axes.line(f"{kind} faint", [(x(edge), top + 12), (x(edge), bottom)])


def style(curve: Curve) -> str:
    """Return the class of colour of a plan."""
    return "present" if curve.name == "present" else "proposed"


# --- cost -----------------------------------------------------------------------------------------


def cost_chart(cost: CostModel, limits: Limits) -> str:
    """Return predicted milliseconds by rows and length, shaded by tokens per second."""
    lengths, rows = _columns(limits.max_length), _lines(limits)
    rates = [[r * n / cost(r, n) for n in lengths] for r in rows]
    most = max(map(max, rates))
    left, top, bottom = axes.LEFT, axes.TOP, axes.HEIGHT - axes.BOTTOM
    wide = (axes.WIDTH - axes.RIGHT - left) / len(lengths)
    high = (bottom - top) / len(rows)
    parts = []
    for i, n_rows in enumerate(rows):
        low = bottom - i * high
        parts.append(axes.text(left - 8, low - high / 2 + 4, str(n_rows), "end"))
        for j, length in enumerate(lengths):
            fits = n_rows <= limits.rows(length)
            shade = f"shade{round(8 * rates[i][j] / most)}" if fits else "over"
            place = left + j * wide
            hint = (
                f"{n_rows} rows of {length} tokens: {milliseconds(cost(n_rows, length))} ms, "
                f"{number(rates[i][j])} tokens/s a slot"
            )
            cell = (place + 1, low - high + 1, place + wide - 1, low - 1)
            parts.append(axes.box(f"cell {shade}", *cell, hint))
            words = milliseconds(cost(n_rows, length))
            kind = "inside" if fits else "number over"
            parts.append(axes.text(place + wide / 2, low - high / 2 + 4, words, kind=kind))
    parts += [
        axes.text(left + (j + 0.5) * wide, bottom + 20, str(length))
        for j, length in enumerate(lengths)
    ]
    middle = (left + axes.WIDTH - axes.RIGHT) / 2
    parts.append(axes.text(middle, axes.HEIGHT - 10, "padded length, tokens", kind="label"))
    turned = f'transform="rotate(-90 16 {(top + bottom) / 2:g})"'
    parts.append(axes.text(16, (top + bottom) / 2, "rows of a batch", kind="label", extra=turned))
    return axes.chart("Predicted milliseconds of a batch by rows and length", parts)


def _columns(max_length: int) -> list[int]:
    """Return lengths to show, widths of batches at about equal ratios."""
    steps = np.geomspace(WIDTH_STEP, max(max_length, 2 * WIDTH_STEP), MAX_COLUMNS)
    widths = {WIDTH_STEP * round(step / WIDTH_STEP) for step in steps}
    return sorted({min(width, max_length) for width in widths})


def _lines(limits: Limits) -> list[int]:
    """Return powers of two, one beyond what the limits allow of the shortest texts."""
    most = 2 * limits.rows(WIDTH_STEP)
    powers = [1 << k for k in range(most.bit_length())]
    return powers[-MAX_LINES:] if len(powers) > MAX_LINES else powers


# --- latency --------------------------------------------------------------------------------------


def latency_chart(found: Findings) -> str:
    """Return predicted p50 and p99 against the rate, saturation, the targets, and measurements."""
    ground = found.ground
    x = axes.across(0, 1.1 * max(_rates(found)))
    y = axes.upwards(*_latencies(found), logarithmic=True)
    parts = axes.frame(x, y, "rate, texts per second", "latency, ms")
    parts.append(_level("target", y(1e3 * ground.slo_s), "wanted p99"))
    if ground.rate is not None:
        parts += _mark("target", x(ground.rate), "wanted rate", 2)
    for row, curve in enumerate(found.curves):
        kind = style(curve)
        parts += _mark(f"saturation {kind}", x(curve.saturation), f"{curve.name}: saturation", row)
        for quantile in ("p50", "p99"):
            parts.append(_line(curve.series, quantile, f"curve {quantile} {kind}", x, y))
    for k, series in enumerate(found.measured):
        for point in series.points:
            parts += _dots(series.name, point, k % COLOURS, x, y)
    return axes.chart("Latency against rate", parts)


def _rates(found: Findings) -> Iterator[float]:
    for curve in found.curves:
        yield curve.saturation
    if found.ground.rate is not None:
        yield found.ground.rate
    for series in found.measured:
        yield from (point.rate for point in series.points)


def _latencies(found: Findings) -> tuple[float, float]:
    """Return the lowest and highest latency of the chart, in milliseconds."""
    series = [curve.series for curve in found.curves] + found.measured
    points = [point for one in series for point in one.points]
    known = [s for p in points for s in (p.p50_s, p.p99_s) if s is not None and s > 0]
    slo_s = found.ground.slo_s
    low, high = min([slo_s, *known]), max([slo_s, *known])
    return 1e3 * low / 1.5, 1e3 * min(1.5 * high, HIGHEST_LATENCY * slo_s)


def _line(series: Series, quantile: str, kind: str, x: axes.Scale, y: axes.Scale) -> str:
    """Return a curve up to the first point that is above the chart."""
    pixels = []
    for point in series.points:
        latency_s: float | None = getattr(point, f"{quantile}_s")
        if latency_s is None:
            break
        pixels.append((x(point.rate), y(1e3 * latency_s)))
        if 1e3 * latency_s > y.high:
            break
    return axes.line(kind, pixels, f"{series.name}, {quantile}")


def _dots(name: str, point: Point, colour: int, x: axes.Scale, y: axes.Scale) -> Iterator[str]:
    for kind, latency_s in (("p50", point.p50_s), ("p99", point.p99_s)):
        if latency_s is not None:
            hint = (
                f"{name}, {kind} measured: {milliseconds(latency_s)} ms at {number(point.rate)}/s"
            )
            yield axes.dot(f"dot {kind} colour{colour}", x(point.rate), y(1e3 * latency_s), hint)


def _level(kind: str, py: float, words: str) -> str:
    return axes.line(kind, [(axes.LEFT, py), (axes.WIDTH - axes.RIGHT, py)]) + axes.text(
        axes.LEFT + 6, py - 5, words, "start", "key"
    )


def _mark(kind: str, px: float, words: str, row: int) -> Iterator[str]:
    top = axes.TOP + 14 * row
    yield axes.line(kind, [(px, top), (px, axes.HEIGHT - axes.BOTTOM)])
    yield axes.text(px - 5, top + 4, words, "end", "key")
