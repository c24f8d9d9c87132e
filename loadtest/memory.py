"""Memory: `python -m loadtest.memory` sends 200,000 requests, then kills the model 20 times.

Requests of random lengths and sizes, some of which hang up before they are answered, as in
`loadtest.chaos`. Growth counts from a tenth of them on, over all processes of the server. Nothing
may be left of a killed process: no descriptor, thread or block of shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from pathlib import Path
from time import perf_counter

import uvloop

from loadtest.census import census, resident_mib
from loadtest.chaos.checker import Verdict
from loadtest.chaos.client import User
from loadtest.chaos.faults import Target, left_behind
from loadtest.chaos.plan import Habits, Visit, visits
from loadtest.chaos.setup import prepared
from loadtest.target import Bars, arguments

MAX_GROWTH = 1.05
WARM_UP_SHARE = 0.1
N_SAMPLES = 20
LOOK_S = 0.2
# So many calls after each death, for the next one not to come before the model has worked.
N_BETWEEN = 64
BACK_WITHIN_S, RETRY_S = 60.0, 0.5


def main() -> None:
    """Print resident memory on the way, what crashes left behind, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--limit-s", type=float, default=3_600.0, help="end the load after it")
    parser.add_argument("--crashes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1, help="processes that serve HTTP")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-texts", type=int, default=8, help="of one request")
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "hash"])
    args, flags = arguments(parser)
    bars = Bars()
    with prepared(
        args.backend, flags, workers=args.workers, seed=args.seed, log=args.log
    ) as target:
        uvloop.run(measure(target, args, bars))
    bars.exit()


async def measure(target: Target, args: argparse.Namespace, bars: Bars) -> None:
    """Send the load, then break the model."""
    sizes = await soak(target, args)
    calls = target.run.calls
    print(dict(Counter(str(call.verdict) for call in calls)))
    bad = [call.why for call in calls if call.verdict in (Verdict.LOST, Verdict.WRONG)]
    bars.empty("lost or wrong", bad[:10])
    bars.at_least("requests", len(calls), args.requests)
    bars.at_most("MiB of the warm ones", sizes[-1] / sizes[0], MAX_GROWTH)
    if not target.models():
        print("---- crashes: the model has no process of its own")
        return
    before = census(target.pid)
    failed = sum([not await crash(target, k) for k in range(args.crashes)])
    bars.at_most("crashes without recovery", failed, 0)
    more = await left_behind(target, before)
    print(f"before {args.crashes} crashes: {before}\nafter: {census(target.pid)}")
    bars.empty("left behind", more)


async def soak(target: Target, args: argparse.Namespace) -> list[float]:
    """Send the load; return resident MiB from the end of the warm-up on."""
    run = target.run
    habits = Habits(len(run.pool.texts), args.most_texts, poison=(), mean_pause_s=0.0)
    users = [
        asyncio.create_task(User(run, f"user{k}").live(visits(args.seed, k, habits)))
        for k in range(args.users)
    ]
    began = perf_counter()
    step = max(1, args.requests // N_SAMPLES)
    due, sizes = int(args.requests * WARM_UP_SHARE), []
    while len(run.calls) < args.requests and perf_counter() - began < args.limit_s:
        await asyncio.sleep(LOOK_S)
        if len(run.calls) >= due:
            sizes.append(resident_mib(target.pid))
            seconds = perf_counter() - began
            print(f"{len(run.calls):7} requests, {seconds:5.0f} s: {sizes[-1]:.0f} MiB", flush=True)
            due += step
    run.over.set()
    await asyncio.gather(*users)
    return [*sizes, resident_mib(target.pid)]


async def crash(target: Target, number: int) -> bool:
    """Kill the model's process; say whether the next one works."""
    target.models()[0].kill()
    user = User(target.run, f"crash{number}")
    until = perf_counter() + BACK_WITHIN_S
    while (await user.once(Visit(picks=[number]))).verdict is not Verdict.RIGHT:
        if perf_counter() > until:
            return False
        await asyncio.sleep(RETRY_S)
    for _ in range(N_BETWEEN):
        await user.once(Visit(picks=[number]))
    return True


if __name__ == "__main__":
    main()
