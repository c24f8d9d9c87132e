"""Slow, greedy and idle peers: each is cut off in time, told why, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from embedsvc.errors import (
    BodyTooLarge,
    ClientGone,
    HeadersTooLarge,
    Overloaded,
    RequestTimeout,
)
from embedsvc.http.body import LARGEST_AT_ONCE, SMALL_BYTES
from embedsvc.http.parser import MAX_HEAD_BYTES
from embedsvc.http.timing import MIN_BODY_BYTES_PER_S, Terms
from tests.http_fakes import MAX_BODY_BYTES, URL, FakeService, counted
from tests.http_wire import Reply, Site, Wire, chunked, no_connections, post

pytest_plugins = ["tests.http_fixtures"]

SHORT_S = 0.05
HEAD = f"POST {URL} HTTP/1.1\r\nHost: x\r\n"
TOO_LARGE = (str(HeadersTooLarge.status), HeadersTooLarge.reason)
TOO_SLOW = (str(RequestTimeout.status), RequestTimeout.reason)


def assert_refused(reply: Reply, status: int) -> None:
    """Check that a reply carries the envelope and ends the connection."""
    assert reply.status == status
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["connection"] == "close"


async def served(site: Site) -> bool:
    """Say whether a newcomer gets vectors."""
    wire = await site.connect()
    wire.send(post())
    return (await wire.reply()).status == 200


# --- slow senders --------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["P", HEAD, HEAD + "X-Long: "])
async def test_headers_that_do_not_end_get_408(site: Site, service: FakeService, sent: str) -> None:
    """From the first byte on, the whole head has one time limit."""
    site.server.terms.header_timeout_s = SHORT_S
    wire = await site.connect()
    wire.send(sent)

    assert_refused(await wire.reply(), 408)
    assert await wire.closed()
    assert counted(service) == {TOO_SLOW: 1}
    assert await served(site)


async def test_who_says_nothing_is_closed_without_a_word(site: Site) -> None:
    """An answer to no request would be taken for that of the next one."""
    site.server.terms.header_timeout_s = SHORT_S
    wire = await site.connect()

    assert await wire.closed()


async def test_the_next_request_of_a_connection_has_its_own_time(site: Site) -> None:
    """A kept connection may be idle for longer than a head may take."""
    site.server.terms.header_timeout_s = SHORT_S
    wire = await site.connect()
    wire.send(post())
    assert (await wire.reply()).status == 200
    wire.send(HEAD)

    assert_refused(await wire.reply(), 408)


async def test_an_idle_connection_is_closed_in_the_end(site: Site) -> None:
    """The time begins with the last answer."""
    site.server.terms.keep_alive_s = SHORT_S
    wire = await site.connect()
    wire.send(post())
    await wire.reply()

    assert await wire.closed()


async def test_a_slow_head_behind_a_request_does_not_cost_its_answer(
    site: Site, service: FakeService
) -> None:
    """What came first is answered first; then the connection ends."""
    site.server.terms.header_timeout_s = SHORT_S
    service.gate = asyncio.Event()
    wire = await site.connect()
    wire.send(post(), "POST")
    await service.entered.wait()
    late = await site.connect()
    assert await late.closed()
    service.gate.set()

    assert (await wire.reply()).status == 200
    assert await wire.closed()


@pytest.mark.parametrize("limit", ["body_timeout_s", "body_grace_s"])
@pytest.mark.parametrize(
    "sent", [HEAD + "Content-Length: 99\r\n\r\n{", chunked('{"input":"a"}', 4)[:-5]]
)
async def test_a_body_that_does_not_end_gets_408(
    site: Site, service: FakeService, sent: str, limit: str
) -> None:
    """Declared or in chunks, it has a limit in all and one for too little of it."""
    setattr(site.server.terms, limit, SHORT_S)
    wire = await site.connect()
    wire.send(sent)
    reply = await wire.reply()

    assert_refused(reply, 408)
    assert reply.headers["x-request-id"].startswith("req_")
    assert service.calls == []
    assert counted(service) == {TOO_SLOW: 1}


async def test_other_routes_have_the_same_limits(site: Site) -> None:
    """The limits are the connection's, not those of one route."""
    site.server.terms.body_timeout_s = SHORT_S
    wire = await site.connect()
    wire.send("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")

    assert_refused(await wire.reply(), 408)


