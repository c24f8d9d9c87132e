"""Chaos: `python -m loadtest.chaos` breaks a server under random load and checks every answer.

Everything random comes from `--seed`; what the clients see also depends on the machine. Requests
are lost (no answer), wrong (other vectors, an error they should not get, an answer too many) or
late (0.25 s over their deadline, without the time that the client itself was kept from running);
none may be. Where the client was late too often, or others used the machine, late answers are not
judged, and the run says so. Most calls must come back right, and some after every fault. Afterwards
the server must hold no more than before the first one.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NoReturn

import msgspec
import uvloop

from embedsvc.bench.connection import Connection, post
from embedsvc.bench.scrape import seconds_to_idle
from loadtest.census import Bystanders, Census, census
from loadtest.chaos.checker import Verdict
from loadtest.chaos.client import User, Watch
from loadtest.chaos.faults import (
    Target,
    break_config,
    faults_for,
    inject,
    left_behind,
)
from loadtest.chaos.plan import MOST_TEXTS, Habits, Visit, schedule, visits
from loadtest.chaos.report import Report, report
from loadtest.chaos.setup import prepared
from loadtest.target import Bars, arguments

# Load before the first fault.
WARM_UP_S = 2.0
# Requests at once, so that every pool of threads grows to its size: that of the event loop by
# bodies that are decoded there, that of the tokenizer by texts that take more than one thread.
N_LARGE, LARGE_CHARACTERS = 32, 1 << 21
N_MANY, MANY_TEXTS = 16, 64
# A process that was stopped while it loaded is given up after a minute.
RECOVERED_WITHIN_S, IDLE_WITHIN_S = 75.0, 5.0
# Calls that must be answered right: a real model is down for seconds after each fault.
LEAST_RIGHT, LEAST_RIGHT_OF_REAL = 0.8, 0.5
MOST_SKIPPED = 0.2


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        report: of the calls.
        left_behind: what the server held more of afterwards.
        busy: gauges that did not come back to zero.
        last: how a call ended after everything.
        n_planned: faults that were to happen.
        n_skipped: faults for which there was nothing to break.
    """

    report: Report
    left_behind: dict[str, str]
    busy: dict[str, float]
    last: Verdict
    n_planned: int
    n_skipped: int


def main() -> None:
    """Print how calls ended, a table by fault, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that serve HTTP")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--most-texts", type=int, default=MOST_TEXTS, help="of one request")
    parser.add_argument("--gap-s", type=float, default=10.0, help="mean time between faults")
    # A model that hangs is noticed after ten seconds.
    parser.add_argument("--calm-s", type=float, default=15.0, help="without faults at the end")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    parser.add_argument("--backend", default="hash", choices=["auto", "torch", "hash"])
    parser.add_argument("--least-right", type=float, help="share of calls to be answered right")
    args, flags = arguments(parser)
    with prepared(
        args.backend, flags, workers=args.workers, seed=args.seed, log=args.log
    ) as target:
        outcome = uvloop.run(storm(target, args))
    show(outcome)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2))
    usual = LEAST_RIGHT if args.backend == "hash" else LEAST_RIGHT_OF_REAL
    judge(outcome, usual if args.least_right is None else args.least_right)


async def storm(target: Target, args: argparse.Namespace) -> Outcome:
    """Let users come and faults happen; see what is left afterwards."""
    run, watch = target.run, Watch()
    exact = run.pool.exact
    habits = Habits(len(run.pool.texts), args.most_texts, ("raise", "nan") if exact else ())
    watching = asyncio.create_task(watch.look())
    users = [
        asyncio.create_task(User(run, f"user{k}").live(visits(args.seed, k, habits)))
        for k in range(args.users)
    ]
    bystanders = Bystanders(target.pid)
    before = await warmed_up(target)
    began, end = perf_counter(), max(0.0, args.seconds - args.calm_s)
    planned = schedule(args.seed, faults_for(target), end=end, mean_gap_s=args.gap_s)
    await inject(target, planned, began)
    await asyncio.sleep(max(0.0, began + args.seconds - perf_counter()))
    run.over.set()
    await asyncio.gather(*users, *run.background)
    watching.cancel()
    others_cores = bystanders.cores()
    last = await last_call(target)
    _, busy = await seconds_to_idle(run.address, IDLE_WITHIN_S)
    return Outcome(
        report=report(run.calls, target.journal, watch.stalls, watch.lag_p99_s, others_cores),
        left_behind=await left_behind(target, before),
        busy=busy,
        last=last,
        n_planned=len(planned),
        n_skipped=target.n_skipped,
    )


async def warmed_up(target: Target) -> Census:
    """Let the server make what it makes once, when it is first needed; count what it holds."""
    await break_config(target)
    run = target.run
    for n, model, texts in (
        (N_LARGE, "nobody's", ["a" * LARGE_CHARACTERS]),
        (N_MANY, run.model, run.pool.texts[:MANY_TEXTS]),
    ):
        await asyncio.gather(*(ask(target, model, texts) for _ in range(n)))
    await asyncio.sleep(WARM_UP_S)
    target.journal.clear()
    return census(target.pid)


async def ask(target: Target, model: str, texts: list[str]) -> None:
    """Send some texts and wait for the answer, whatever it is."""
    address = target.run.address
    connection = Connection(*address)
    body = msgspec.json.encode({"model": model, "input": texts})
    await connection.send(post(*address, "/v1/embeddings", body))
    connection.close()


async def last_call(target: Target) -> Verdict:
    """Return how a call ends when there are no more faults, the first that is answered right."""
    until = perf_counter() + RECOVERED_WITHIN_S
    while True:
        call = await User(target.run, f"last{perf_counter():.0f}").once(Visit(picks=range(32)))
        if call.verdict is Verdict.RIGHT or perf_counter() > until:
            return call.verdict
        await asyncio.sleep(1)


def show(outcome: Outcome) -> None:
    """Print the figures."""
    found = outcome.report
    print("  ".join(f"{name} {count}" for name, count in found.endings.most_common()))
    print(f"faults without anything to break: {outcome.n_skipped}")
    print(f"client late by {found.lag_p99_s * 1e3:.0f} ms at p99; ", end="")
    print(f"others took {found.others_cores:.2f} cores", end="\n\n")
    print(found.table(), end="\n\n")
    for complaint, count in found.complaints.most_common(20):
        print(f"{count} x {complaint}")


def judge(outcome: Outcome, least_right: float) -> NoReturn:
    """Print every bar and end the process.

    Args:
        outcome: of the run.
        least_right: share of the calls that must be answered right, without those whose clients
            left and those that break the model.
    """
    bars, found = Bars(), outcome.report
    bars.at_most("lost", found.total("lost"), 0)
    bars.at_most("wrong", found.total("wrong"), 0)
    if found.in_time:
        bars.at_most("late", found.total("late"), 0)
        bars.at_least("answered right", found.right_share, least_right)
    else:
        figures = f"late {found.total('late')}, answered right {found.right_share:.2f}"
        print(f"---- {figures}, not judged: client or machine were too busy")
    bars.at_most("faults never recovered from", found.total("unrecovered"), 0)
    skipped = outcome.n_skipped / max(1, outcome.n_planned)
    bars.at_most("faults without anything to break, share", skipped, MOST_SKIPPED)
    bars.empty("gauges", outcome.busy)
    bars.empty("left behind", outcome.left_behind)
    bars.empty("last call", "" if outcome.last is Verdict.RIGHT else outcome.last)
    bars.exit()


if __name__ == "__main__":
    main()
