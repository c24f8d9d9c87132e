"""Memory under random shapes: `python -m loadtest.memory`.

Resident memory of the server after 5,000 requests of random lengths, and after all of them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys

import psutil

from embedsvc.bench.serving import served
from embedsvc.bench.texts import words
from loadtest.client import run_closed

BAR = 1.05
N_FIRST = 5_000
MAX_WORDS = 400


def random_texts(n_texts: int, seed: int) -> list[str]:
    """Return texts of 1 to `MAX_WORDS` words, every order of magnitude as likely."""
    rng = random.Random(seed)
    lengths = (round(math.exp(rng.uniform(0, math.log(MAX_WORDS)))) for _ in range(n_texts))
    return [words(rng, length) for length in lengths]


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children, in MiB."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return float(sum(member.memory_info().rss for member in family)) / 2**20


def main() -> None:
    """Print resident memory after 5,000 requests, every further 5,000, and the ratio."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "hash"])
    args = parser.parse_args()
    sizes: list[float] = []
    with served("--backend", args.backend) as server:
        for turn in range(args.requests // N_FIRST):
            outcome = run_closed(
                server.address,
                "all-MiniLM-L6-v2",
                random_texts(N_FIRST, seed=turn),
                dim=384,
                n_clients=args.clients,
                n_warmup=0,
            )
            sizes.append(resident_mib(server.pid))
            done = (turn + 1) * N_FIRST
            rate = outcome.texts_per_s
            print(f"{done:6} requests: {sizes[-1]:.0f} MiB, {rate:.0f} texts/s", flush=True)
            if outcome.errors:
                sys.exit(f"errors: {dict(outcome.errors)}")
    ratio = sizes[-1] / sizes[0]
    print(f"{sizes[0]:.0f} MiB -> {sizes[-1]:.0f} MiB, ratio {ratio:.3f} (bar {BAR})")
    sys.exit(ratio > BAR)


if __name__ == "__main__":
    main()
