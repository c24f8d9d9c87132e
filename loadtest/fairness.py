"""Queries beside an upload: `python -m loadtest.fairness`.

One client uploads 2,048 texts a request without end, while single queries arrive in an open loop.
Their latency is compared with that on the idle server, the upload's tokens per second with those it
has alone. The upload comes from a process of its own, so that reading its large answers delays no
query.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from embedsvc.bench.connection import Connection
from embedsvc.bench.open_loop import MAX_LAG_MS, calls_for, poisson, run_open
from embedsvc.bench.outcome import OK, Outcome, ending_of, percentiles_ms
from embedsvc.bench.scrape import Address, info, scrape
from embedsvc.bench.serving import Server, served
from loadtest import workload
from loadtest.client import run_closed
from loadtest.target import DIM, Bars, arguments

# The idle server must have time to spare, or its p99 is that of a queue.
MOST_OF_CAPACITY = 0.5
CAPACITY_CLIENTS, CAPACITY_CALLS = 4, 400
# In which the upload fills the queue before anything is measured.
LEAD_S = 5.0
PAUSE_S = 0.1
UPLOAD_HEADERS = {"x-request-timeout": "600"}

MAX_TIMES_IDLE, MORE_MS = 3.0, 250.0
MIN_KEPT = 0.85


@dataclass(slots=True)
class Window:
    """What the device did in some seconds beside an upload.

    Attributes:
        seconds: its length.
        texts: that went through the model, of whoever.
        tokens: theirs, padding excluded.
        endings: how the uploads ended that began in it or shortly before or after.
    """

    seconds: float = 0.0
    texts: float = 0.0
    tokens: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        rates = (
            f"{self.texts / self.seconds:.1f} texts/s, {self.tokens / self.seconds:.0f} tokens/s"
        )
        endings = "  ".join(f"{name} {count}" for name, count in self.endings.items())
        return f"{self.seconds:.1f} s, {rates}, uploads: {endings}"


def main() -> None:
    """Print latencies and rates alone and together, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rate", type=float, default=30.0, help="queries per second")
    parser.add_argument("--queries", type=int, default=1_000, help="in each run, at least")
    parser.add_argument("--texts", type=int, default=2_048, help="of one upload")
    args, flags = arguments(parser)
    questions, _ = workload.questions_and_passages()
    with served("--log-level", "error", *flags) as server:
        rate = affordable_rate(server, questions, args.rate)
        # A tenth more, since chance decides how many arrive.
        seconds = 1.1 * args.queries / rate
        idle = queries(server, questions, rate, seconds)
        print(f"queries, {rate:.3g}/s, idle server:\n{idle.table()}\n", flush=True)
        with uploading(server, args.texts, seconds) as alone:
            time.sleep(seconds)
        print(f"upload alone: {alone}\n", flush=True)
        with uploading(server, args.texts, seconds) as beside:
            among = queries(server, questions, rate, seconds)
        print(f"queries, {rate:.3g}/s, beside the upload:\n{among.table()}\n")
        print(f"all beside the queries: {beside}\n", flush=True)
        cost = uvloop.run(info(server.address))["cost"]
    judge(idle, among, alone, beside, cost, args.queries)


def affordable_rate(server: Server, questions: list[str], wanted: float) -> float:
    """Return the wanted rate, or a lower one where the idle server could hardly keep up; say so."""
    closed = run_closed(
        server.address,
        server.model,
        questions,
        dim=DIM,
        n_clients=CAPACITY_CLIENTS,
        n_warmup=CAPACITY_CALLS // 4,
        n_measured=CAPACITY_CALLS,
    )
    capacity = closed.texts_per_s
    rate = min(wanted, MOST_OF_CAPACITY * capacity)
    print(f"single queries, {CAPACITY_CLIENTS} clients: {capacity:.0f}/s", flush=True)
    if rate < wanted:
        print(
            f"RATE SCALED DOWN: {rate:.3g} instead of {wanted:g} queries a second, "
            f"{MOST_OF_CAPACITY:g} of what this server can do at most"
        )
    return rate


