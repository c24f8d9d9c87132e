"""Load client: `python -m loadtest.client --url http://127.0.0.1:8000 --rate 200 --slo-ms 250`.

Without a rate the loop is closed: every client sends its next call when its last is answered. With
one it is open: when each call leaves is fixed before the run, whatever the server does meanwhile.
One event loop with raw connections, since it shares the machine with the server.
"""

from __future__ import annotations

import argparse
import json
import sys
from urllib.parse import urlsplit

import uvloop

from embedsvc.bench.open_loop import MAX_LAG_MS, N_CONNECTIONS, calls_for, run_open
from embedsvc.bench.outcome import Outcome, percentiles_ms
from loadtest import workload
from loadtest.arrivals import KINDS, arrivals
from loadtest.closed import ClosedLoop


def run_closed(
    address: tuple[str, int],
    model: str,
    texts: list[str],
    *,
    dim: int,
    n_clients: int,
    texts_per_call: int = 1,
    n_warmup: int = 500,
    n_measured: int | None = None,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Measure a closed loop from a thread without an event loop."""
    calls = calls_for(*address, model, texts, texts_per_call, headers)
    loop = ClosedLoop(calls, dim, n_warmup, len(calls) if n_measured is None else n_measured)
    return uvloop.run(loop.run(*address, n_clients))


def fell_behind(outcome: Outcome) -> bool:
    """Whether calls left so late that the client measured itself; says so on stderr."""
    lag = percentiles_ms(outcome.lags).get("p99", 0.0)
    if lag > MAX_LAG_MS:
        print(f"the client fell behind its schedule: {lag:.0f} ms at p99", file=sys.stderr)
    return lag > MAX_LAG_MS


def main() -> None:
    """Measure a running server with the mixed workload."""
    args = _arguments()
    url = urlsplit(args.url)
    address = (url.hostname or "127.0.0.1", url.port or 80)
    texts = workload.mixed(args.texts)
    headers = {} if args.timeout_s is None else {"x-request-timeout": f"{args.timeout_s:g}"}
    if args.rate is None:
        outcome = run_closed(
            address,
            args.model,
            texts,
            dim=args.dim,
            n_clients=args.clients,
            texts_per_call=args.texts_per_call,
            n_warmup=args.warmup,
            headers=headers,
        )
    else:
        outcome = run_open(
            address,
            calls_for(*address, args.model, texts, args.texts_per_call, headers),
            arrivals(args.arrivals, args.rate, args.seconds, args.seed),
            dim=args.dim,
            n_connections=args.connections,
            give_up_s=args.give_up_s,
        )
        fell_behind(outcome)
    if args.json:
        print(json.dumps(outcome.summary(args.slo_ms), indent=2))
    else:
        print(outcome.table(args.slo_ms))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--texts", type=int, default=workload.N_TEXTS)
    parser.add_argument("--texts-per-call", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, help="deadline that every call states")
    parser.add_argument("--slo-ms", type=float, help="what a good answer takes at most")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    closed = parser.add_argument_group("closed loop")
    closed.add_argument("--clients", type=int, default=64)
    closed.add_argument("--warmup", type=int, default=500, help="calls before the window opens")
    open_ = parser.add_argument_group("open loop")
    open_.add_argument("--rate", type=float, help="calls per second")
    open_.add_argument("--seconds", type=float, default=20.0)
    open_.add_argument("--arrivals", choices=KINDS, default="poisson")
    open_.add_argument("--seed", type=int, default=0)
    open_.add_argument("--connections", type=int, default=N_CONNECTIONS, help="open at once")
    open_.add_argument("--give-up-s", type=float, default=60.0, help="hang up after so long")
    return parser.parse_args()


if __name__ == "__main__":
    main()
