"""The report of `tune`: one HTML page with its charts and tables, readable offline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from embedsvc.tuning.charts import COLOURS, cost_chart, latency_chart, lengths_chart, style
from embedsvc.tuning.findings import Findings, Table, tables

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --weak: #666d75; --rule: #d9dde1;
  --present: #b4631a; --proposed: #0a62b0; --target: #b3261e; --bar: #a9b4bf; --shade: 10, 98, 176;
  --c0: #5b3fa0; --c1: #117a50; --c2: #a8326b; --c3: #7a6200; --c4: #00707a }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e8ea; --weak: #9aa2aa;
  --rule: #343a40; --present: #f0a35e; --proposed: #6db3f2; --target: #ff8a80; --bar: #56616c;
  --shade: 109, 179, 242; --c0: #b39ddb; --c1: #5fd0a0; --c2: #f48fb1; --c3: #e0c04a;
  --c4: #5ccbd6 } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 920px; padding: 24px 20px 60px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 8px }
p { margin: 4px 0 } .note, figcaption { color: var(--weak); font-size: 13px }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 12px 0 }
dt { color: var(--weak) } dd { margin: 0 } figure { margin: 0 }
svg { display: block; height: auto; width: 100% }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--rule); padding: 4px 16px 4px 0; text-align: left;
  vertical-align: top } .right { text-align: right } th { color: var(--weak); font-weight: 500 }
pre { background: rgba(128, 128, 128, .1); border-radius: 6px; font-size: 13px; overflow-x: auto;
  padding: 12px }
svg text { fill: var(--weak); font-size: 11px } svg .label { fill: var(--text); font-size: 12px }
svg .inside { fill: var(--text) }
svg .key { font-size: 11px } svg text.over { opacity: .45 }
.grid, .tick { stroke: var(--rule); fill: none } .axis { stroke: var(--weak); fill: none }
.bar { fill: var(--bar) } polyline { fill: none }
.present { stroke: var(--present) } .proposed { stroke: var(--proposed) }
.edge { stroke-width: 1.5 } .faint { opacity: .25 }
.curve { stroke-width: 2.5 } .p50.curve { stroke-dasharray: 6 4 }
.saturation { stroke-dasharray: 2 3; stroke-width: 1.5 }
.target { stroke: var(--target); stroke-width: 1.5 }
.cell { stroke: none } .cell.over { fill: none; stroke: var(--rule) }
.dot { stroke-width: 2 } .dot.p50 { fill: var(--back) }
.legend { display: flex; flex-wrap: wrap; font-size: 13px; gap: 4px 18px; list-style: none;
  margin: 4px 0; padding: 0 } .legend svg { display: inline-block; height: 10px; width: 28px;
  margin-right: 6px; vertical-align: middle }
"""


def page(found: Findings, toml: str) -> str:
    """Return the whole page; nothing in it is loaded from elsewhere.

    Args:
        found: the figures.
        toml: the proposed configuration file.
    """
    body = "\n".join(_body(found, toml))
    title = f"embedsvc tune: {escape(found.facts['model'])}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_style()}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def _style() -> str:
    shades = [f".shade{k} {{ fill: rgba(var(--shade), {0.07 * k:.2f}) }}" for k in range(9)]
    colours = [
        f".colour{k} {{ stroke: var(--c{k}) }} .p99.colour{k} {{ fill: var(--c{k}) }}"
        for k in range(COLOURS)
    ]
    return _STYLE + "\n".join([*shades, *colours]) + "\n"


def _body(found: Findings, toml: str) -> Iterator[str]:
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in found.facts.items())
    yield f"<dl>{facts}</dl>"
    settings, figures, by_rate, *others = tables(found)
    yield from _table(settings)
    yield from _table(figures)
    yield from _figure(
        "Latency against rate",
        latency_chart(found),
        "Predicted by a simulation that runs the server's own batching policy on random arrivals "
        "of these lengths; a curve ends where it leaves the chart. Measured points come from "
        "<code>embedsvc bench sweep</code>.",
        _latency_legend(found),
    )
    yield from _figure(
        "Lengths and bucket edges",
        lengths_chart(found),
        "Texts by length; the ticks above are the upper edges of the length buckets. Those of "
        "<code>auto</code> are what the server learns from such texts.",
    )
    plan = found.curves[-1].plan
    cost = found.ground.measured(found.proposal.proposed).found.cost
    yield from _figure(
        "Cost of a batch, ms",
        cost_chart(cost, plan.limits),
        f"Predicted on one of {plan.slots} slots; a stronger colour is more tokens per second, an "
        f"outline alone is over max_batch_tokens ({plan.limits.max_batch_tokens}) or "
        f"max_batch_size ({plan.limits.max_batch_size}).",
    )
    for table in (by_rate, *others):
        yield from _table(table)
    yield f"<h2>Configuration</h2>\n<pre>{escape(toml)}</pre>"


def _figure(title: str, svg: str, caption: str, legend: str = "") -> Iterator[str]:
    yield f"<h2>{title}</h2>\n<figure>{legend}\n{svg}"
    yield f"<figcaption>{caption}</figcaption></figure>"


def _latency_legend(found: Findings) -> str:
    entries = []
    for curve in found.curves:
        for kind in ("p50", "p99"):
            mark = f'<polyline class="curve {kind} {style(curve)}" points="0,5 28,5"/>'
            entries.append((f"{curve.name}, {kind}", mark))
    for k, series in enumerate(found.measured):
        dots = "".join(
            f'<circle class="dot {kind} colour{k % COLOURS}" cx="{px}" cy="5" r="4"/>'
            for kind, px in (("p50", 7), ("p99", 20))
        )
        entries.append((f"{series.name}: measured p50, p99", dots))
    items = (
        f'<li><svg viewBox="0 0 28 10">{mark}</svg>{escape(words)}</li>' for words, mark in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(table: Table) -> Iterator[str]:
    yield f'<h2>{escape(table.title)}</h2>\n<div class="table"><table>'
    kinds = ["right" if table.is_numeric(k) else "left" for k in range(len(table.head))]
    yield _row("th", table.head, kinds)
    yield from (_row("td", row, kinds) for row in table.rows)
    yield "</table></div>"
    if table.note:
        yield f'<p class="note">{escape(table.note)}</p>'


def _row(tag: str, cells: Iterable[str], kinds: Iterable[str]) -> str:
    placed = zip(cells, kinds, strict=True)
    inner = (f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for cell, kind in placed)
    return f"<tr>{''.join(inner)}</tr>"
