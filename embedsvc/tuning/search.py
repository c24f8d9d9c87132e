"""The search for batching settings: one after the other, a default unless something is better.

Pure: equal arguments give equal settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from embedsvc.engine.buckets import WIDTH_STEP
from embedsvc.tuning.judge import MIN_GAIN, Division, Judge, Settings

# Times the automatic token budget. Costs were measured up to about twice of it.
BUDGETS = (0.5, 0.75, 1.5, 2.0)
ROWS = (8, 16, 32, 64, 128, 512, 1024)
DELAYS_MS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(slots=True, frozen=True)
class Choice:
    """One setting: what it was, what it should be, and why.

    Attributes:
        name: attribute of `Settings`.
        present: value in the configuration.
        proposed: value to use.
        reason: in words, with figures.
    """

    name: str
    present: Any
    proposed: Any
    reason: str


@dataclass(slots=True, frozen=True)
class Proposal:
    """What the search found.

    Attributes:
        present: settings of the configuration.
        proposed: settings to use.
        choices: one for each setting.
    """

    present: Settings
    proposed: Settings
    choices: list[Choice]


def search(judge: Judge, present: Settings) -> Proposal:
    """Return the best settings found, each a default unless another value is `MIN_GAIN` better."""
    names = [setting.name for setting in fields(Settings)]
    best = Settings()
    for name in names:
        for value in candidates(name, judge, best, present):
            challenger = replace(best, **{name: value})
            if challenger != best and judge.better(challenger, best):
                best = challenger
    if present != best and judge.better(present, best):
        best = present
    for name in names:
        simpler = replace(best, **{name: getattr(Settings(), name)})
        if simpler != best and not judge.better(best, simpler):
            best = simpler
    return Proposal(present, best, [_choice(name, judge, present, best) for name in names])


def candidates(name: str, judge: Judge, best: Settings, present: Settings) -> Iterator[Any]:
    """Yield the values of a setting that are worth a simulation, the present one last."""
    limits = judge.plan(best).limits
    match name:
        case "division":
            yield from (measured.division for measured in judge.ground.divisions[1:])
        case "max_batch_tokens":
            steps = (limits.max_batch_tokens * share / WIDTH_STEP for share in BUDGETS)
            yield from (WIDTH_STEP * max(1, round(step)) for step in steps)
        case "max_batch_size":
            # Rows of the shortest texts that the budget allows.
            most = limits.max_batch_tokens // WIDTH_STEP
            yield from (rows for rows in ROWS if min(rows, best.max_batch_size) < most)
        case "max_batch_delay_ms":
            yield from DELAYS_MS
    yield getattr(present, name)


def _choice(name: str, judge: Judge, present: Settings, proposed: Settings) -> Choice:
    was, now, default = (getattr(s, name) for s in (present, proposed, Settings()))
    if was == now == default:
        reason = f"the default; nothing tried is {100 * MIN_GAIN:g} % better"
    else:
        other = was if now == default else default
        reason = _compared(judge, proposed, replace(proposed, **{name: other}), other)
    return Choice(name, was, now, reason)


def _compared(judge: Judge, chosen: Settings, other: Settings, value: object) -> str:
    which = judge.ranked_by(chosen)
    ours, theirs = judge.figure(which, chosen), judge.figure(which, other)
    figures = f"{ours:.4g} texts/s {which.value}, {theirs:.4g} with {shown(value)}"
    return figures if ours > (1 + MIN_GAIN) * theirs else f"the default does as well: {figures}"


def shown(value: object) -> str:
    """Return a setting in the words of a configuration file."""
    match value:
        case Division():
            return f"{value.slots} x {value.threads_per_slot}"
        case tuple():
            return "[" + ", ".join(map(str, value)) + "]"
        case float():
            return f"{value:g}"
    return str(value)
