"""Open loop: calls leave when they are due, however long the answers take.

Latency counts from when a call was due, so neither a slow server nor a late client hides waiting
time. Futures and callbacks instead of a task for each call: client and server share the machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import uvloop

from embedsvc.bench.connection import Answer, Connection, ReplyError, embeddings_body, post
from embedsvc.bench.outcome import GONE, LOST, MALFORMED, OK, Outcome, Result, ending_of

# When calls leave, `(n,) float64` seconds, ascending, from 0 up to the length of the run.
Offsets = npt.NDArray[np.float64]
# A client that leaves later than this, at p99, measures itself.
MAX_LAG_MS = 50.0
N_CONNECTIONS = 4_096


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> Offsets:
    """Return independent arrivals: given their number, they are uniform over the run."""
    times: Offsets = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
    return times


@dataclass(slots=True)
class Call:
    """One request, built beforehand."""

    request: bytes
    n_texts: int


def calls_for(
    host: str,
    port: int,
    model: str,
    texts: list[str],
    texts_per_call: int = 1,
    headers: dict[str, str] | None = None,
) -> list[Call]:
    """Return one call for every `texts_per_call` texts."""
    groups = [texts[i : i + texts_per_call] for i in range(0, len(texts), texts_per_call)]
    return [
        Call(post(host, port, "/v1/embeddings", embeddings_body(model, group), headers), len(group))
        for group in groups
    ]


class OpenLoop:
    """One run: sends calls on connections that are opened as they are needed.

    Args:
        address: host and port.
        calls: sent in order, again from the start where there are too few.
        dim: components of a vector.
        n_connections: most connections at once; calls that are due while all are taken wait.
        give_up_s: seconds after which the client hangs up on a call, or no longer sends one that
            found no connection.
    """

    def __init__(
        self,
        address: tuple[str, int],
        calls: list[Call],
        *,
        dim: int,
        n_connections: int,
        give_up_s: float,
    ) -> None:
        self._address = address
        self._calls = calls
        self._dim = dim
        self._max_connections = n_connections
        self._give_up_s = give_up_s
        self._n_connections = 0
        self._idle: list[Connection] = []
        self._waiting: deque[tuple[Call, float]] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._results: list[Result] = []
        self._n_calls = 0
        self._over = asyncio.Event()

    async def run(self, offsets: Offsets) -> Outcome:
        """Send one call at each offset; return when all of them have ended."""
        self._n_calls = len(offsets)
        began = time.perf_counter()
        for index, offset in enumerate(offsets.tolist()):
            due = began + offset
            # The loop's timers have whole milliseconds: rounded down, they would spin.
            while (wait := due - time.perf_counter()) > 0:  # noqa: ASYNC110  # a time, no event
                await asyncio.sleep(math.ceil(wait * 1e3) / 1e3)
            self._send(self._calls[index % len(self._calls)], due)
        if self._n_calls > 0:
            await self._over.wait()
        for connection in self._idle:
            connection.close()
        last_due = float(offsets[-1]) if self._n_calls > 0 else 0.0
        last_answer = max((one.finished for one in self._results if one.ending == OK), default=0.0)
        return Outcome(max(last_due, last_answer - began), self._results, self._n_connections)

    def _send(self, call: Call, due: float) -> None:
        if self._idle:
            self._dispatch(self._idle.pop(), call, due)
        elif self._n_connections < self._max_connections:
            self._n_connections += 1
            self._dispatch(Connection(*self._address), call, due)
        else:
            self._waiting.append((call, due))

    def _dispatch(self, connection: Connection, call: Call, due: float) -> None:
        if connection.connected:
            self._write(connection, call, due)
        else:
            task = asyncio.create_task(self._connect(connection, call, due))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: Connection, call: Call, due: float) -> None:
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._give_up_s):
                await connection.connect()
        except OSError as error:
            ending = GONE if isinstance(error, TimeoutError) else LOST
            self._end(connection, Result(ending, due, sent, time.perf_counter(), call.n_texts, 0))
        else:
            self._write(connection, call, due)

    def _write(self, connection: Connection, call: Call, due: float) -> None:
        sent = time.perf_counter()
        answer = connection.start(call.request)
        timer = asyncio.get_running_loop().call_later(self._give_up_s, answer.cancel)
        answer.add_done_callback(partial(self._answered, connection, timer, call, due, sent))

    def _answered(
        self,
        connection: Connection,
        timer: asyncio.TimerHandle,
        call: Call,
        due: float,
        sent: float,
        answer: asyncio.Future[Answer],
    ) -> None:
        finished = time.perf_counter()
        timer.cancel()
        ending, tokens = self._ending(answer, call.n_texts)
        if answer.cancelled() or answer.exception() is not None:
            connection.close()
            connection = Connection(*self._address)
        self._end(connection, Result(ending, due, sent, finished, call.n_texts, tokens))

    def _ending(self, answer: asyncio.Future[Answer], n_texts: int) -> tuple[str, int]:
        if answer.cancelled():
            return GONE, 0
        error = answer.exception()
        if error is not None:
            return MALFORMED if isinstance(error, ReplyError) else LOST, 0
        return ending_of(answer.result(), n_texts, self._dim)

    def _end(self, connection: Connection, result: Result) -> None:
        self._count(result)
        now = time.perf_counter()
        while self._waiting:
            call, due = self._waiting.popleft()
            if now - due < self._give_up_s:
                self._dispatch(connection, call, due)
                return
            self._count(Result(GONE, due, now, now, call.n_texts, 0))
        self._idle.append(connection)

    def _count(self, result: Result) -> None:
        self._results.append(result)
        if len(self._results) == self._n_calls:
            self._over.set()


def run_open(
    address: tuple[str, int],
    calls: list[Call],
    offsets: Offsets,
    *,
    dim: int,
    n_connections: int = N_CONNECTIONS,
    give_up_s: float = 60.0,
) -> Outcome:
    """Measure an open loop from a thread without an event loop."""
    loop = OpenLoop(address, calls, dim=dim, n_connections=n_connections, give_up_s=give_up_s)
    return uvloop.run(loop.run(offsets))
