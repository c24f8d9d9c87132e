"""Connections to a real server: what is read, what is answered, in which order."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from embedsvc.errors import ClientGone, InvalidRequest
from embedsvc.http.timing import KEEP_ALIVE_S
from tests.http_fakes import MAX_BODY_BYTES, FakeService, counted
from tests.http_wire import Site, chunked, post

pytest_plugins = ["tests.http_fixtures"]

H2C_OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


async def test_a_connection_serves_request_after_request(site: Site) -> None:
    """Connections are kept, longer than clients and proxies keep theirs."""
    wire = await site.connect()
    for _ in range(2):
        wire.send(post())
        reply = await wire.reply()
        assert reply.status == 200
        assert "connection" not in reply.headers
    assert KEEP_ALIVE_S > 120


async def test_pipelined_requests_are_answered_in_order(site: Site, service: FakeService) -> None:
    """The second and third wait for the first, however slow it is."""
    service.gate = asyncio.Event()
    wire = await site.connect()
    wire.send(*(post({"input": ["x"] * n}) for n in (1, 2, 3)))
    await service.entered.wait()
    service.gate.set()
    replies = [await wire.reply() for _ in range(3)]

    assert [len(reply.json["data"]) for reply in replies] == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 1000])
async def test_chunked_bodies_are_read(site: Site, size: int) -> None:
    """One byte a chunk or all in one."""
    wire = await site.connect()
    wire.send(chunked('{"input":"a"}', size))

    assert (await wire.reply()).status == 200


async def test_http_1_0_gets_a_length_and_a_close(site: Site) -> None:
    """Old clients cannot read chunks."""
    wire = await site.connect()
    wire.send(post(version="1.0"))
    reply = await wire.reply()

    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    assert "transfer-encoding" not in reply.headers
    assert await wire.closed()


@pytest.mark.parametrize(
    "request_text",
    [post(headers=H2C_OFFER), chunked('{"input":"a"}', 4, H2C_OFFER)],
    ids=["length", "chunked"],
)
async def test_an_offer_of_http_2_is_ignored_and_the_body_kept(
    site: Site, request_text: str
) -> None:
    """Java's HttpClient sends one; pipelined, in one piece or in two, it is answered."""
    wire = await site.connect()
    head, body = request_text.split("\r\n\r\n", 1)
    wire.send(request_text, request_text)
    replies = [await wire.reply() for _ in range(2)]
    wire.send(head, "\r\n\r\n")
    for _ in range(10):
        # Turns for the server, so that head and body are parsed apart.
        await asyncio.sleep(0)
    wire.send(body)
    replies.append(await wire.reply())

    assert [reply.status for reply in replies] == [200, 200, 200]


async def test_the_other_words_of_the_connection_header_are_kept(site: Site) -> None:
    """Only the offer is taken out."""
    wire = await site.connect()
    wire.send(post(headers=H2C_OFFER.replace("Upgrade,", "close, Upgrade,")))

    assert (await wire.reply()).headers["connection"] == "close"


@pytest.mark.parametrize(
    "garbage",
    ["nonsense\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "\x16\x03\x01\x02\x00"],
)
async def test_what_is_not_http_gets_the_envelope(
    site: Site, service: FakeService, garbage: str
) -> None:
    """Malformed requests, tunnels and TLS are told so, and cut off."""
    wire = await site.connect()
    wire.send(garbage)
    reply = await wire.reply()

    assert reply.status == 400
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert await wire.closed()
    assert counted(service) == {("400", InvalidRequest.reason): 1}


async def test_garbage_does_not_cost_the_request_before_it(
    site: Site, service: FakeService
) -> None:
    """A complete request is answered although nonsense follows it."""
    service.gate = asyncio.Event()
    wire = await site.connect()
    wire.send(post(), "nonsense\r\n\r\n")
    await service.entered.wait()
    service.gate.set()

    assert (await wire.reply()).status == 200
    assert await wire.closed()


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("kind", ["chunked", "declared"])
async def test_the_client_sees_413_after_a_large_upload(
    site: Site, kind: str, headers: str
) -> None:
    """The upload is read to its end, so that no reset overtakes the answer."""
    payload = json.dumps({"input": "x" * 20 * MAX_BODY_BYTES})
    wire = await site.connect()
    if kind == "chunked":
        wire.send(chunked(payload, 32 * 1024, headers))
    else:
        wire.send(post({"input": "x" * 20 * MAX_BODY_BYTES}, headers=headers))
    await wire.writer.drain()
    reply = await wire.reply()

    assert reply.status == 413
    assert reply.json["error"]["type"] == "invalid_request_error"
    if not headers:
        wire.send(post())
        assert (await wire.reply()).status == 200


async def test_a_client_that_asks_first_is_told_to_go_on(site: Site) -> None:
    """Expect: 100-continue gets its 100, or the refusal instead of it."""
    head, body = post(headers="Expect: 100-continue\r\n").split("\r\n\r\n")
    wire = await site.connect()
    wire.send(head, "\r\n\r\n")
    go_on = await wire.reply()
    wire.send(body)
    reply = await wire.reply()
    wire.send(head.replace("Content-Length: ", "Content-Length: 9999999"), "\r\n\r\n")
    refusal = await wire.reply()

    assert (go_on.status, reply.status, refusal.status) == (100, 200, 413)
    assert "connection" not in reply.headers
    assert refusal.headers["connection"] == "close"
    assert await wire.closed()


@pytest.mark.parametrize("half", [True, False])
async def test_a_closed_connection_cancels_its_call(
    site: Site, service: FakeService, half: bool
) -> None:
    """Closed on both sides or on the client's only, nobody waits for the answer."""
    service.gate = asyncio.Event()
    wire = await site.connect()
    wire.send(post())
    await service.entered.wait()
    if half:
        wire.writer.write_eof()
    else:
        wire.writer.close()
    await service.cancelled.wait()
    other = await site.connect()
    service.gate.set()
    other.send(post())

    assert (await other.reply()).status == 200
    assert counted(service) == {("499", ClientGone.reason): 1, ("200", "ok"): 1}


async def test_a_client_that_leaves_in_the_middle_of_a_large_reply_harms_nobody(
    site: Site, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are answered, and nothing is logged as an error."""
    service.dim = 100_000
    wire = await site.connect()
    wire.send(post({"input": ["x"] * 50}))
    await wire.reader.readuntil(b"\r\n\r\n")
    wire.writer.transport.abort()
    service.dim = 8
    other = await site.connect()
    other.send(post())

    assert (await other.reply()).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
