"""Idle connections: `python -m loadtest.idle` keeps 10,000 open beside ordinary clients.

Half of them have sent a request and been answered, half have never sent anything.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np
import uvloop

from embedsvc.bench.connection import Connection, get
from embedsvc.bench.open_loop import Call, OpenLoop, calls_for
from embedsvc.bench.outcome import Outcome, percentiles_ms
from embedsvc.bench.scrape import Address
from embedsvc.bench.serving import served
from loadtest import workload
from loadtest.arrivals import arrivals
from loadtest.target import DIM, Bars, arguments, raise_open_files

# Connections that are being opened at once.
WAVE = 200
N_OTHERS = 64
# In which both sides close them, before the others are measured alone again.
SETTLE_S = 2.0
MAX_P50, MAX_P99 = 1.2, 1.5


def main() -> None:
    """Print the latency of others without and with idle connections, and their ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=20.0, help="calls per second of the others")
    parser.add_argument("--seconds", type=float, default=20.0)
    args, flags = arguments(parser)
    # First the server, so that it has to see to its own limit of open files.
    with served(*flags) as server:
        raise_open_files()
        calls = calls_for(*server.address, server.model, workload.mixed())
        uvloop.run(compare(server.address, calls, args))


async def compare(address: Address, calls: list[Call], args: argparse.Namespace) -> None:
    """Measure before, beside and after the idle connections; end the process."""

    async def measured() -> Outcome:
        loop = OpenLoop(address, calls, dim=DIM, n_connections=N_OTHERS, give_up_s=30.0)
        return await loop.run(arrivals("poisson", args.rate, args.seconds))

    bars = Bars()
    before = await measured()
    idle = await opened(address, args.connections)
    beside = await measured()
    n_still = sum(connection.connected for connection in idle)
    print(f"{len(idle)} connections opened, {n_still} of them still open at the end", flush=True)
    for connection in idle:
        connection.close()
    await asyncio.sleep(SETTLE_S)
    after = await measured()
    alone = Outcome(before.seconds + after.seconds, before.results + after.results, N_OTHERS)
    print(f"alone:\n{alone.table()}\n\nbeside idle connections:\n{beside.table()}\n")
    bars.at_least("idle connections", len(idle), args.connections)
    bars.empty("others' errors", dict(beside.errors + alone.errors))
    latencies = [[result.latency for result in run.answered] for run in (alone, beside)]
    without, with_ = (percentiles_ms(values) for values in latencies)
    for name, limit in (("p50", MAX_P50), ("p99", MAX_P99)):
        bars.at_most(f"others' {name}, beside / alone", with_[name] / without[name], limit)
    bars.exit()


async def opened(address: Address, n_connections: int) -> list[Connection]:
    """Open connections; let every second one ask for its health. Return those that succeeded."""
    request = get(*address, "/health/live")

    async def one(index: int) -> Connection | None:
        connection = Connection(*address)
        try:
            await connection.connect()
            if index % 2:
                await connection.send(request)
        except OSError:
            return None
        return connection

    connections: list[Connection | None] = []
    for wave in np.array_split(np.arange(n_connections), max(1, n_connections // WAVE)):
        connections += await asyncio.gather(*(one(index) for index in wave.tolist()))
    return [connection for connection in connections if connection is not None]


if __name__ == "__main__":
    main()