def queries(server: Server, questions: list[str], rate: float, seconds: float) -> Outcome:
    """Send single queries in an open loop."""
    calls = calls_for(*server.address, server.model, questions)
    offsets = poisson(rate, seconds, np.random.default_rng(0))
    return run_open(server.address, calls, offsets, dim=DIM)


# --- the upload ----------------------------------------------------------------------------------


@contextmanager
def uploading(server: Server, n_texts: int, seconds: float) -> Iterator[Window]:
    """Upload from another process meanwhile; the window is filled in at the end."""
    window = Window()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        # A process takes a while to start.
        uploads = pool.submit(upload, server.address, server.model, n_texts, seconds + 2 * LEAD_S)
        time.sleep(LEAD_S)
        before, began = uvloop.run(scrape(server.address)), time.perf_counter()
        yield window
        after, window.seconds = uvloop.run(scrape(server.address)), time.perf_counter() - began
        window.endings = uploads.result()
    for of in ((before, -1.0), (after, 1.0)):
        window.texts += of[1] * of[0].total("embedsvc_batch_rows_sum")
        window.tokens += of[1] * of[0].total("embedsvc_tokens_total", kind="real")


def upload(address: Address, model: str, n_texts: int, seconds: float) -> Counter[str]:
    """Upload again and again for some seconds; return how the requests ended."""
    return uvloop.run(_upload(address, model, n_texts, seconds))


async def _upload(address: Address, model: str, n_texts: int, seconds: float) -> Counter[str]:
    calls = calls_for(*address, model, workload.mixed(2 * n_texts), n_texts, UPLOAD_HEADERS)
    endings = Counter[str]()
    connection = Connection(*address)
    until = time.perf_counter() + seconds
    for call in itertools.cycle(calls):
        if time.perf_counter() > until:
            break
        answer = await connection.send(call.request)
        ending, _ = ending_of(answer, call.n_texts, DIM)
        endings[ending] += 1
        if ending != OK:
            await asyncio.sleep(PAUSE_S)
    connection.close()
    return endings


# --- figures -------------------------------------------------------------------------------------


def judge(
    idle: Outcome,
    among: Outcome,
    alone: Window,
    beside: Window,
    cost: dict[str, Any],
    n_queries: int,
) -> None:
    """Print every bar and end the process."""
    bars = Bars()
    for name, outcome in (("idle", idle), ("beside the upload", among)):
        bars.at_least(f"queries answered, {name}", len(outcome.answered), n_queries)
        lag = percentiles_ms(outcome.lags).get("p99", 0.0)
        bars.at_most(f"client's own lag, p99, {name}", lag, MAX_LAG_MS, " ms")
    bars.empty("queries without vectors", dict(idle.errors + among.errors))
    failed = alone.endings + beside.endings
    del failed[OK]
    bars.empty("uploads without vectors", dict(failed))
    idle_ms, among_ms = (
        percentiles_ms([one.latency for one in outcome.answered]).get("p99", float("inf"))
        for outcome in (idle, among)
    )
    limit_ms = MAX_TIMES_IDLE * idle_ms + MORE_MS
    print(f"     queries' p99 on the idle server: {idle_ms:.4g} ms")
    bars.at_most("queries' p99 beside the upload", among_ms, limit_ms, " ms")
    n_tokens = sum(one.tokens for one in among.answered)
    kept = (beside.tokens - n_tokens) / beside.seconds / (alone.tokens / alone.seconds)
    bars.at_least("the upload's tokens per second, of those alone", kept, MIN_KEPT)
    queries_s = cost["c1"] * len(among.answered) + cost["c2"] * n_tokens
    all_s = cost["c1"] * beside.texts + cost["c2"] * beside.tokens
    print(
        f"     the queries' share: {n_tokens / beside.tokens:.1%} of the tokens, "
        f"{queries_s / all_s:.1%} of the predicted time of rows"
    )
    bars.exit()


if __name__ == "__main__":
    main()
