"""What came of a load: calls by how they ended, percentiles by length, goodput; JSON and a table.

Pure: knows nothing of sockets or of who decided when a call left.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from embedsvc.bench.connection import Answer, ReplyError, read_reply
from embedsvc.metrics import length_class

# How a call ended. Any other status is `status_<number>`.
OK = "ok"
REJECTED = "rejected"  # 429 that says when to come back
REJECTED_SILENTLY = "rejected_without_retry_after"
UNAVAILABLE = "unavailable"  # 503
TIMED_OUT = "timed_out"  # 504
MALFORMED = "malformed"  # 200 with anything but the vectors asked for
LOST = "lost"  # no connection, or it ended before the answer did
GONE = "gone"  # the client gave up waiting

REFUSED = frozenset({REJECTED, REJECTED_SILENTLY})
_OF_STATUS = {429: REJECTED, 503: UNAVAILABLE, 504: TIMED_OUT}
# Whole seconds from 1 to 60: some clients ignore anything else.
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([1-9]|[1-5]\d|60)\r", re.IGNORECASE)
PERCENTILES = (50, 90, 99, 100)


class Result(NamedTuple):
    """One finished call; times are seconds on one clock.

    Attributes:
        ending: one of the names above.
        due: when it was to leave.
        sent: when it was written to a connection; `due` where it left on time.
        finished: when its answer was complete, or it failed.
        n_texts: texts asked for.
        tokens: `usage.prompt_tokens` of the answer; 0 without vectors.
    """

    ending: str
    due: float
    sent: float
    finished: float
    n_texts: int
    tokens: int

    @property
    def latency(self) -> float:
        """Seconds from when it was due, so that a late client hides nothing."""
        return self.finished - self.due


def ending_of(answer: Answer, n_texts: int, dim: int) -> tuple[str, int]:
    """Return how a call ended that got this answer, and its tokens."""
    if answer.status == 200:
        try:
            return OK, read_reply(answer.body, n_texts, dim).usage.prompt_tokens
        except ReplyError:
            return MALFORMED, 0
    ending = _OF_STATUS.get(answer.status, f"status_{answer.status}")
    if ending == REJECTED and not _RETRY_AFTER.search(answer.head):
        ending = REJECTED_SILENTLY
    return ending, 0


@dataclass(slots=True)
class Outcome:
    """All calls of one measurement.

    Attributes:
        seconds: length of the measurement.
        results: its calls.
        n_connections: connections that were open at once, at most.
    """

    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    n_connections: int = 0

    @property
    def answered(self) -> list[Result]:
        """The calls that got vectors."""
        return [result for result in self.results if result.ending == OK]

    @property
    def texts_per_s(self) -> float:
        """Texts answered per second."""
        return sum(result.n_texts for result in self.answered) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens answered per second."""
        return sum(result.tokens for result in self.answered) / self.seconds

    @property
    def endings(self) -> Counter[str]:
        """Calls by how they ended."""
        return Counter(result.ending for result in self.results)

    @property
    def errors(self) -> Counter[str]:
        """Calls that got no vectors, by how they ended."""
        endings = self.endings
        del endings[OK]
        return endings

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Seconds of the calls that got vectors, by length class of their texts, shortest first."""
        by_class: dict[str, list[float]] = defaultdict(list)
        for result in sorted(self.answered, key=lambda one: one.tokens / one.n_texts):
            by_class[length_class(result.tokens // result.n_texts)].append(result.latency)
        return dict(by_class)

    @property
    def refusals(self) -> list[float]:
        """Seconds that the refused calls took."""
        return [result.latency for result in self.results if result.ending in REFUSED]

    @property
    def lags(self) -> list[float]:
        """Seconds by which calls left late: the client's own fault, or no connection was free."""
        return [result.sent - result.due for result in self.results]

    def within(self, seconds: float) -> int:
        """Return how many calls got vectors in no more than some seconds."""
        return sum(result.latency <= seconds for result in self.answered)

    def missed(self, deadline_s: float) -> float:
        """Return the share of the admitted calls without vectors in time: late, 504, given up."""
        n_admitted = sum(self.endings[name] for name in (OK, TIMED_OUT, GONE))
        return 1 - self.within(deadline_s) / n_admitted if n_admitted else 0.0

    def summary(self, slo_ms: float | None = None) -> dict[str, object]:
        """Return counts, rates and percentiles in milliseconds as plain JSON types.

        Args:
            slo_ms: what a good answer takes at most; goodput is in the summary where it is given.
        """
        everything = [result.latency for result in self.answered]
        summary: dict[str, object] = {
            "seconds": round(self.seconds, 2),
            "calls": len(self.results),
            "answered_per_s": round(len(everything) / self.seconds, 1),
            "texts_per_s": round(self.texts_per_s, 1),
            "tokens_per_s": round(self.tokens_per_s),
            "errors": dict(self.errors),
            "latency_ms": {"all": percentiles_ms(everything)}
            | {name: percentiles_ms(values) for name, values in self.latencies.items()},
            "refusal_ms": percentiles_ms(self.refusals),
            "lag_ms": percentiles_ms(self.lags),
            "connections": self.n_connections,
        }
        if slo_ms is not None:
            n_good = self.within(slo_ms / 1e3)
            summary["goodput"] = {
                "slo_ms": slo_ms,
                "per_s": round(n_good / self.seconds, 1),
                "share": round(n_good / max(1, len(self.results)), 4),
            }
        return summary

    def table(self, slo_ms: float | None = None) -> str:
        """Return the summary as text."""
        endings = "  ".join(f"{name} {count}" for name, count in self.endings.most_common())
        lines = [
            f"{len(self.results)} calls in {self.seconds:.1f} s: {endings}",
            f"answered {len(self.answered) / self.seconds:.1f}/s, {self.texts_per_s:.1f} texts/s, "
            f"{self.tokens_per_s:.0f} tokens/s, {self.n_connections} connections",
        ]
        if slo_ms is not None:
            n_good = self.within(slo_ms / 1e3)
            share = n_good / max(1, len(self.results))
            lines.append(
                f"goodput {n_good / self.seconds:.1f}/s within {slo_ms:g} ms, {share:.1%} of calls"
            )
        rows = {"answered": [result.latency for result in self.answered], **self.latencies}
        rows |= {"refused": self.refusals, "left late by": self.lags}
        lines += ["", _row("ms", ["n", *(_name(rank) for rank in PERCENTILES)])]
        for name, values in rows.items():
            lines.append(_row(name, [f"{value:.10g}" for value in percentiles_ms(values).values()]))
        return "\n".join(lines)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return count and percentiles of some seconds, in milliseconds."""
    if not seconds:
        return {"n": 0}
    values = np.percentile(seconds, PERCENTILES) * 1e3
    named = {_name(rank): round(float(v), 1) for rank, v in zip(PERCENTILES, values, strict=True)}
    return {"n": len(seconds), **named}


def _name(rank: int) -> str:
    return "max" if rank == 100 else f"p{rank}"


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:14}" + "".join(f"{value:>10}" for value in values)
