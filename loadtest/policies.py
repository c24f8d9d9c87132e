"""Batching rules side by side in simulated time: `python -m loadtest.policies`.

The mixed workload, tokenized as it is served, arrives at random and in the rhythm of two recorded
services. Batches take what the built-in cost model says, so the tables are the same on every
machine. Below them what is asked of ours, and the time of a choice, which is this machine's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import cycle, islice
from time import thread_time

import numpy as np

from embedsvc.bench.open_loop import Offsets
from embedsvc.config import DEFAULT_SHA256, DEFAULT_SOURCE
from embedsvc.engine.buckets import Limits, first_edges, half_powers_of_two
from embedsvc.engine.cost import DEFAULT_COST
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Batch, Sequence
from embedsvc.models.source import resolve
from embedsvc.tokenization import Tokenizer
from embedsvc.traffic import LOOK_INTERVAL_S
from embedsvc.tuning.baselines import Fifo, SizeOrTimeout, SortedWindow
from embedsvc.tuning.histogram import LengthHistogram
from embedsvc.tuning.refit import Refit
from embedsvc.tuning.simulate import Arrival, Chooser, Outcome, closed_loop, replay, sorted_limit_s
from loadtest import workload
from loadtest.arrivals import KINDS, Kind, arrivals
from loadtest.target import Bars

MAX_LENGTH = 256
SLOTS = 2
LIMITS = Limits(MAX_LENGTH, max_batch_tokens=1_024, max_batch_size=256)
UNBOUNDED = Limits(MAX_LENGTH, max_batch_tokens=10**9, max_batch_size=10**9)
LOADS = (0.6, 0.8, 0.95)
SLO_S = 0.25
CLASSES = ((1, 32), (33, 128), (129, MAX_LENGTH))
# Texts that wait at all times where the device is saturated.
MANY_WAITING = 1_500
TIMED_TEXTS = 20_000
MAX_CHOICE_US = 200.0


class Following:
    """The policy as it is served: every few seconds it may take edges that suit the traffic."""

    def __init__(self) -> None:
        self._policy = Policy(first_edges(MAX_LENGTH), DEFAULT_COST, LIMITS)
        self._lengths = LengthHistogram(MAX_LENGTH)
        edges = self._policy.buckets.edges
        self._refit = Refit(self._lengths, edges, DEFAULT_COST, LIMITS)
        self._looked, self._seen = 0.0, 0

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Count and queue rows."""
        if now - self._looked >= LOOK_INTERVAL_S:
            self._look(now)
        self._lengths.add(row.length for row in sequences)
        self._policy.add(sequences, now)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose a batch."""
        return self._policy.next(now, free_slots)

    def _look(self, now: float) -> None:
        n_seen = self._lengths.n_seen
        rate = (n_seen - self._seen) / (now - self._looked)
        self._looked, self._seen = now, n_seen
        if switch := self._refit.propose(rate):
            self._refit.accept(switch)
            self._policy.set_edges(switch.edges)


# Bars: of the rate of the sorted order, by clients; of latencies at this share of saturation.
MIN_OF_SORTED = {MANY_WAITING: 0.96, 64: 0.90}
LOAD, MAX_OF_LONGEST, MAX_OF_FIFO = 0.8, 5.0, 0.25
# Arrivals are counted in windows of so many seconds to tell how bursty they are.
BUSY_S = 5.0
COARSE = (32, 64, 128, MAX_LENGTH)
OURS, FIFO_OF_8 = "ours", "FIFO of 8 (TEI, CPU)"
RULES: dict[str, Callable[[], Chooser]] = {
    "no batching": lambda: Fifo(UNBOUNDED, 1),
    FIFO_OF_8: lambda: Fifo(UNBOUNDED, 8),
    "FIFO, 16,384 tokens (TEI, GPU)": lambda: Fifo(Limits(MAX_LENGTH, 16_384, 10**9), 10**9),
    "sorted in 8 x 32 (Infinity)": lambda: SortedWindow(UNBOUNDED),
    "4 buckets, 8 or 2 ms": lambda: SizeOrTimeout(UNBOUNDED, COARSE, 8, 0.002),
    "4 buckets, 32 or 20 ms": lambda: SizeOrTimeout(UNBOUNDED, COARSE, 32, 0.020),
    "ours, half-power buckets": lambda: Policy(
        half_powers_of_two(MAX_LENGTH), DEFAULT_COST, LIMITS
    ),
    OURS: Following,
}


def main() -> None:
    """Print a table of every arrival process, and whether a choice is quick enough."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, simulated")
    parser.add_argument("--arrivals", choices=KINDS, nargs="*", default=KINDS)
    args = parser.parse_args()
    lengths = served_lengths()
    rate = len(lengths) / saturated(OURS, lengths).end
    print(saturated_table(lengths))
    for kind in args.arrivals:
        print(f"\n{load_table(kind, lengths, rate, args.seconds)}", flush=True)
    print()
    bars = Bars()
    judge_rates(bars, lengths)
    for kind in args.arrivals:
        judge_latencies(bars, kind, lengths, rate, args.seconds)
    for n_waiting in (2_000, 8_192):
        judge_choices(bars, lengths, n_waiting)
    bars.exit()


def served_lengths() -> list[int]:
    """Return the tokens of the mixed workload's texts."""
    folder = resolve(DEFAULT_SOURCE, sha256=DEFAULT_SHA256, where="models[0]")
    encoded = Tokenizer(folder, MAX_LENGTH).encode(workload.mixed(), truncate="END")
    return [len(one.ids) for one in encoded]


# --- one rule --------------------------------------------------------------------------------


def saturated(rule: str, lengths: Seq[int]) -> Outcome:
    """Serve all texts in simulated time, `MANY_WAITING` of them waiting while there are so many."""
    return closed_loop(lengths, MANY_WAITING, RULES[rule](), SLOTS, DEFAULT_COST)


