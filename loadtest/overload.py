"""Overload: `python -m loadtest.overload` sends four times what the server can do.

The rate of 64 clients in a closed loop is taken for the peak. Then calls arrive at four times that
rate, each with a deadline of one second, whatever becomes of the others.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from embedsvc.bench.open_loop import MAX_LAG_MS, calls_for, run_open
from embedsvc.bench.outcome import OK, REJECTED, TIMED_OUT, Outcome, percentiles_ms
from embedsvc.bench.scrape import scrape
from embedsvc.bench.serving import Server, ServerError, served
from loadtest import workload
from loadtest.arrivals import arrivals
from loadtest.client import run_closed
from loadtest.target import DIM, Bars, arguments

FACTOR = 4
TIMEOUT_S = 1.0
IDLE_AFTER_S = 2.0
# How long a call is waited for, so that late answers are seen to be late.
GIVE_UP_S = 10.0

MAX_MISSED = 0.01
MAX_REFUSAL_MS = 50.0
MIN_OF_PEAK = 0.85
_REFUSAL_LINE = re.compile(r"refus|reject|overload", re.IGNORECASE)


def main() -> None:
    """Print the peak, what came of the overload, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--peak-calls", type=int, default=2_000, help="measured for the peak")
    parser.add_argument("--max-rate", type=float, default=float("inf"), help="calls per second")
    args, flags = arguments(parser)
    texts = workload.mixed()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.log")
        with logged_to(path), path.open("a") as log, served(*flags, log=log) as server:
            peak = run_closed(
                server.address,
                server.model,
                texts,
                dim=DIM,
                n_clients=args.clients,
                n_measured=args.peak_calls,
            )
            print(f"peak, {args.clients} clients:\n{peak.table()}\n", flush=True)
            rate = min(FACTOR * peak.texts_per_s, args.max_rate)
            n_before = len(path.read_text().splitlines())
            outcome = overload(server, texts, rate, args.seconds)
            busy = uvloop.run(scrape(server.address)).busy
            lines = path.read_text().splitlines()[n_before:]
    print(f"{rate:.0f} calls/s, deadline {TIMEOUT_S:g} s:\n{outcome.table(TIMEOUT_S * 1e3)}\n")
    judge(peak, outcome, busy, lines, args.seconds)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Show the server's log where it did not start."""
    try:
        yield
    except ServerError:
        print(path.read_text(), file=sys.stderr)
        raise


def overload(server: Server, texts: list[str], rate: float, seconds: float) -> Outcome:
    """Send calls with a deadline at a rate; return `IDLE_AFTER_S` after the last has left."""
    headers = {"x-request-timeout": f"{TIMEOUT_S:g}"}
    calls = calls_for(*server.address, server.model, texts, headers=headers)
    offsets = arrivals("poisson", rate, seconds)
    idle_at = time.perf_counter() + seconds + IDLE_AFTER_S
    outcome = run_open(server.address, calls, offsets, dim=DIM, give_up_s=GIVE_UP_S)
    time.sleep(max(0.0, idle_at - time.perf_counter()))
    return outcome


def judge(
    peak: Outcome, outcome: Outcome, busy: dict[str, float], lines: list[str], seconds: float
) -> None:
    """Print every bar and end the process."""
    bars = Bars()
    lag = percentiles_ms(outcome.lags)
    bars.at_most("client's own lag, p99", lag.get("p99", 0.0), MAX_LAG_MS, " ms")
    n_late = outcome.endings[OK] - outcome.within(TIMEOUT_S)
    bars.at_most(
        f"admitted calls that missed the deadline ({n_late} answered late, "
        f"{outcome.endings[TIMED_OUT]} with 504), share",
        outcome.missed(TIMEOUT_S),
        MAX_MISSED,
    )
    others = set(outcome.endings) - {OK, REJECTED, TIMED_OUT}
    bars.empty("other endings", {name: outcome.endings[name] for name in sorted(others)})
    bars.at_least("refused calls", len(outcome.refusals), 1)
    median = statistics.median(outcome.refusals or [0.0]) * 1e3
    bars.at_most("refused, median", median, MAX_REFUSAL_MS, " ms")
    of_peak = outcome.texts_per_s / peak.texts_per_s
    bars.at_least("answered per second, of the peak", of_peak, MIN_OF_PEAK)
    print(f"     tokens per second, of the peak: {outcome.tokens_per_s / peak.tokens_per_s:.2f}")
    bars.empty(f"gauges {IDLE_AFTER_S:g} s after the load", busy)
    refusal_lines = [line for line in lines if _REFUSAL_LINE.search(line)]
    bars.at_most("log lines about refusals", len(refusal_lines), seconds + 1)
    print(f"     log lines in all: {len(lines)}", *refusal_lines[:1], sep="\n     ")
    bars.exit()


if __name__ == "__main__":
    main()
