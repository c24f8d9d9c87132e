"""What came of a run: a table by fault, as text and as JSON. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.chaos.checker import (
    Call,
    Injected,
    Stall,
    Verdict,
    late_s,
    recovery_s,
    set_apart,
)

# Above these the run says nothing about lateness.
MAX_LAG_S, MAX_OTHERS_CORES = 0.05, 0.2
# Bad calls that no fault came before.
NO_FAULT = "none yet"


@dataclass(slots=True)
class Row:
    """All injections of one fault.

    Attributes:
        times: how often.
        in_flight: requests that waited then, all together.
        lost: requests without an answer, from each injection until the next fault.
        wrong: answers that were none of those allowed.
        late: answers after the deadline.
        cut: requests of a killed worker.
        recovery_s: seconds until a request sent afterwards was answered right, sorted.
        unrecovered: injections after which none was.
    """

    times: int = 0
    in_flight: int = 0
    lost: int = 0
    wrong: int = 0
    late: int = 0
    cut: int = 0
    recovery_s: list[float] = field(default_factory=list)
    unrecovered: int = 0


@dataclass(slots=True)
class Report:
    """One run.

    Attributes:
        rows: by fault.
        endings: calls by how they ended.
        n_due: calls whose clients stayed, without texts that break the model.
        complaints: what was wrong, by its words.
        lag_p99_s: how late the client's own event loop was.
        others_cores: what processes besides client and server took of the machine.
    """

    rows: dict[str, Row]
    endings: Counter[str]
    n_due: int
    complaints: Counter[str]
    lag_p99_s: float
    others_cores: float

    @property
    def in_time(self) -> bool:
        """Whether the machine was quiet enough to tell late answers from a late machine."""
        return self.lag_p99_s <= MAX_LAG_S and self.others_cores <= MAX_OTHERS_CORES

    @property
    def right_share(self) -> float:
        """Share of the calls that were due vectors and got them."""
        return self.endings[Verdict.RIGHT] / max(1, self.n_due)

    def total(self, name: str) -> int:
        """Return the sum of a column."""
        return sum(getattr(row, name) for row in self.rows.values())

    def table(self) -> str:
        """Return it as a Markdown table."""
        lines = [
            "| fault | times | in flight | lost | wrong | late | cut | recovery: median, longest |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for fault, row in self.rows.items():
            counts = (row.times, row.in_flight, row.lost, row.wrong, row.late, row.cut)
            cells = " | ".join(map(str, counts))
            lines.append(f"| {fault} | {cells} | {_recovery(row)} |")
        return "\n".join(lines)


def _recovery(row: Row) -> str:
    if not row.recovery_s:
        return "" if row.times == 0 else "never"
    never = f", {row.unrecovered} never" if row.unrecovered else ""
    return f"{statistics.median(row.recovery_s):.2f} s, {row.recovery_s[-1]:.2f} s{never}"


def report(
    calls: Sequence[Call],
    faults: Sequence[Injected],
    stalls: Sequence[Stall],
    lag_p99_s: float,
    others_cores: float,
) -> Report:
    """Count calls by the fault that came last before they ended."""
    calls = set_apart(calls, faults)
    rows = {name: Row() for name in sorted({fault.fault for fault in faults})}
    for fault in faults:
        row = rows[fault.fault]
        row.times += 1
        row.in_flight += fault.in_flight
        seconds = recovery_s(calls, fault.at)
        if seconds is None:
            row.unrecovered += 1
        else:
            row.recovery_s = sorted([*row.recovery_s, seconds])
    complaints: Counter[str] = Counter()
    for call in calls:
        late = late_s(call, stalls)
        bad = {
            "lost": call.verdict is Verdict.LOST,
            "wrong": call.verdict is Verdict.WRONG,
            "late": late > 0,
            "cut": call.verdict is Verdict.CUT,
        }
        if not any(bad.values()):
            continue
        row = rows.setdefault(_last_before(call.answered, faults), Row())
        for name, is_so in bad.items():
            setattr(row, name, getattr(row, name) + is_so)
        if call.verdict is not Verdict.CUT:
            complaints[_complaint(call, late)] += 1
    endings = Counter(str(call.verdict) for call in calls)
    n_due = sum(call.verdict is not Verdict.LEFT and not call.poisoned for call in calls)
    return Report(rows, endings, n_due, complaints, lag_p99_s, others_cores)


def _complaint(call: Call, late: float) -> str:
    if late == 0:
        return call.why
    return f"{late:.2f} s late: {call.verdict}, {call.n_texts} texts in {call.deadline_s:g} s"


def _last_before(at: float, faults: Sequence[Injected]) -> str:
    before = [fault for fault in faults if fault.at <= at]
    return max(before, key=lambda fault: fault.at).fault if before else NO_FAULT
