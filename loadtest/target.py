"""What the measurements of a server share: their arguments, and their figures against bars."""

from __future__ import annotations

import argparse
import resource
import sys
from typing import NoReturn

DIM = 384


def arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own arguments, and the others, which are flags of `embedsvc serve`."""
    parser.epilog = "Other flags are those of `embedsvc serve`, as --backend hash."
    return parser.parse_known_args()


def raise_open_files() -> None:
    """Let this process open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Bars:
    """Prints measured figures beside what they must be; the exit status says whether all are."""

    def __init__(self) -> None:
        self._met = True

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Print a figure that must not be above its limit."""
        self._show(value <= limit, f"{what}: {value:.4g}{unit} (bar: at most {limit:g}{unit})")

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Print a figure that must not be below its limit."""
        self._show(value >= limit, f"{what}: {value:.4g}{unit} (bar: at least {limit:g}{unit})")

    def empty(self, what: str, things: object) -> None:
        """Print a collection that must be empty."""
        self._show(not things, f"{what}: {things or 'none'} (bar: none)")

    def exit(self) -> NoReturn:
        """End the process: status 0 where every bar is met, 1 where one is not."""
        sys.exit(not self._met)

    def _show(self, met: bool, line: str) -> None:
        self._met &= met
        print(f"{'ok  ' if met else 'MISS'} {line}", flush=True)
