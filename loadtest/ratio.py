"""The price of serving: tokens/s over HTTP beside the offline limit of the same model.

`python -m loadtest.ratio` alternates the two in one run, since machines change their speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from embedsvc.bench.outcome import Outcome
from embedsvc.bench.serving import served
from loadtest import workload
from loadtest.client import run_closed

BAR = 0.78


def main() -> None:
    """Print both rates of every round and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=workload.N_TEXTS)
    parser.add_argument("--dim", type=int, default=384)
    args, flags = parser.parse_known_args()
    texts = workload.mixed(args.texts)
    rates: dict[str, list[float]] = {"served": [], "offline": []}
    for turn in range(1, args.rounds + 1):
        outcome = served_rate(texts, flags, n_clients=args.clients, dim=args.dim)
        rates["served"].append(outcome.tokens_per_s)
        print(f"served  {turn}: {json.dumps(outcome.summary())}", flush=True)
        offline = offline_rate(texts, flags)
        rates["offline"].append(float(offline["tokens_per_s"]))
        print(f"offline {turn}: {json.dumps(offline)}", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["served"] / medians["offline"]
    print(
        f"served {medians['served']:.0f} tokens/s, offline {medians['offline']:.0f} tokens/s, "
        f"ratio {ratio:.3f} (bar {BAR})"
    )
    sys.exit(ratio < BAR)


def served_rate(texts: list[str], flags: list[str], *, n_clients: int, dim: int) -> Outcome:
    """Serve, warm up, measure one pass over the texts, stop."""
    with served(*flags) as server:
        outcome = run_closed(server.address, server.model, texts, dim=dim, n_clients=n_clients)
    if outcome.errors:
        sys.exit(f"served with errors: {dict(outcome.errors)}")
    return outcome


def offline_rate(texts: list[str], flags: list[str]) -> dict[str, float]:
    """Run `embedsvc bench offline` on the same texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.jsonl")
        workload.write(texts, path)
        command = [sys.executable, "-m", "embedsvc.cli", "bench", "offline", "--json"]
        done = subprocess.run(
            [*command, "--texts", str(path), *flags], stdout=subprocess.PIPE, check=True
        )
    result: dict[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
