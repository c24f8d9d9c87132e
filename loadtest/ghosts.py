"""Clients that vanish: `python -m loadtest.ghosts` drops 1,000 requests at random moments.

Half of them leave one by one: during the upload, or at any time until a little after the answer.
The other half are sent at once and dropped together while nearly all of them wait. Afterwards
nothing of them may be left in the queue, nor may the model have computed more of them than were on
the device when they left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import Counter
from time import perf_counter

import uvloop

from embedsvc.bench.connection import Connection, embeddings_body, post, read_reply
from embedsvc.bench.scrape import Address, info, scrape, seconds_to_idle
from embedsvc.bench.serving import served
from loadtest.target import DIM, Bars, arguments, raise_open_files

# Every ghost sends the same text, so that computed tokens tell how many rows were computed.
TEXT = "Where can I see which of my orders have been sent and which are still being packed? " * 3
N_AT_ONCE = 50
UPLOAD_SHARE = 0.2
N_IDLE_CALLS = 50
IDLE_WITHIN_S = 2.0
MAX_OF_IDLE = 2.0
# Batches a slot may finish for those who left: the one it runs, one chosen while they hang up, and
# one while the server notices that so many have.
BATCHES_PER_SLOT = 3


def main() -> None:
    """Print what became of the requests, what was computed for nobody, and every bar."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ghosts", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = arguments(parser)
    with served(*flags) as server:
        raise_open_files()
        request = post(*server.address, "/v1/embeddings", embeddings_body(server.model, [TEXT]))
        uvloop.run(haunt(server.address, request, args.ghosts, args.seed))


async def haunt(address: Address, request: bytes, n_ghosts: int, seed: int) -> None:
    """Run both halves and end the process."""
    bars = Bars()
    # Kept, so that a call afterwards costs no more than one before.
    connection = Connection(*address)
    idle_s, n_tokens = await idle_latency(connection, request)
    print(f"idle: {idle_s * 1e3:.1f} ms, a text has {n_tokens} tokens", flush=True)

    endings = await one_by_one(address, request, n_ghosts // 2, N_AT_ONCE * idle_s, seed)
    print(f"one by one: {dict(endings)}", flush=True)
    await judge_quiet(address, connection, request, idle_s, bars)

    model = await info(address)
    rows = max(1, model["max_batch_tokens"] // n_tokens) * model["slots"] * BATCHES_PER_SLOT
    n_queued, n_computed = await all_at_once(address, request, n_ghosts // 2, n_tokens)
    print(f"together: {n_queued:.0f} in the queue when they left", flush=True)
    bars.at_most("together: rows computed after they left", n_computed, rows)
    await judge_quiet(address, connection, request, idle_s, bars)
    connection.close()
    bars.exit()


async def idle_latency(connection: Connection, request: bytes) -> tuple[float, int]:
    """Return the median seconds of one call after the other, and the tokens of its text."""
    seconds = []
    tokens = 0
    for _ in range(N_IDLE_CALLS):
        began = perf_counter()
        answer = await connection.send(request)
        seconds.append(perf_counter() - began)
        tokens = read_reply(answer.body, 1, DIM).usage.prompt_tokens
    return statistics.median(seconds), tokens


async def judge_quiet(
    address: Address, connection: Connection, request: bytes, idle_s: float, bars: Bars
) -> None:
    """Print whether the queue empties, and what the next call takes."""
    seconds, busy = await seconds_to_idle(address, IDLE_WITHIN_S)
    bars.empty(f"gauges after {seconds:.2f} s", busy)
    began = perf_counter()
    answer = await connection.send(request)
    took = perf_counter() - began
    read_reply(answer.body, 1, DIM)
    bars.at_most("next call, of the idle latency", took / idle_s, MAX_OF_IDLE)


# --- one by one ----------------------------------------------------------------------------------


async def one_by_one(
    address: Address, request: bytes, n_ghosts: int, patience_s: float, seed: int
) -> Counter[str]:
    """Let ghosts come and go, `N_AT_ONCE` at a time; count at what stage they left."""
    rng = random.Random(seed)
    endings: Counter[str] = Counter()
    remaining = iter(range(n_ghosts))

    async def visitor() -> None:
        for _ in remaining:
            endings[await ghost(address, request, rng, rng.uniform(0, patience_s))] += 1

    await asyncio.gather(*(visitor() for _ in range(N_AT_ONCE)))
    return endings


async def ghost(address: Address, request: bytes, rng: random.Random, patience_s: float) -> str:
    """Send a request, or a part of it, and leave after some seconds in one of three ways."""
    reader, writer = await asyncio.open_connection(*address)
    whole = rng.random() >= UPLOAD_SHARE
    writer.write(request if whole else request[: rng.randrange(len(request))])
    try:
        async with asyncio.timeout(patience_s):
            answered = await reader.read(1) != b""
    except TimeoutError:
        answered = False
    leave = rng.choice(("close", "reset", "half-close"))
    if leave == "reset":
        writer.transport.abort()
    elif leave == "half-close":
        writer.write_eof()
        await _closed_by_server(reader)
    writer.close()
    return "answered" if answered else "left waiting" if whole else "left uploading"


async def _closed_by_server(reader: asyncio.StreamReader) -> None:
    """Wait a little for the server to hang up too; it may also answer or reset."""
    try:
        async with asyncio.timeout(IDLE_WITHIN_S):
            await reader.read()
    except OSError:
        return


# --- all at once ---------------------------------------------------------------------------------


async def all_at_once(
    address: Address, request: bytes, n_ghosts: int, n_tokens: int
) -> tuple[float, float]:
    """Send all requests, drop them as soon as they wait.

    Returns:
        Texts in the queue when they were dropped, and rows computed after that.
    """
    connections = [Connection(*address) for _ in range(n_ghosts)]
    for start in range(0, n_ghosts, N_AT_ONCE):
        await asyncio.gather(*(one.connect() for one in connections[start : start + N_AT_ONCE]))
    answers = [connection.start(request) for connection in connections]
    # Answered after all that is in the sockets by now.
    before = await scrape(address)
    for answer, connection in zip(answers, connections, strict=True):
        if not answer.cancel():
            # Its failure is of no interest.
            answer.exception()
        connection.close()
    await seconds_to_idle(address, IDLE_WITHIN_S)
    after = await scrape(address)
    n_before, n_after = (
        samples.total("embedsvc_tokens_total", kind="real") / n_tokens
        for samples in (before, after)
    )
    return before.total("embedsvc_queue_sequences"), n_after - n_before


if __name__ == "__main__":
    main()