def test_a_body_must_come_at_some_speed() -> None:
    """One byte a second is too slow after the grace, a steady upload is not before the limit."""
    terms = Terms(header_timeout_s=1, body_timeout_s=100, write_timeout_s=1, body_grace_s=10)

    assert terms.body_s(10) < 11
    assert terms.body_s(50 * MIN_BODY_BYTES_PER_S) == 60
    assert terms.body_s(1 << 30) == 100


async def test_time_passes_only_for_the_body_that_is_read(site: Site, service: FakeService) -> None:
    """A body behind a request in flight is not read yet, so that its sender is not the slow one."""
    site.server.terms.body_timeout_s = SHORT_S
    service.gate = asyncio.Event()
    wire = await site.connect()
    head, body = post({"input": ["x", "y"]}).split("\r\n\r\n")
    wire.send(post(), head, "\r\n\r\n")
    await service.entered.wait()
    late = await site.connect()
    late.send(HEAD + "Content-Length: 99\r\n\r\n{")
    assert (await late.reply()).status == 408
    wire.send(body)
    service.gate.set()

    assert len((await wire.reply()).json["data"]) == 1
    assert len((await wire.reply()).json["data"]) == 2


# --- greedy senders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + "X-Long: " + "x" * MAX_HEAD_BYTES + "\r\n\r\n",
        HEAD + "X-Many: x\r\n" * (MAX_HEAD_BYTES // 8),
        "POST /" + "x" * MAX_HEAD_BYTES,
    ],
    ids=["complete", "without end", "target"],
)
async def test_a_head_over_the_limit_gets_431(site: Site, service: FakeService, sent: str) -> None:
    """Whole or without end, it is read no further."""
    wire = await site.connect()
    wire.send(sent)

    assert_refused(await wire.reply(), 431)
    assert counted(service) == {TOO_LARGE: 1}
    assert await served(site)


async def test_large_bodies_do_not_count_as_heads(site: Site) -> None:
    """Head and body may come in one piece that is larger than a head may be."""
    wire = await site.connect()
    wire.send(post("x" * (MAX_BODY_BYTES - 100)) * 3)

    assert [(await wire.reply()).status for _ in range(3)] == [200, 200, 200]


async def test_what_follows_the_chunks_has_a_limit_too(site: Site, service: FakeService) -> None:
    """Trailers are thrown away, but not for ever."""
    wire = await site.connect()
    wire.send(chunked('{"input":"a"}', 4)[:-2], "X-Trailer: x\r\n" * MAX_HEAD_BYTES)

    assert_refused(await wire.reply(), 431)
    assert service.calls == []
    assert counted(service) == {TOO_LARGE: 1}


async def test_an_upload_without_end_gets_its_413_and_an_end(
    site: Site, service: FakeService
) -> None:
    """The rest is thrown away for a while, so that the answer is seen; then the connection ends."""
    site.server.terms.discard_s = SHORT_S
    wire = await site.connect()
    wire.send(HEAD, "Transfer-Encoding: chunked\r\n\r\n")

    async def upload() -> None:
        while not wire.writer.is_closing():
            wire.send("4000\r\n", b" " * 0x4000, "\r\n")
            await wire.writer.drain()

    uploading = asyncio.create_task(upload())
    reply = await wire.reply()

    assert reply.status == 413
    with pytest.raises(ConnectionError):
        await uploading
    assert counted(service) == {(str(BodyTooLarge.status), BodyTooLarge.reason): 1}


@pytest.fixture
def roomy(service: FakeService) -> int:
    """Allow bodies that count as large; return the size of the largest."""
    largest = 2 * SMALL_BYTES
    server = replace(service.config.server, max_body_bytes=largest)
    service.config = replace(service.config, server=server)
    return largest


async def entered(service: FakeService, n_calls: int) -> None:
    """Wait until so many calls have reached the service."""
    while len(service.calls) < n_calls:  # noqa: ASYNC110  # a list tells nobody
        await asyncio.sleep(0)


