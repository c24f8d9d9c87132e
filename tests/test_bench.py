"""The load connection and the benchmarks' own arithmetic."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.bench.connection import Connection, ReplyError, embeddings_body, post, read_reply
from embedsvc.bench.offline import sorted_batches
from embedsvc.bench.texts import builtin_texts, read_texts
from embedsvc.engine.buckets import Limits
from loadtest import workload
from loadtest.quality import ndcg
from tests.wire import DIM, VECTOR, http, listening, reply


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
