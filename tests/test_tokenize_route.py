"""Many long texts at `POST /tokenize`: nobody waits for them, and nobody tokenizes for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from embedsvc.errors import ClientGone
from embedsvc.http.decoding import INLINE_BYTES
from tests.http_fakes import URL
from tests.http_real import Gate, RealService, config_of
from tests.http_wire import Site, Wire, serving

TEXT = "some words of a text " * 1000


@pytest.fixture
async def real(tmp_path: Path) -> RealService:
    """Return a service that is not started."""
    return RealService(config_of(tmp_path))


@pytest.fixture
async def site(real: RealService) -> AsyncIterator[Site]:
    """Yield its server."""
    async with serving(real) as site:
        yield site


@pytest.fixture
async def gate(site: Site, real: RealService) -> AsyncIterator[Gate]:
    """Yield a shut gate before the tokens of each text."""
    gate = Gate()
    tokenizer = real.deployment.tokenizer
    tokenizer.tokens = gate.before(tokenizer.tokens)  # type: ignore[method-assign]  # held
    gate.shut()
    yield gate
    gate.open()


async def ask(site: Site, texts: list[str], headers: str = "") -> Wire:
    """Send a request for tokens and return its connection."""
    body = json.dumps({"input": texts})
    wire = await site.connect()
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    wire.send(f"{head}{headers}\r\n{body}")
    await wire.writer.drain()
    return wire


async def test_a_crowd_is_in_nobodys_way(site: Site, gate: Gate) -> None:
    """Large bodies of embeddings are decoded although every thread that tokenizes is taken."""
    try:
        async with asyncio.timeout(10):
            crowd = [await ask(site, [TEXT]) for _ in range(50)]
            await gate.reached()
            wire = await site.connect()
            body = json.dumps({"input": "a"}) + " " * INLINE_BYTES
            head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            wire.send(head + body)
            vectors = await wire.reply()
    finally:
        gate.open()
    replies = [await member.reply() for member in crowd]

    assert vectors.status == 200
    assert {reply.status for reply in replies} == {200, 429}


async def test_nothing_more_is_tokenized_for_one_who_left(
    site: Site, real: RealService, gate: Gate
) -> None:
    """Pieces that had begun end; no other begins."""
    n_texts = 0
    tokens = real.deployment.tokenizer.tokens

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal n_texts
        n_texts += 1
        return tokens(*args, **kwargs)  # type: ignore[arg-type]  # as they come

    real.deployment.tokenizer.tokens = counted  # type: ignore[method-assign,assignment]  # counted
    wire = await ask(site, [TEXT] * 14)
    await gate.reached()
    wire.writer.close()

    assert await real.heard.heard.get() == (ClientGone.status, ClientGone.reason)
    gate.open()
    await real.stop()
    assert n_texts <= 4


async def test_the_deadline_ends_it(site: Site, gate: Gate) -> None:
    """The client's own, as for vectors."""
    wire = await ask(site, [TEXT], "x-request-timeout: 0.2\r\n")
    reply = await wire.reply()

    assert reply.status == 504
    assert reply.json["error"]["code"] == "deadline_exceeded"


async def test_tokens_are_the_same_in_slices_and_on_threads(site: Site) -> None:
    """Many texts, long and short, in order."""
    texts = [f"{k} words " * (300 if k % 5 == 0 else 1) for k in range(60)]
    together = (await (await ask(site, texts)).reply()).json["data"]

    for index, text in enumerate(texts):
        [alone] = (await (await ask(site, [text])).reply()).json["data"]
        assert together[index] == {**alone, "index": index}
