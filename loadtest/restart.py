"""Restart under load: `python -m loadtest.restart` ends the server twice while clients call it.

The clients retry what cannot have been accepted: no connection, a connection that ended before the
server read the request, 503 and 429. A request that was accepted and then lost has failed, and so
has any other answer than vectors.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

import uvloop

from embedsvc.bench.connection import Answer, Connection
from embedsvc.bench.open_loop import Call, calls_for
from embedsvc.bench.outcome import OK, ending_of, percentiles_ms
from embedsvc.bench.scrape import Address
from embedsvc.bench.serving import Server, served
from loadtest import workload
from loadtest.target import DIM, Bars, arguments

RETRY_S = 0.1
# One call, all its tries together.
GIVE_UP_S = 90.0
# Where a connection ends so soon after a request was written, the two crossed: it was kept and just
# closed, or not accepted yet. Whoever waited longer had been accepted.
CROSSED_S = 0.05
BETWEEN_S = 5.0
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class Tally:
    """What the clients saw.

    Attributes:
        seconds: of the calls that got vectors, all tries together.
        retries: by reason.
        failures: by reason.
    """

    seconds: list[float] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Print calls, retries and failures; none may fail."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    args, flags = arguments(parser)
    with ExitStack() as stack:
        servers = [stack.enter_context(served(*flags))]
        address = servers[0].address
        calls = calls_for(*address, servers[0].model, workload.mixed())

        def restart() -> None:
            stack.close()
            again = served(*flags, "--port", str(address[1]))
            servers.append(stack.enter_context(again))

        tally = uvloop.run(run(address, calls, args.clients, args.restarts, restart))
    judge(tally, servers)


async def run(
    address: Address,
    calls: list[Call],
    n_clients: int,
    n_restarts: int,
    restart: Callable[[], None],
) -> Tally:
    """Keep clients calling while the server is ended and started again, some times."""
    tally = Tally()
    over = asyncio.Event()
    supply = itertools.cycle(calls)

    async def client() -> None:
        connection = Connection(*address)
        while not over.is_set():
            await call_until_answered(connection, next(supply), tally)
        connection.close()

    async def restarts() -> None:
        for _ in range(n_restarts):
            await asyncio.sleep(BETWEEN_S)
            await asyncio.to_thread(restart)
        await asyncio.sleep(BETWEEN_S)
        over.set()

    await asyncio.gather(restarts(), *(client() for _ in range(n_clients)))
    return tally


async def call_until_answered(connection: Connection, call: Call, tally: Tally) -> None:
    """Send one call, again as long as it was not accepted."""
    began = perf_counter()
    while perf_counter() - began < GIVE_UP_S:
        retry, reason, pause_s = await attempt(connection, call)
        if reason == OK:
            tally.seconds.append(perf_counter() - began)
            return
        (tally.retries if retry else tally.failures)[reason] += 1
        await asyncio.sleep(pause_s)
        if not retry:
            return
    tally.failures["gave up"] += 1


async def attempt(connection: Connection, call: Call) -> tuple[bool, str, float]:
    """Try once.

    Returns:
        Whether another try is in order, how this one ended, and the seconds to wait.
    """
    try:
        await connection.connect()
    except OSError:
        return True, "no connection", RETRY_S
    sent = perf_counter()
    try:
        async with asyncio.timeout(GIVE_UP_S):
            answer = await connection.start(call.request)
    except OSError as error:
        connection.close()
        return *after_loss(error, perf_counter() - sent), RETRY_S
    ending, _ = ending_of(answer, call.n_texts, DIM)
    return answer.status in (429, 503), ending, _pause_s(answer)


def after_loss(error: OSError, waited_s: float) -> tuple[bool, str]:
    """Return whether a request may be tried again whose connection ended after some seconds."""
    crossed = waited_s < CROSSED_S
    return crossed, "crossed" if crossed else f"lost: {error!r}"


def _pause_s(answer: Answer) -> float:
    stated = _RETRY_AFTER.search(answer.head)
    return float(stated[1]) if stated else RETRY_S


def judge(tally: Tally, servers: list[Server]) -> None:
    """Print the figures and end the process."""
    print(f"{len(tally.seconds)} calls answered, ms: {percentiles_ms(tally.seconds)}")
    print(f"tries that were not accepted: {dict(tally.retries)}", end="\n\n")
    bars = Bars()
    bars.empty("failed calls", dict(tally.failures))
    statuses = [server.process.returncode for server in servers]
    bars.empty("exit statuses but 0", [status for status in statuses if status != 0])
    bars.at_least("servers", len(servers), 2)
    bars.exit()


if __name__ == "__main__":
    main()
