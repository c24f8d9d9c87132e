"""When calls leave in an open loop: independently, or in the rhythm of a recorded service.

Pure: knows nothing of clocks, sockets or servers.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from embedsvc.bench.open_loop import Offsets, poisson
from loadtest.workload import DATA

Kind = Literal["poisson", "conv", "code"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def arrivals(kind: Kind, rate: float, seconds: float, seed: int = 0) -> Offsets:
    """Return when calls leave, `rate` a second on average.

    Args:
        kind: `poisson`, or the rhythm of a recorded service: `conv` is close to Poisson, `code`
            comes in bursts.
        rate: calls per second.
        seconds: length of the run.
        seed: draws the times, or where in the recording the run begins.
    """
    rng = np.random.default_rng(seed)
    if kind == "poisson":
        return poisson(rate, seconds, rng)
    times = trace_times(DATA / "traces" / f"azure_{kind}_2023.csv")
    return scaled(np.diff(times), rate, seconds, rng)


def scaled(gaps: Offsets, rate: float, seconds: float, rng: np.random.Generator) -> Offsets:
    """Return recorded arrivals, stretched so that the wanted number fills the run.

    The burstiness stays, since all gaps are stretched alike. A recording that is too short begins
    again at its end.

    Args:
        gaps: `(n,) float64` seconds between recorded arrivals.
        rate: calls per second.
        seconds: length of the run.
        rng: draws the first of the gaps.
    """
    n_calls = max(1, round(rate * seconds))
    first = rng.integers(len(gaps))
    picked = gaps[(first + np.arange(n_calls)) % len(gaps)]
    ends = np.cumsum(picked)
    starts: Offsets = (ends - picked) * (seconds / ends[-1])
    return starts


def trace_times(path: Path) -> Offsets:
    """Return the arrival times of a recording in seconds, ascending."""
    with path.open(newline="") as lines:
        stamps = [row["TIMESTAMP"] for row in csv.DictReader(lines)]
    times = np.sort(np.array(stamps, dtype="datetime64[ns]")).astype(np.int64)
    seconds: Offsets = (times - times[0]) / 1e9
    return seconds
