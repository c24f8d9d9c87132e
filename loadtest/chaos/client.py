"""Users that do what the plan says and note what they see. Event loop only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import msgspec
import numpy as np

from embedsvc.bench.connection import Answer, post
from embedsvc.bench.scrape import Address
from loadtest.chaos.checker import Call, Stall, Verdict, judge, told_to_wait_s, tried_s
from loadtest.chaos.faulty import poisoned_text
from loadtest.chaos.plan import Leave, Visit
from loadtest.chaos.texts import Pool

# A request without an answer so long after its deadline gets none.
GIVE_UP_S = 30.0
CONNECT_S = 10.0
HANG_UP_S = 5.0
# A slow reader takes so much at once, then rests; a whole answer of 2,048 texts in two seconds.
PIECE_BYTES, REST_S = 16 * 1024, 0.005
# A loop that wakes later than this was kept from running.
TICK_S, STALL_S = 0.02, 0.02

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(slots=True)
class Run:
    """What all users of a run share.

    Attributes:
        address: of the server.
        model: name of the served model.
        pool: the texts.
        default_deadline_s: of the server, for requests that state none.
        hang_up_s: how long a client that closed its half waits for the server's.
        calls: what was seen.
        in_flight: requests that wait for their answers now.
        over: no new requests.
        background: users that are no part of the steady load.
    """

    address: Address
    model: str
    pool: Pool
    default_deadline_s: float
    hang_up_s: float = HANG_UP_S
    calls: list[Call] = field(default_factory=list)
    in_flight: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    background: list[asyncio.Task[Call]] = field(default_factory=list)


class User:
    """One client with one connection, one request at a time."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._name = name
        self._n_calls = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def live(self, visits: Iterable[Visit]) -> None:
        """Make one visit after the other until the run is over."""
        for visit in visits:
            await asyncio.sleep(visit.pause_s)
            if self._run.over.is_set():
                break
            call = await self.call(visit)
            await self._rest(call.retry_after_s)
        await self._part()

    async def _rest(self, seconds: float) -> None:
        """Wait, unless the run is over before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._run.over.wait()

    async def once(self, visit: Visit) -> Call:
        """Make one visit and close the connection."""
        call = await self.call(visit)
        await self._part()
        return call

    async def call(self, visit: Visit) -> Call:
        """Make one visit and note how it ended."""
        self._n_calls += 1
        request_id = f"{self._name}-{self._n_calls}"
        deadline_s = visit.timeout_s or self._run.default_deadline_s
        call = Call(
            0, inf, 0.0, deadline_s, Verdict.LOST,
            n_texts=len(visit.picks), poisoned=bool(visit.poison),
        )  # fmt: skip
        self._run.in_flight += 1
        try:
            async with asyncio.timeout(visit.leave_after_s):
                call = await self._exchange(visit, request_id, call)
        except TimeoutError:
            call = call._replace(verdict=Verdict.LEFT)
            await self._hang_up(visit.leave)
        finally:
            self._run.in_flight -= 1
        self._run.calls.append(call)
        return call

    async def _exchange(self, visit: Visit, request_id: str, call: Call) -> Call:
        port, sent = 0, inf
        try:
            reader, writer = await self._connected(fresh=visit.fresh)
            port = writer.get_extra_info("sockname")[1]
            began, sent = await self._send(writer, visit, request_id)
            async with asyncio.timeout(call.deadline_s + GIVE_UP_S):
                answer, answered = await _read(reader, slow=visit.slow_reader)
        except (OSError, EOFError) as error:
            ended = perf_counter()
            await self._hang_up("reset")
            why = f"no answer: {type(error).__name__}: {error}"
            return call._replace(port=port, sent=min(sent, ended), answered=ended, why=why)
        verdict, why = judge(visit, request_id, answer, self._run.pool)
        # The server cannot have begun before, however late this process noticed what it had sent.
        tried = answered - began
        if verdict is Verdict.EXPIRED and tried < tried_s(visit, self._run.default_deadline_s):
            early = f"gave up early, after {tried:.2f} of {call.deadline_s:g} s"
            verdict, why = Verdict.WRONG, early
        if _CLOSE.search(answer.head):
            await self._part()
        return call._replace(
            port=port,
            sent=sent,
            answered=answered,
            verdict=verdict,
            why=why,
            retry_after_s=told_to_wait_s(verdict, answer),
        )

    async def _connected(self, *, fresh: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is not None and (fresh or self._reader.at_eof()):
            await self._part()
        if self._writer is not None and self._writer.is_closing():
            self._reader = self._writer = None
        if self._reader is None or self._writer is None:
            async with asyncio.timeout(CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(*self._run.address)
            # Written is what the kernel has.
            self._writer.transport.set_write_buffer_limits(0)
        return self._reader, self._writer

    async def _send(
        self, writer: asyncio.StreamWriter, visit: Visit, request_id: str
    ) -> tuple[float, float]:
        """Send a request, slowly where its client is slow.

        Returns:
            When its last piece began to be sent, and when it was.
        """
        began = perf_counter()
        request = self._request(visit, request_id)
        size = -(-len(request) // (len(visit.upload_pauses_s) + 1))
        try:
            for start, pause_s in zip(
                range(0, len(request), size), [*visit.upload_pauses_s, 0.0], strict=False
            ):
                if writer.is_closing():
                    break
                began = perf_counter()
                writer.write(request[start : start + size])
                await writer.drain()
                await asyncio.sleep(pause_s)
        except ConnectionError:
            # The answer may have come before the end of the upload.
            pass
        return began, perf_counter()

    def _request(self, visit: Visit, request_id: str) -> bytes:
        texts = [self._run.pool.texts[pick] for pick in visit.picks]
        for row, poison in visit.poison.items():
            texts[row] = poisoned_text(poison, request_id)
        headers = {"x-request-id": request_id}
        if visit.timeout_s is not None:
            headers["x-request-timeout"] = f"{visit.timeout_s:g}"
        written_as = "float" if visit.floats else "base64"
        given = {"model": self._run.model, "input": texts, "encoding_format": written_as}
        body = msgspec.json.encode(given)
        return post(*self._run.address, "/v1/embeddings", body, headers)

    async def _part(self) -> None:
        """End an idle connection; what still comes over it answers nothing that was asked."""
        rest = await self._hang_up("half-close")
        if rest:
            now = perf_counter()
            why = f"{len(rest)} bytes after the last answer: {rest!r:.100}"
            self._run.calls.append(Call(0, now, now, inf, Verdict.WRONG, why))

    async def _hang_up(self, how: Leave) -> bytes:
        """End the connection in one of three ways; return what still came."""
        if self._reader is None or self._writer is None:
            return b""
        reader, writer = self._reader, self._writer
        self._reader = self._writer = None
        rest = b""
        try:
            if how == "reset":
                writer.transport.abort()
            elif how == "half-close":
                writer.write_eof()
                async with asyncio.timeout(self._run.hang_up_s):
                    rest = await reader.read()
        except OSError:
            writer.transport.abort()
        writer.close()
        return rest


async def _read(reader: asyncio.StreamReader, *, slow: bool) -> tuple[Answer, float]:
    """Return an answer, and when it was there or, for a slow reader, began.

    Raises:
        EOFError: the connection ended before it was complete.
        OSError: so it did.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    began = perf_counter()
    found = _LENGTH.search(head)
    if found is None:
        raise EOFError(f"no content-length in {head!r:.200}")
    left = int(found[1])
    pieces = []
    while slow and left > PIECE_BYTES:
        pieces.append(await reader.readexactly(PIECE_BYTES))
        left -= PIECE_BYTES
        await asyncio.sleep(REST_S)
    pieces.append(await reader.readexactly(left))
    answer = Answer(int(head[9:12]), head[:-2], b"".join(pieces))
    return answer, began if slow else perf_counter()


class Watch:
    """Notes when the client itself was kept from running."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._lags: list[float] = []

    async def look(self) -> None:
        """Look at the clock again and again, without end."""
        while True:
            expected = perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            lag = perf_counter() - expected
            self._lags.append(lag)
            if lag > STALL_S:
                self.stalls.append(Stall(expected, expected + lag))

    @property
    def lag_p99_s(self) -> float:
        """How late the loop woke, at p99."""
        return float(np.percentile(self._lags, 99)) if self._lags else 0.0
