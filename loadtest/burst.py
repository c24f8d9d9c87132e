"""Burst: `python -m loadtest.burst` sends 3,000 calls at once, each on a connection of its own.

What a document store does that embeds all chunks of an upload concurrently, without any retry.
"""

from __future__ import annotations

import argparse

import numpy as np

from embedsvc.bench.open_loop import calls_for, run_open
from embedsvc.bench.outcome import OK
from embedsvc.bench.serving import served
from loadtest import workload
from loadtest.target import DIM, Bars, arguments, raise_open_files


def main() -> None:
    """Print how the calls ended; all must be answered with vectors."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--calls", type=int, default=3_000)
    parser.add_argument("--give-up-s", type=float, default=120.0)
    args, flags = arguments(parser)
    texts = workload.mixed(args.calls)
    # First the server, so that it has to see to its own limit of open files.
    with served(*flags) as server:
        raise_open_files()
        outcome = run_open(
            server.address,
            calls_for(*server.address, server.model, texts),
            np.zeros(args.calls),
            dim=DIM,
            n_connections=args.calls,
            give_up_s=args.give_up_s,
        )
    print(outcome.table(), end="\n\n")
    bars = Bars()
    bars.at_least("connections", outcome.n_connections, args.calls)
    bars.at_least("answered", outcome.endings[OK], args.calls)
    bars.exit()


if __name__ == "__main__":
    main()