async def test_large_bodies_have_limited_room_together(
    site: Site, service: FakeService, roomy: int
) -> None:
    """Those that stay cost others their large ones, never the server its memory."""
    service.gate = asyncio.Event()
    large = f"{HEAD}Content-Length: {roomy}\r\n\r\n" + json.dumps({"input": "a"}).ljust(roomy)
    stay = [await site.connect() for _ in range(LARGEST_AT_ONCE)]
    for wire in stay:
        wire.send(large)
    await entered(service, LARGEST_AT_ONCE)
    late = await site.connect()
    late.send(large)
    refused = await late.reply()

    assert refused.status == Overloaded.status
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    late.send(post())
    await entered(service, LARGEST_AT_ONCE + 1)

    stay.pop().writer.close()
    while await service.metrics.heard.get() != (ClientGone.status, ClientGone.reason):
        pass
    stay.append(await site.connect())
    stay[-1].send(large)
    await entered(service, LARGEST_AT_ONCE + 2)
    service.gate.set()
    assert [(await wire.reply()).status for wire in (*stay, late)] == [200] * (len(stay) + 1)


async def test_a_large_upload_that_is_left_gives_its_room_back(
    site: Site, service: FakeService, roomy: int
) -> None:
    """Whenever it ends."""
    for _ in range(LARGEST_AT_ONCE + 1):
        wire = await site.connect()
        wire.send(f"{HEAD}Content-Length: {roomy}\r\n\r\n", " " * (roomy - 1))
        await wire.writer.drain()
        wire.writer.close()
        assert await service.metrics.heard.get() == (ClientGone.status, ClientGone.reason)

    assert await served(site)


# --- slow readers --------------------------------------------------------------------------------


async def read_nothing_of(site: Site, request: str) -> Wire:
    """Send a request from a client that stops reading after the first byte of the reply."""
    connection = socket.create_connection(site.listener.getsockname())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    wire = Wire(*await asyncio.open_connection(sock=connection, limit=1))
    site.wires.append(wire)
    wire.send(request)
    await wire.reader.read(1)
    return wire


async def test_a_client_that_does_not_read_is_cut_off(site: Site, service: FakeService) -> None:
    """Neither the reply nor its rows are kept for it."""
    site.server.terms.write_timeout_s = SHORT_S
    service.dim = 100_000
    await read_nothing_of(site, post({"input": ["x"] * 50}))

    assert await service.metrics.heard.get() == (ClientGone.status, ClientGone.reason)
    assert not site.server.server_state.connections


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
async def test_a_reply_that_is_written_but_not_read_is_dropped(
    site: Site, service: FakeService, headers: str
) -> None:
    """The app is done with it, and the connection waits no longer for it than for others."""
    site.server.terms.write_timeout_s = SHORT_S
    service.dim = 3_000_000
    wire = await read_nothing_of(site, post(headers=headers))
    connection_lost = asyncio.create_task(no_connections(site.server.server_state))
    heard = await service.metrics.heard.get()
    await connection_lost
    service.dim = 8

    assert heard == (200, "ok")
    assert not wire.writer.is_closing()
    assert await served(site)


# --- many who do nothing -------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[int]:
    """Raise the limit of open files; yield it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_crowd_of_idle_connections_is_in_nobodys_way(site: Site, many_files: int) -> None:
    """Silent ones and idle ones cost no request anything but memory."""
    n = min(1000, many_files // 4)
    kept = [await site.connect() for _ in range(n)]
    for wire in kept[::10]:
        wire.send(post())
        assert (await wire.reply()).status == 200

    assert await served(site)
    assert len(site.server.server_state.connections) == n + 1


async def test_a_half_closed_upload_is_gone(site: Site, service: FakeService) -> None:
    """Nothing more can come, so that nothing is waited for."""
    wire = await site.connect()
    wire.send(HEAD + "Content-Length: 99\r\n\r\n" + json.dumps({"input": "a"}))
    wire.writer.write_eof()

    assert await wire.closed()
    assert await service.metrics.heard.get() == (ClientGone.status, ClientGone.reason)
