"""Smoke run: `python -m loadtest.smoke` lets locust's users at a weightless server for 20 s.

The exit status is locust's: 0 where no request failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from embedsvc.bench.serving import served
from loadtest.shapes import SHAPES

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def main() -> None:
    """Serve vectors without a model, run locust, return its status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--shape", choices=SHAPES, default="spike")
    args = parser.parse_args()
    with served("--backend", "hash", "--log-level", "warning") as server:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
        command += ["--host", f"http://{server.host}:{server.port}", "--only-summary"]
        command += ["-u", str(args.users), "-t", f"{args.seconds}s", "--shape", args.shape]
        status = subprocess.run(command, check=False).returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
