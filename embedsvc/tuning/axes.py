"""Axes and marks of a chart as SVG, coloured by classes of the page's style sheet. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 54


@dataclass(slots=True, frozen=True)
class Scale:
    """Values of an axis to pixels.

    Attributes:
        low: value at `start`; above 0 where logarithmic.
        high: value at `end`.
        start: pixel.
        end: pixel.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, held within the axis."""
        low, high, value = (self._straight(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)

    def _straight(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.logarithmic else value

    def ticks(self) -> list[float]:
        """Return round values along the axis."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) < 5 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _nice((self.high - self.low) / 6)
            first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
            values = [k * step for k in range(first, last + 1)]
        return [value for value in values if self.low <= value <= self.high * (1 + 1e-9)]


def _nice(step: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * (1 - 1e-9))


def across(low: float, high: float) -> Scale:
    """Return the horizontal scale of a chart."""
    return Scale(low, high, LEFT, WIDTH - RIGHT)


def upwards(low: float, high: float, top: float = TOP, *, logarithmic: bool = False) -> Scale:
    """Return the vertical scale of a chart whose plot ends at pixel `top`."""
    return Scale(low, high, HEIGHT - BOTTOM, top, logarithmic)


def chart(title: str, parts: Iterable[str]) -> str:
    """Return an SVG picture that fits the width it is given."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def frame(x: Scale, y: Scale, x_label: str, y_label: str) -> list[str]:
    """Return grid lines, numbers and names of both axes."""
    bottom = HEIGHT - BOTTOM
    parts = [line("grid", [(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))]) for tick in y.ticks()]
    parts += [text(LEFT - 8, y(tick) + 4, f"{tick:,.10g}", "end") for tick in y.ticks()]
    parts += [line("tick", [(x(tick), bottom), (x(tick), bottom + 5)]) for tick in x.ticks()]
    parts += [text(x(tick), bottom + 20, f"{tick:,.10g}") for tick in x.ticks()]
    parts.append(line("axis", [(LEFT, bottom), (WIDTH - RIGHT, bottom)]))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, kind="label"))
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:g})"'
    parts.append(text(16, middle, y_label, kind="label", extra=turned))
    return parts


def line(kind: str, points: Sequence[tuple[float, float]], hint: str = "") -> str:
    """Return a line through pixels."""
    path = " ".join(f"{px:g},{py:g}" for px, py in points)
    return f'<polyline class="{kind}" points="{path}">{_hint(hint)}</polyline>'


def box(kind: str, left: float, top: float, right: float, bottom: float, hint: str = "") -> str:
    """Return a rectangle between pixels."""
    size = f'width="{right - left:.4g}" height="{bottom - top:.4g}"'
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" {size}>{_hint(hint)}</rect>'


def dot(kind: str, px: float, py: float, hint: str = "") -> str:
    """Return a round mark."""
    return f'<circle class="{kind}" cx="{px:g}" cy="{py:g}" r="4.5">{_hint(hint)}</circle>'


def text(
    px: float, py: float, words: str, anchor: str = "middle", kind: str = "number", extra: str = ""
) -> str:
    """Return words at a pixel; `anchor` is start, middle or end."""
    place = f'x="{px:g}" y="{py:g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place} {extra}>{escape(words)}</text>'


def _hint(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
