"""Several HTTP processes: `python -m loadtest.workers`, with weightless vectors.

Requests per second of one worker and of two, and the cores that the server and this process use
meanwhile; how evenly connections are spread; and a renewal (SIGHUP) under load, whose clients never
ask twice: they call over kept connections and reconnect only where an answer has told them to.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
import psutil
import uvloop

from embedsvc.bench.connection import Connection, ReplyError, get
from embedsvc.bench.open_loop import Call, calls_for
from embedsvc.bench.outcome import OK, ending_of, percentiles_ms
from embedsvc.bench.pipeline import requests_per_s
from embedsvc.bench.scrape import Address
from embedsvc.bench.serving import Server, served
from loadtest import workload
from loadtest.target import DIM, Bars, arguments, raise_open_files

FLAGS = ("--backend", "hash")
RENEWED = "all workers are renewed"
# So many that chance alone keeps their spread far within the bar.
N_SPREAD = 1024
MAX_UNEVEN = 0.2
# A few clients as in a pool, and what they may wait for one renewal.
N_CLIENTS, GIVE_UP_S = 32, 120.0
AFTER_S = 1.0


class Rate(NamedTuple):
    """One measurement of requests per second.

    Attributes:
        workers: processes that served.
        per_s: requests answered a second.
        server_cores: cores that the server's processes used, on average.
        other_cores: cores that everything else on the machine used, the load included.
    """

    workers: int
    per_s: float
    server_cores: float
    other_cores: float


def main() -> None:
    """Print every measurement and the bars."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of one and of two workers in turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    parser.add_argument("--renewals", type=int, default=3)
    args, flags = arguments(parser)
    bars = Bars()
    compare_rates(args.rounds, args.seconds, flags)
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "log").open("w+") as log,
        served(*FLAGS, *flags, "--workers", "2", log=log) as server,
    ):
        raise_open_files()
        for n_connections in (64, N_SPREAD):
            judge_spread(uvloop.run(spread(server.address, n_connections)), bars)
        calls = calls_for(*server.address, server.model, workload.mixed())
        judge_renewals(uvloop.run(renewals(server, Path(log.name), calls, args.renewals)), bars)
    bars.exit()


# --- requests per second -------------------------------------------------------------------------


def compare_rates(rounds: int, seconds: float, flags: list[str]) -> None:
    """Print the rates of one and of two workers, in turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for workers, found in rates.items():
            with served(*FLAGS, *flags, "--workers", str(workers)) as server:
                rate = measured(server, workers, seconds)
            found.append(rate.per_s)
            print(
                f"{workers} worker(s): {rate.per_s:.0f} requests/s; cores used: server "
                f"{rate.server_cores:.2f}, all else {rate.other_cores:.2f} of {psutil.cpu_count()}",
                flush=True,
            )
    one, two = (statistics.median(found) for found in rates.values())
    print(f"median {one:.0f} and {two:.0f} requests/s, two / one {two / one:.2f}\n", flush=True)


def measured(server: Server, workers: int, seconds: float) -> Rate:
    """Drive a server, and note who used the processors."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]

    def used() -> tuple[float, float]:
        own = sum(sum(process.cpu_times()[:2]) for process in family)
        times = psutil.cpu_times()
        return own, sum(times) - times.idle - times.iowait - own

    began, before = perf_counter(), used()
    per_s = requests_per_s(server, seconds)
    own, other = (
        (after - earlier) / (perf_counter() - began)
        for after, earlier in zip(used(), before, strict=True)
    )
    return Rate(workers, per_s, own, other)


# --- the spread of connections -------------------------------------------------------------------


async def spread(address: Address, n_connections: int) -> Counter[int]:
    """Open connections and count them by the worker that has them."""
    request = get(*address, "/info")
    connections = [Connection(*address) for _ in range(n_connections)]
    numbers: Counter[int] = Counter()
    for connection in connections:
        answer = await connection.send(request)
        numbers[msgspec.json.decode(answer.body)["worker"]["number"]] += 1
    for connection in connections:
        connection.close()
    return numbers


def judge_spread(numbers: Counter[int], bars: Bars) -> None:
    """Print how far the worker with most connections is from an even share."""
    n_connections = numbers.total()
    uneven = max(numbers.values()) / (n_connections / 2) - 1
    what = f"{n_connections} connections, most over an even share"
    if n_connections == N_SPREAD:
        bars.at_most(what, uneven, MAX_UNEVEN)
    else:
        print(f"     {what}: {uneven:.3f} (chance; no bar)", flush=True)


# --- renewal under load --------------------------------------------------------------------------


class Renewals(NamedTuple):
    """What clients saw of some renewals.

    Attributes:
        took_s: of each renewal.
        seconds: of the calls that got vectors.
        failures: of the others, by reason.
    """

    took_s: list[float]
    seconds: list[float]
    failures: Counter[str]


async def renewals(server: Server, log: Path, calls: list[Call], n_renewals: int) -> Renewals:
    """Keep clients calling while the workers are renewed some times."""
    seen = Renewals([], [], Counter())
    over = asyncio.Event()
    supply = itertools.cycle(calls)

    async def client() -> None:
        connection = Connection(*server.address)
        while not over.is_set():
            await call_once(connection, next(supply), seen)
        connection.close()

    async def renew() -> None:
        for n_before in range(n_renewals):
            began = perf_counter()
            server.process.send_signal(signal.SIGHUP)
            while (await asyncio.to_thread(log.read_text)).count(RENEWED) == n_before:
                if perf_counter() - began > GIVE_UP_S:
                    seen.failures["workers not renewed in time"] += 1
                    break
                await asyncio.sleep(0.05)
            seen.took_s.append(perf_counter() - began)
            await asyncio.sleep(AFTER_S)
        over.set()

    await asyncio.gather(renew(), *(client() for _ in range(N_CLIENTS)))
    return seen


async def call_once(connection: Connection, call: Call, seen: Renewals) -> None:
    """Call, and never again."""
    began = perf_counter()
    try:
        answer = await connection.send(call.request)
    except (OSError, ReplyError) as error:
        seen.failures[f"lost: {error!r}"] += 1
        connection.close()
        return
    ending, _ = ending_of(answer, call.n_texts, DIM)
    if ending == OK:
        seen.seconds.append(perf_counter() - began)
    else:
        seen.failures[ending] += 1


def judge_renewals(seen: Renewals, bars: Bars) -> None:
    """Print the figures."""
    took = " ".join(f"{seconds:.1f}" for seconds in seen.took_s)
    print(f"renewals took s: {took}; calls answered, ms: {percentiles_ms(seen.seconds)}")
    bars.at_least("calls answered during the renewals", len(seen.seconds), 1)
    bars.empty("failed calls, none asked twice", dict(seen.failures))


if __name__ == "__main__":
    main()
