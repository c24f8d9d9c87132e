"""The load client and the benchmarks' own arithmetic."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.bench.connection import Connection, ReplyError, embeddings_body, post, read_reply
from embedsvc.bench.offline import sorted_batches
from embedsvc.bench.texts import builtin_texts, read_texts
from embedsvc.engine.policy import Limits
from loadtest import workload
from loadtest.client import Load, Outcome, calls_for, closed_loop
from loadtest.quality import ndcg

DIM = 5
VECTOR = base64.b64encode(bytes(4 * DIM)).decode()
# Answers one request that was read whole; returns what is written back.
Answering = Callable[[bytes], Awaitable[bytes]]


def reply(n_texts: int, tokens: int = 7) -> bytes:
    """Return a reply with `n_texts` vectors as JSON."""
    data = [{"embedding": VECTOR, "index": index} for index in range(n_texts)]
    return msgspec.json.encode({"data": data, "usage": {"prompt_tokens": tokens}})


def http(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    """Return a whole HTTP reply."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


@asynccontextmanager
async def listening(answer: Answering) -> AsyncIterator[tuple[str, int]]:
    """Run a server of whole requests on a free port; yield its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            written = await answer(await reader.readexactly(length))
            for start in range(0, len(written), 50):
                writer.write(written[start : start + 50])
                await writer.drain()
            if not written or b"connection: close" in written:
                break

    handlers: list[asyncio.Task[None]] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        with suppress(asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    async with server:
        yield "127.0.0.1", server.sockets[0].getsockname()[1]
        await asyncio.gather(*handlers)


async def test_answers_are_cut_out_of_the_stream() -> None:
    """Two requests on one connection get their own answers, however the bytes arrive."""

    async def echo(body: bytes) -> bytes:
        return http(body[::-1])

    async with listening(echo) as address:
        connection = Connection(*address)
        first = await connection.send(post(*address, "/", b"abc" * 100))
        second = await connection.send(post(*address, "/", b""))
        connection.close()

    assert (first.status, first.body) == (200, b"cba" * 100)
    assert second.body == b""


async def test_a_closed_connection_is_opened_again() -> None:
    """After `connection: close` the next request opens a new connection."""

    async def once(body: bytes) -> bytes:
        return http(body, "503 Busy", "connection: close\r\n")

    async with listening(once) as address:
        connection = Connection(*address)
        statuses = [(await connection.send(post(*address, "/", b"x"))).status for _ in range(3)]
        connection.close()

    assert statuses == [503, 503, 503]


async def test_a_connection_lost_before_the_answer_is_an_error() -> None:
    """The sender is told when the server goes away without an answer."""

    async def leave(_: bytes) -> bytes:
        return b""

    async with listening(leave) as address:
        with pytest.raises(ConnectionResetError):
            await Connection(*address).send(post(*address, "/", b"x"))


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        reply(1),
        reply(3),
        reply(2).replace(b'"index":1', b'"index":0'),
        reply(2).replace(VECTOR.encode(), VECTOR[4:].encode(), 1),
        msgspec.json.encode({"data": [{"embedding": [0.0] * 4, "index": 0}] * 2}),
    ],
)
def test_a_reply_of_another_shape_is_refused(body: bytes) -> None:
    """Count, order and size of the vectors are checked in every reply."""
    with pytest.raises(ReplyError):
        read_reply(body, 2, DIM)


def test_a_reply_of_the_right_shape_is_read() -> None:
    """A reply gives vectors and tokens."""
    assert read_reply(reply(2, tokens=9), 2, DIM).usage.prompt_tokens == 9


def test_a_closed_loop_counts_the_window_once() -> None:
    """After warm-up exactly the measured calls count: texts, tokens, errors by kind."""
    outcome = uvloop.run(six_calls())

    assert (outcome.texts, outcome.tokens, dict(outcome.errors)) == (4, 28, {"429": 2})
    assert len(outcome.latencies["le_32"]) == 4
    assert outcome.seconds > 0
    assert outcome.summary()["errors"] == {"429": 2}


async def six_calls() -> Outcome:
    """Measure six calls after three, against a server that refuses every third."""
    answers = itertools.cycle([http(reply(1)), http(reply(1)), http(b"{}", "429 Busy")])

    async def answer(_: bytes) -> bytes:
        return next(answers)

    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a", "b"])
        load = Load(calls, DIM, n_warmup=3, n_measured=6)
        return await closed_loop(load, *address, n_clients=1)


def test_requests_carry_the_texts_as_they_are() -> None:
    """The body is the JSON that OpenAI's client would send."""
    body = msgspec.json.decode(embeddings_body("m", ["é\n", ""]))

    assert body == {"model": "m", "input": ["é\n", ""], "encoding_format": "base64"}


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(1, 200))
def test_offline_batches_hold_every_text_once(lengths: list[int], max_batch_tokens: int) -> None:
    """Every text is in exactly one batch, within tokens and rows, longest first."""
    limits = Limits(max_length=64, max_batch_tokens=max_batch_tokens, max_batch_size=16)
    batches = sorted_batches(lengths, limits)

    assert sorted(row for rows, _ in batches for row in rows) == list(range(len(lengths)))
    for rows, width in batches:
        assert len(rows) <= limits.rows(width)
        assert max(lengths[row] for row in rows) <= width <= 64
    widths = [width for _, width in batches]
    assert widths == sorted(widths, reverse=True)


def test_texts_survive_a_file(tmp_path: Path) -> None:
    """What the workload writes is what the benchmark reads."""
    texts = [*builtin_texts(20), "two\nlines", "\u2028 é"]
    workload.write(texts, tmp_path / "texts.jsonl")

    assert read_texts(tmp_path / "texts.jsonl") == texts
    assert builtin_texts(20) == texts[:20]


def test_ndcg_of_a_known_ranking() -> None:
    """One relevant document at rank 2 of one query, and at rank 1 of another."""
    scores = np.array([[0.9, 0.8, 0.1], [0.1, 0.2, 0.7]], np.float32)

    assert ndcg(scores, [{1: 1}, {2: 1}]) == pytest.approx((1 / np.log2(3) + 1) / 2)
