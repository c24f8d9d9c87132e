"""Closed loop: a fixed number of clients, each with one call at a time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from embedsvc.bench.connection import Connection, ReplyError
from embedsvc.bench.open_loop import Call
from embedsvc.bench.outcome import LOST, MALFORMED, OK, Outcome, Result, ending_of

# A refused client that comes back at once would measure nothing but refusals.
REFUSED_PAUSE_S = 0.1


class ClosedLoop:
    """Sends calls, checks every reply, keeps what finishes inside the window.

    The window opens when `n_warmup` calls have finished and closes `n_measured` calls later, so
    that it holds the workload once, however fast the server is. Calls repeat in order until then.
    """

    def __init__(self, calls: list[Call], dim: int, n_warmup: int, n_measured: int) -> None:
        self._calls: Iterator[Call] = itertools.cycle(calls)
        self._dim = dim
        self._opens, self._closes = n_warmup, n_warmup + n_measured
        self._n_finished = 0
        self._opened = time.perf_counter()
        self._outcome = Outcome()

    async def run(self, host: str, port: int, n_clients: int) -> Outcome:
        """Run the clients until the window has closed."""
        self._opened = time.perf_counter()
        self._outcome.n_connections = n_clients
        await asyncio.gather(*(self._client(Connection(host, port)) for _ in range(n_clients)))
        return self._outcome

    def stop(self) -> None:
        """Close the window now; clients end with the calls they have sent."""
        self._closes = self._n_finished

    async def _client(self, connection: Connection) -> None:
        while self._n_finished < self._closes:
            call = next(self._calls)
            sent = time.perf_counter()
            ending, tokens = await self._ending(connection, call)
            self._count(Result(ending, sent, sent, time.perf_counter(), call.n_texts, tokens))
            if ending != OK:
                await asyncio.sleep(REFUSED_PAUSE_S)
        connection.close()

    async def _ending(self, connection: Connection, call: Call) -> tuple[str, int]:
        try:
            answer = await connection.send(call.request)
        except OSError:
            return LOST, 0
        except ReplyError:
            return MALFORMED, 0
        return ending_of(answer, call.n_texts, self._dim)

    def _count(self, result: Result) -> None:
        self._n_finished += 1
        if self._n_finished == self._opens:
            self._opened = result.finished
        if self._opens < self._n_finished <= self._closes:
            self._outcome.seconds = result.finished - self._opened
            self._outcome.results.append(result)