def loaded(rule: str, offsets: Offsets, lengths: Seq[int]) -> Outcome:
    """Serve texts that arrive at some times."""
    coming = zip(offsets.tolist(), cycle(lengths), strict=False)
    arrivals = (Arrival(at, (length,)) for at, length in coming)
    return replay(arrivals, RULES[rule](), SLOTS, DEFAULT_COST)


# --- tables ----------------------------------------------------------------------------------


def saturated_table(lengths: Seq[int]) -> str:
    """Return what every rule embeds at most."""
    outcomes = {rule: saturated(rule, lengths) for rule in RULES}
    ours = outcomes[OURS]
    rows = [
        [
            rule,
            f"{len(lengths) / one.end:.0f}",
            f"{ours.end / one.end:.2f}",
            f"{len(lengths) / len(one.batches):.1f}",
            f"{one.padding:.0%}",
        ]
        for rule, one in outcomes.items()
    ]
    return table(["saturated", "texts/s", "of ours", "rows a batch", "padding"], rows)


def load_table(kind: Kind, lengths: Seq[int], saturation: float, seconds: float) -> str:
    """Return how every rule fares at some shares of our own saturation."""
    rows = []
    for load in LOADS:
        offsets = arrivals(kind, load * saturation, seconds)
        for rule in RULES:
            outcome = loaded(rule, offsets, lengths)
            rows.append([f"{load:.0%}", rule, *_figures(outcome)])
    titles = [kind, "rule", f"good/s ({SLO_S * 1e3:.0f} ms)", "texts/s", "padding"]
    for low, high in CLASSES:
        titles += [f"p50 {low}-{high}", f"p99 {low}-{high}"]
    return table(titles, rows)


def _figures(outcome: Outcome) -> list[str]:
    figures = [
        f"{outcome.goodput(SLO_S):.0f}",
        f"{len(outcome.served) / outcome.end:.0f}",
        f"{outcome.padding:.0%}",
    ]
    for low, high in CLASSES:
        figures += [f"{outcome.latency_s(q, high, low) * 1e3:,.0f}" for q in (0.5, 0.99)]
    return figures


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- what is asked of ours -------------------------------------------------------------------


def judge_rates(bars: Bars, lengths: Seq[int]) -> None:
    """Compare the rate of closed loops with that of all texts in batches sorted by length."""
    sorted_s = sorted_limit_s(lengths, LIMITS, SLOTS, DEFAULT_COST)
    for n_clients, least in MIN_OF_SORTED.items():
        outcome = closed_loop(lengths, n_clients, RULES[OURS](), SLOTS, DEFAULT_COST)
        bars.at_least(f"{n_clients} clients, of the sorted order", sorted_s / outcome.end, least)


def judge_latencies(
    bars: Bars, kind: Kind, lengths: Seq[int], saturation: float, seconds: float
) -> None:
    """Judge the p99 of short texts at 80 % of what we, and what FIFO of 8, can do at most."""
    short = CLASSES[0][1]
    offsets = arrivals(kind, LOAD * saturation, seconds)
    per_s = np.bincount((offsets // BUSY_S).astype(int)) / BUSY_S
    print(f"     {kind}, busiest {BUSY_S:g} s: {per_s.max() / saturation:.2f} of our saturation")
    p99_s = loaded(OURS, offsets, lengths).latency_s(0.99, short)
    times = p99_s / DEFAULT_COST(1, MAX_LENGTH)
    bars.at_most(f"{kind}, p99 up to {short} tokens, of the longest alone", times, MAX_OF_LONGEST)
    offsets = arrivals(kind, LOAD * len(lengths) / saturated(FIFO_OF_8, lengths).end, seconds)
    ours, fifo = (loaded(rule, offsets, lengths) for rule in (OURS, FIFO_OF_8))
    ratio = ours.latency_s(0.99, short) / fifo.latency_s(0.99, short)
    bars.at_most(f"{kind}, p99 up to {short} tokens, of FIFO's", ratio, MAX_OF_FIFO)


# --- the time of a choice --------------------------------------------------------------------


class Timed:
    """The policy with a stopwatch, which runs while enough rows wait.

    The stopwatch counts the thread's own time: what others do to the machine is not the choice's.
    """

    def __init__(self, n_waiting: int) -> None:
        self.seconds: list[float] = []
        self._enough = 0.9 * n_waiting
        self._policy = Policy(first_edges(MAX_LENGTH), DEFAULT_COST, LIMITS)

    def add(self, sequences: Seq[Sequence], now: float) -> None:
        """Queue rows."""
        self._policy.add(sequences, now)

    def next(self, now: float, free_slots: int) -> Batch | float:
        """Choose a batch, and note how long that took."""
        enough = self._policy.n_waiting >= self._enough
        began = thread_time()
        choice = self._policy.next(now, free_slots)
        if enough:
            self.seconds.append(thread_time() - began)
        return choice


def judge_choices(bars: Bars, lengths: Seq[int], n_waiting: int) -> None:
    """Time choices among many waiting texts in as many buckets as are allowed."""
    timed = Timed(n_waiting)
    texts = islice(cycle(lengths), n_waiting + TIMED_TEXTS)
    closed_loop(texts, n_waiting, timed, SLOTS, DEFAULT_COST)
    microseconds = np.array(timed.seconds) * 1e6
    p50, p99 = np.quantile(microseconds, (0.5, 0.99))
    what = f"one of {len(microseconds)} choices, {n_waiting} texts waiting"
    bars.at_most(f"{what}, median (p99 {p99:.0f} us)", p50, MAX_CHOICE_US, " us")


if __name__ == "__main__":
    main()
