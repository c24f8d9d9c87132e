"""Chaos: `python -m loadtest.chaos` breaks a server under random load and checks every answer.

Everything random comes from `--seed`; what the clients see also depends on the machine. Requests
are lost (no answer), wrong (other vectors, an error they should not get, an answer too many) or
late (0.25 s over their deadline, without the time that the client itself was kept from running);
none may be. Where the client was late too often, or others used the machine, late answers are not
judged, and the run says so. Afterwards the server must hold no more than before the first fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import uvloop

from embedsvc.bench.scrape import seconds_to_idle
from embedsvc.bench.serving import Server, running
from embedsvc.config import DEFAULT_NAME
from loadtest.census import Bystanders, Census, census
from loadtest.chaos.checker import Verdict
from loadtest.chaos.client import Run, User, Watch
from loadtest.chaos.faults import FAULTS, WITHOUT_PROCESSES, Target, inject, reload_config
from loadtest.chaos.plan import MOST_TEXTS, Habits, Visit, schedule, visits
from loadtest.chaos.report import Report, report
from loadtest.chaos.texts import Pool, hashed, random_texts
from loadtest.target import Bars, arguments, raise_open_files
from loadtest.vectors import embed

N_TEXTS = 2_000
DEADLINE_S = 20.0
# Load before the first fault.
WARM_UP_S = 2.0
SETTLE_S, LOOK_S = 20.0, 0.5

CONFIG = f"""
[server]
timeout_s = {DEADLINE_S}
max_body_bytes = 671{{turn}}0000

[[models]]
name = "{DEFAULT_NAME}"

[[models.versions]]
"""
# Of the weightless model only: no measurement of it may be kept, and batches are to be many.
CONFIG_OF_HASH = """
[models.versions.batching]
max_batch_tokens = 4096
"""


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        report: of the calls.
        left_behind: what the server held more of afterwards.
        busy: gauges that did not come back to zero.
        last: how a call ended after everything.
        n_skipped: faults for which there was nothing to break.
    """

    report: Report
    left_behind: dict[str, str]
    busy: dict[str, float]
    last: Verdict
    n_skipped: int


def main() -> None:
    """Print how calls ended, a table by fault, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--most-texts", type=int, default=MOST_TEXTS, help="of one request")
    parser.add_argument("--gap-s", type=float, default=6.0, help="mean time between faults")
    # A model that hangs is noticed after ten seconds.
    parser.add_argument("--calm-s", type=float, default=15.0, help="without faults at the end")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    parser.add_argument("--backend", default="hash", choices=["auto", "torch", "hash"])
    args, flags = arguments(parser)
    outcome = chaos(args, flags)
    show(outcome)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2))
    judge(outcome)


def chaos(args: argparse.Namespace, flags: list[str]) -> Outcome:
    """Serve, and break what is served for some seconds."""
    raise_open_files()
    texts = random_texts(N_TEXTS, random.Random(args.seed))
    exact = args.backend == "hash"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((args.log or folder / "log").open("w"))
        text, file = config_of(folder, exact=exact), folder / "chaos.toml"
        file.write_text(text.replace("{turn}", "0"))
        command = [sys.executable, "-m", "loadtest.chaos.server", "serve", str(file)]
        command += ["--port", "0", "--backend", args.backend, *flags]
        with ThreadPoolExecutor() as threads:
            hashing = threads.submit(hashed, texts if exact else [])
            server = stack.enter_context(running(command, log=log))
        vectors = hashing.result()
        if not exact:
            vectors = embed(server.address, texts, n_clients=1, texts_per_call=1)
        run = Run(server.address, server.model, Pool(texts, vectors, exact), DEADLINE_S)
        return uvloop.run(storm(server, Target(server.pid, file, text, run), args))


def config_of(folder: Path, *, exact: bool) -> str:
    """Return the server's file; `{turn}` in it changes each time it is written."""
    if exact:
        return CONFIG.replace("[server]", f'[server]\ncache_dir = "{folder}"') + CONFIG_OF_HASH
    return CONFIG


async def storm(server: Server, target: Target, args: argparse.Namespace) -> Outcome:
    """Let users come and faults happen; see what is left afterwards."""
    run, watch = target.run, Watch()
    exact = run.pool.exact
    habits = Habits(len(run.pool.texts), args.most_texts, ("raise", "nan") if exact else ())
    watching = asyncio.create_task(watch.look())
    users = [
        asyncio.create_task(User(run, f"user{k}").live(visits(args.seed, k, habits)))
        for k in range(args.users)
    ]
    began, bystanders = perf_counter(), Bystanders(server.pid)
    # What is made once, when it is first needed, is there before anything is counted.
    await reload_config(target)
    await asyncio.sleep(WARM_UP_S)
    target.journal.clear()
    before = census(server.pid)
    planned = schedule(
        args.seed,
        faults_for(target, exact=exact),
        start=WARM_UP_S,
        end=max(WARM_UP_S, args.seconds - args.calm_s),
        mean_gap_s=args.gap_s,
    )
    await inject(target, planned, began)
    await asyncio.sleep(max(0.0, began + args.seconds - perf_counter()))
    run.over.set()
    await asyncio.gather(*users, *run.background)
    watching.cancel()
    others_cores = bystanders.cores()
    last = await User(run, "last").call(Visit(picks=range(32)))
    _, busy = await seconds_to_idle(server.address, SETTLE_S)
    return Outcome(
        report=report(run.calls, target.journal, watch.stalls, watch.lag_p99_s, others_cores),
        left_behind=await left_behind(server.pid, before),
        busy=busy,
        last=last.verdict,
        n_skipped=target.n_skipped,
    )


def faults_for(target: Target, *, exact: bool) -> list[str]:
    """Return what can be done to a server, as its processes tell."""
    if not target.models():
        return list(WITHOUT_PROCESSES)
    return [name for name in FAULTS if exact or name != "poison"]


async def left_behind(pid: int, before: Census) -> dict[str, str]:
    """Return what a server holds more of than before, once nothing of it goes away any more."""
    until = perf_counter() + SETTLE_S
    while True:
        more = before.left_behind(census(pid))
        if not more or perf_counter() > until:
            return more
        await asyncio.sleep(LOOK_S)


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


def judge(outcome: Outcome) -> None:
    """Print every bar and end the process."""
    bars, found = Bars(), outcome.report
    bars.at_most("lost", found.total("lost"), 0)
    bars.at_most("wrong", found.total("wrong"), 0)
    if found.in_time:
        bars.at_most("late", found.total("late"), 0)
    else:
        print(f"---- late: {found.total('late')}, not judged: client or machine were too busy")
    bars.empty("gauges", outcome.busy)
    bars.empty("left behind", outcome.left_behind)
    bars.empty("last call", "" if outcome.last is Verdict.RIGHT else outcome.last)
    bars.exit()


if __name__ == "__main__":
    main()
