"""What a process of its own costs a model, and how long it is away after kill -9.

`python -m loadtest.isolation` takes turns: the same weightless batches in this process and in
another; then the served model, in the server's process and in its own; then it ends that process
under load, several times. Every request must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

from embedsvc.bench.connection import Connection, get
from embedsvc.bench.open_loop import calls_for
from embedsvc.bench.serving import Server, served
from embedsvc.config import DEFAULT_SHA256, DEFAULT_SOURCE, VersionConfig
from embedsvc.models import Model, load_model
from embedsvc.models.source import resolve
from loadtest import workload
from loadtest.census import model_processes
from loadtest.client import run_closed
from loadtest.closed import ClosedLoop
from loadtest.target import DIM, Bars, arguments

MAX_OVERHEAD_S, MIN_RATIO, MAX_AWAY_S = 200e-6, 0.97, 8.0
# Rows and length of the batches whose overhead is measured.
SHAPES = ((1, 16), (8, 64), (32, 16))
N_BATCHES = 2_000
# Load around each kill.
BEFORE_S, POLL_S = 1.0, 0.02


def main() -> None:
    """Print overhead, ratio and recovery, each beside its bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=workload.N_TEXTS)
    parser.add_argument("--kills", type=int, default=3)
    args, flags = arguments(parser)
    bars = Bars()
    for shape, seconds in overheads(args.rounds).items():
        what = f"overhead of a batch of {shape[0]} x {shape[1]}, us"
        bars.at_most(what, seconds * 1e6, MAX_OVERHEAD_S * 1e6)
    texts = workload.mixed(args.texts)
    ratio = throughput_ratio(texts, args, flags)
    bars.at_least("tokens/s, isolated over in process", ratio, MIN_RATIO)
    away, failures = uvloop.run(recovery(texts, flags, n_clients=args.clients, n_kills=args.kills))
    bars.at_most("longest time without the model", max(away), MAX_AWAY_S, " s")
    bars.empty("calls that failed", failures)
    bars.exit()


# --- overhead ------------------------------------------------------------------------------------


def overheads(rounds: int) -> dict[tuple[int, int], float]:
    """Return the seconds that the way to the other process adds to a batch, by shape."""
    folder = resolve(DEFAULT_SOURCE, sha256=DEFAULT_SHA256)
    with tempfile.TemporaryDirectory() as cache:
        models = [
            load_model(VersionConfig(backend="hash", isolate=isolate), folder, Path(cache))
            for isolate in (False, True)
        ]
        try:
            return {shape: _overhead(models, shape, rounds) for shape in SHAPES}
        finally:
            for model in models:
                model.close()


def _overhead(models: list[Model], shape: tuple[int, int], rounds: int) -> float:
    here, there = models
    return statistics.median(
        _batch_s(there, *shape) - _batch_s(here, *shape) for _ in range(rounds)
    )


def _batch_s(model: Model, rows: int, length: int) -> float:
    """Return the median seconds of a batch."""
    buffer = model.allocate(rows * length, rows)
    buffer.fill([np.ones(length, np.int64)] * rows, [0] * rows, length)
    model.forward(buffer, rows, length)
    times = [time.perf_counter()]
    for _ in range(N_BATCHES):
        model.forward(buffer, rows, length)
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(times))


# --- the served model ----------------------------------------------------------------------------


def serving(folder: str, flags: list[str], *, isolate: bool) -> AbstractContextManager[Server]:
    """Serve the default model, isolated or not."""
    path = Path(folder, f"isolate-{isolate}.toml")
    path.write_text(
        f'[[models]]\nname = "m"\n[[models.versions]]\nsource = "{DEFAULT_SOURCE}"\n'
        f"isolate = {str(isolate).lower()}\n"
    )
    return served(str(path), *flags)


def throughput_ratio(texts: list[str], args: argparse.Namespace, flags: list[str]) -> float:
    """Return tokens per second with an isolated model over those in process."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * args.rounds):
            isolate = turn % 2 == 1
            with serving(folder, flags, isolate=isolate) as server:
                outcome = run_closed(
                    server.address, server.model, texts, dim=DIM, n_clients=args.clients
                )
            rates[isolate].append(outcome.tokens_per_s)
            where = "isolated" if isolate else "in process"
            print(f"{where}: {json.dumps(outcome.summary())}", flush=True)
    in_process, isolated = (statistics.median(rates[isolate]) for isolate in (False, True))
    return isolated / in_process


async def recovery(
    texts: list[str], flags: list[str], *, n_clients: int, n_kills: int
) -> tuple[list[float], dict[str, int]]:
    """End the model's process under load.

    Returns:
        Seconds from each end until the model was loaded again, and how the calls ended that did
        not get their vectors.
    """
    with tempfile.TemporaryDirectory() as folder, serving(folder, flags, isolate=True) as server:
        calls = calls_for(*server.address, server.model, texts)
        loop = ClosedLoop(calls, DIM, n_warmup=0, n_measured=1 << 62)
        load = asyncio.create_task(loop.run(*server.address, n_clients))
        away = [await _away_s(server) for _ in range(n_kills)]
        loop.stop()
        outcome = await load
    print(f"{len(outcome.results)} calls, seconds away: {[round(s, 1) for s in away]}")
    return away, dict(outcome.errors)


async def _away_s(server: Server) -> float:
    """End the model's process; return the seconds until another one has loaded the model."""
    await asyncio.sleep(BEFORE_S)
    probe = Connection(*server.address)
    (process,) = model_processes(server.pid)
    killed = time.perf_counter()
    process.kill()
    asked = get(*server.address, "/health/ready")
    for status in (503, 200):
        while (await probe.send(asked)).status != status:  # noqa: ASYNC110  # elsewhere
            await asyncio.sleep(POLL_S)
    probe.close()
    return time.perf_counter() - killed


if __name__ == "__main__":
    main()
