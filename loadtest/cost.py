"""Predicted against measured batch time: `python -m loadtest.cost`.

The mixed workload from 64 clients in a closed loop, then in an open loop at 70 % of their rate. The
server judges every prediction, corrected by earlier batches only, once its batch has come back.
"""

from __future__ import annotations

import argparse

import uvloop

from embedsvc.bench.open_loop import calls_for, run_open
from embedsvc.bench.scrape import Samples, info, scrape
from embedsvc.bench.serving import Server, served
from embedsvc.metrics import WIDTH_CLASS_NAMES
from loadtest import workload
from loadtest.arrivals import arrivals
from loadtest.client import fell_behind, run_closed
from loadtest.target import DIM, Bars, arguments

LOAD = 0.7
WARM_UP_CALLS = 500

MAX_MEDIAN, MAX_P90 = 0.08, 0.25
_ERRORS = "embedsvc_cost_error_ratio"

Counts = dict[float, float]


def main() -> None:
    """Print the errors of both loads by padded width, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--calls", type=int, default=workload.N_TEXTS, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the open loop")
    args, flags = arguments(parser)
    texts, bars = workload.mixed(), Bars()
    with served(*flags) as server:
        fitted = uvloop.run(info(server.address))
        print(f"fitted: {fitted['cost']}, held-out error {fitted['cost_error']}\n", flush=True)
        closed_loop(server, texts, args.clients, WARM_UP_CALLS)
        start = _scrape(server)
        rate = LOAD * closed_loop(server, texts, args.clients, args.calls)
        middle = _scrape(server)
        judge(f"{args.clients} clients", start, middle, bars)
        open_loop(server, texts, rate, args.seconds)
        judge(f"{rate:.0f} calls/s", middle, _scrape(server), bars)
    bars.exit()


def closed_loop(server: Server, texts: list[str], n_clients: int, n_calls: int) -> float:
    """Run so many calls; return the texts answered per second."""
    outcome = run_closed(
        server.address,
        server.model,
        texts,
        dim=DIM,
        n_clients=n_clients,
        n_warmup=0,
        n_measured=n_calls,
    )
    return outcome.texts_per_s


def open_loop(server: Server, texts: list[str], rate: float, seconds: float) -> None:
    """Send calls at a rate."""
    calls = calls_for(*server.address, server.model, texts)
    fell_behind(run_open(server.address, calls, arrivals("poisson", rate, seconds), dim=DIM))


def judge(load: str, before: Samples, after: Samples, bars: Bars) -> None:
    """Print what came of a load."""
    print(f"{'width':>8} {'batches':>8} {'median':>8} {'p90':>8} {'correction p50, p95':>20}")
    for width in WIDTH_CLASS_NAMES:
        errors = between(before, after, width=width)
        if errors:
            print(
                f"{width:>8} {errors[float('inf')]:8.0f} {_both(errors)} {_factors(after, width)}"
            )
    errors = between(before, after)
    bars.at_most(f"{load}, error of a prediction, median", quantile(errors, 0.5), MAX_MEDIAN)
    bars.at_most(f"{load}, error of a prediction, p90", quantile(errors, 0.9), MAX_P90)
    print(flush=True)


def between(before: Samples, after: Samples, **labels: str) -> Counts:
    """Return the cumulative counts of errors between two scrapes; nothing where none was made."""
    then, now = before.buckets(_ERRORS, **labels), after.buckets(_ERRORS, **labels)
    counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
    return counts if any(counts.values()) else {}


def quantile(counts: Counts, share: float) -> float:
    """Return a quantile of cumulative counts, evenly spread inside a bucket.

    Beyond the last finite bound it is that bound, as in Prometheus' `histogram_quantile`.
    """
    bounds = sorted(counts)
    wanted = share * counts[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds[:-1]:
        if counts[bound] >= wanted > below:
            return low + (bound - low) * (wanted - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low


def _scrape(server: Server) -> Samples:
    return uvloop.run(scrape(server.address))


def _both(errors: Counts) -> str:
    return f"{quantile(errors, 0.5):8.3f} {quantile(errors, 0.9):8.3f}"


def _factors(samples: Samples, width: str) -> str:
    factors = [
        samples.total("embedsvc_cost_correction", width=width, quantile=quantile)
        for quantile in ("0.5", "0.95")
    ]
    return f"{factors[0]:12.2f} {factors[1]:7.2f}"


if __name__ == "__main__":
    main()
