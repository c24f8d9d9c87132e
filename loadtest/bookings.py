"""Refused and told when to come back: `python -m loadtest.bookings`.

The rate of a few clients is taken for what the server can do. Then so many calls come at once that
30 seconds of work are refused; each refused client comes back once, when it was told to.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field

import uvloop

from embedsvc.bench.connection import Answer, Connection
from embedsvc.bench.open_loop import Call, calls_for
from embedsvc.bench.outcome import OK, REJECTED, TIMED_OUT, ending_of
from embedsvc.bench.serving import served
from embedsvc.engine.admission import promised_s
from loadtest import workload
from loadtest.client import run_closed
from loadtest.target import DIM, Bars, arguments, raise_open_files

REFUSED_S = 30.0
# Deadline of a call, and which of it the server may promise with its default settings.
TIMEOUT_S = 20.0
ACCEPTED_S = promised_s(0.95 * TIMEOUT_S - 0.05, max_age_s=5.0)
TEXTS_PER_CALL = 16
N_CLIENTS, N_CALLS = 8, 100

MIN_ADMITTED = 0.8
_RETRY_AFTER_MS = re.compile(rb"\r\nretry-after-ms: *(\d+)\r", re.IGNORECASE)


@dataclass(slots=True)
class Tally:
    """How calls ended at the first try, and those of them that were refused at the second."""

    first: Counter[str] = field(default_factory=Counter)
    second: Counter[str] = field(default_factory=Counter)
    told_s: list[float] = field(default_factory=list)


def main() -> None:
    """Print how calls ended at either try, and the share of the refused that were admitted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--refused-s", type=float, default=REFUSED_S, help="work to be refused")
    args, flags = arguments(parser)
    with served("--log-level", "error", *flags) as server:
        raise_open_files()
        closed = run_closed(
            server.address,
            server.model,
            workload.mixed(),
            dim=DIM,
            n_clients=N_CLIENTS,
            texts_per_call=TEXTS_PER_CALL,
            n_warmup=N_CALLS // 4,
            n_measured=N_CALLS,
        )
        seconds = ACCEPTED_S + args.refused_s
        n_calls = round(closed.texts_per_s * seconds / TEXTS_PER_CALL)
        print(
            f"{closed.texts_per_s:.0f} texts/s; {n_calls} calls of {TEXTS_PER_CALL} texts at once"
        )
        headers = {"x-request-timeout": f"{TIMEOUT_S:g}"}
        texts = workload.mixed(n_calls * TEXTS_PER_CALL)
        calls = calls_for(*server.address, server.model, texts, TEXTS_PER_CALL, headers)
        tally = uvloop.run(burst(server.address, calls))
    judge(tally, closed.texts_per_s)


async def burst(address: tuple[str, int], calls: list[Call]) -> Tally:
    """Send all calls at once, each on a connection of its own; the refused once more, as told."""
    tally = Tally()

    async def client(call: Call) -> None:
        connection = Connection(*address)
        answer = await connection.send(call.request)
        ending, _ = ending_of(answer, call.n_texts, DIM)
        tally.first[ending] += 1
        if ending == REJECTED:
            tally.told_s.append(told_s(answer))
            await asyncio.sleep(tally.told_s[-1])
            answer = await connection.send(call.request)
            tally.second[ending_of(answer, call.n_texts, DIM)[0]] += 1
        connection.close()

    await asyncio.gather(*map(client, calls))
    return tally


def told_s(answer: Answer) -> float:
    """Return the seconds after which a refused client may come back; 0 where it was not told."""
    stated = _RETRY_AFTER_MS.search(answer.head)
    return int(stated[1]) / 1e3 if stated else 0.0


def judge(tally: Tally, texts_per_s: float) -> None:
    """Print every bar and end the process."""
    print(f"first try: {dict(tally.first)}\nsecond try of the refused: {dict(tally.second)}")
    n_refused = tally.first[REJECTED]
    print(f"refused: {n_refused * TEXTS_PER_CALL / texts_per_s:.1f} s of work at that rate")
    if tally.told_s:
        print(f"told to come back after {min(tally.told_s):.1f} to {max(tally.told_s):.1f} s\n")
    bars = Bars()
    bars.at_least("refused at the first try", n_refused, 1)
    others = (tally.first + tally.second).keys() - {OK, REJECTED, TIMED_OUT}
    bars.empty("other endings", sorted(others))
    bars.at_most("admitted, but not done in time", (tally.first + tally.second)[TIMED_OUT], 0)
    share = 1 - tally.second[REJECTED] / max(1, n_refused)
    bars.at_least("admitted at the second try, of the refused", share, MIN_ADMITTED)
    bars.exit()


if __name__ == "__main__":
    main()
