"""Any ASGI app behind our connections: what it is told, and what becomes of its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.server import ServerState

from embedsvc.http.connection import MAX_BUFFERED_BYTES, Connection
from embedsvc.http.timing import Terms
from tests.http_wire import Wire, no_connections

App = Callable[[Any, Any, Any], Any]
GET = "GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\n\r\n"
# What an event loop reads at once.
READ_BYTES = 256 * 1024


@asynccontextmanager
async def wired(app: App, state: ServerState | None = None) -> AsyncIterator[Wire]:
    """Yield a connection to a server of an app."""
    terms = Terms(header_timeout_s=60, body_timeout_s=60, write_timeout_s=60)
    state = state or ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(terms=terms, app=app, server_state=state, app_state={"x": 1}),
        "127.0.0.1",
        0,
    )
    wire = Wire(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    yield wire
    wire.writer.close()
    server.close()
    await no_connections(state)
    if state.tasks:
        await asyncio.wait(state.tasks)


def answering(*body: bytes, status: int = 200, length: int | None = None) -> App:
    """Return an app that answers with these parts, declaring a length or none."""
    headers = [] if length is None else [(b"content-length", b"%d" % length)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return app


# --- what an app is told -------------------------------------------------------------------------


async def test_the_scope_describes_the_request() -> None:
    """Target, headers, both ends and the state of the app's life."""
    scopes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await answering(length=0)(scope, receive, send)

    async with wired(app) as wire:
        wire.send(GET.replace("Host: x", "Host: x\r\nX-A: 1\r\nx-a: 2"))
        await wire.reply()
        peer = wire.writer.get_extra_info("sockname")
    scope = scopes[0]

    assert scope["method"] == "GET"
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=d")
    assert scope["headers"] == [(b"host", b"x"), (b"x-a", b"1"), (b"x-a", b"2")]
    assert scope["client"] == peer
    assert scope["http_version"] == "1.1"
    assert scope["state"] == {"x": 1}


async def test_what_follows_a_body_in_chunks_is_no_header() -> None:
    """Else it could pass for one that was checked before."""
    scopes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        scopes.append(scope)
        await answering(length=0)(scope, receive, send)

    async with wired(app) as wire:
        wire.send("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\r\n\r\n")
        await wire.reply()

    assert scopes[0]["headers"] == [(b"transfer-encoding", b"chunked")]


async def test_nothing_follows_a_request_that_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """What is sent after `Connection: close` is not looked at."""
    methods = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        methods.append(scope["method"])
        await answering(length=0)(scope, receive, send)

    async with wired(app) as wire:
        wire.send(GET.replace("Host", "Connection: close\r\nHost"), GET.replace("GET", "PUT"))
        reply = await wire.reply()

        assert await wire.closed()
    assert reply.headers["connection"] == "close"
    assert methods == ["GET"]
    assert caplog.messages == []


@pytest.mark.parametrize("target", ["*", "nonsense", "/\x01", "http://"])
async def test_odd_targets_harm_nobody(target: str) -> None:
    """They are passed on or refused."""
    async with wired(answering(length=0)) as wire:
        wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n")

        assert (await wire.reply()).status in (200, 400)


async def test_a_body_is_read_no_faster_than_the_app_takes_it() -> None:
    """However much is sent, little of it waits here."""
    sizes: list[int] = []
    total = 5 * MAX_BUFFERED_BYTES

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            for _ in range(50):
                await asyncio.sleep(0)
            message = await receive()
            sizes.append(len(message["body"]))
            more = message["more_body"]
        await answering(length=0)(scope, receive, send)

    async with wired(app) as wire:
        for _ in range(2):
            wire.send(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {total}\r\n\r\n")
            wire.send(b"x" * total)
            assert (await wire.reply()).status == 200

    assert sum(sizes) == 2 * total
    assert max(sizes) <= MAX_BUFFERED_BYTES + READ_BYTES


@pytest.mark.parametrize("half", [True, False])
async def test_an_app_that_listens_learns_that_its_client_left(half: bool) -> None:
    """Also where it knows of nothing but ASGI; what it sends then is no error."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.put_nowait("request")
        heard.put_nowait((await receive())["type"])
        await answering(b"late", length=4)(scope, receive, send)

    async with wired(app) as wire:
        wire.send(GET)
        assert await heard.get() == "request"
        if half:
            wire.writer.write_eof()
        else:
            wire.writer.close()

        assert await heard.get() == "http.disconnect"


async def test_an_app_that_listens_after_its_answer_is_told_that_all_is_over() -> None:
    """Nobody waits for a client that keeps its connection."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(length=0)(scope, receive, send)
        heard.put_nowait((await receive())["type"])

    async with wired(app) as wire:
        wire.send(GET)
        await wire.reply()

        assert await heard.get() == "http.disconnect"


# --- what becomes of its answers -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100_000])
async def test_parts_arrive_in_order_and_the_connection_is_kept(size: int) -> None:
    """Small ones and those that are not copied."""
    parts = [b"a" * size, b"b", b"c" * size]
    async with wired(answering(*parts, length=2 * size + 1)) as wire:
        for _ in range(2):
            wire.send(GET)
            assert (await wire.reply()).body == b"".join(parts)


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """Every client reads that."""
    async with wired(answering(b"ab", b"c")) as wire:
        wire.send(GET)
        reply = await wire.reader.read()

    head, body = reply.split(b"\r\n\r\n")
    assert b"connection: close" in head
    assert body == b"abc"


@pytest.mark.parametrize(
    ("request_text", "status"), [(GET.replace("GET", "HEAD"), 200), (GET, 204), (GET, 304)]
)
async def test_answers_without_a_body_keep_the_connection(request_text: str, status: int) -> None:
    """HEAD declares the length of what GET would send."""
    body = b"abc" if status == 200 else b""
    length = len(body) or None
    async with wired(answering(body, status=status, length=length)) as wire:
        wire.send(request_text, request_text)
        heads = [await wire.reader.readuntil(b"\r\n\r\n") for _ in range(2)]

    for head in heads:
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection" not in head


async def returns(scope: Any, receive: Any, send: Any) -> None:
    """Do nothing."""


async def raises(scope: Any, receive: Any, send: Any) -> None:
    """Fail."""
    raise ZeroDivisionError("secret")


@pytest.mark.parametrize("app", [returns, raises])
async def test_an_app_that_does_not_answer_is_answered_for(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """The envelope says nothing of the error; the log does where there is one."""
    async with wired(app) as wire:
        wire.send(GET)
        reply = await wire.reply()
        closed = await wire.closed()

    assert reply.status == 500
    assert "secret" not in reply.json["error"]["message"]
    assert closed
    assert ("ZeroDivisionError" in caplog.text) == (app is raises)


@pytest.mark.parametrize("body", [b"abc", b"abcde"])
async def test_half_an_answer_does_not_pass_for_a_whole_one(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Too short or too long, the connection ends before the declared length is there."""
    async with wired(answering(body, length=4)) as wire:
        wire.send(GET)
        reply = await wire.reader.read()

    assert len(reply.partition(b"\r\n\r\n")[2]) < 4
    assert "not as long as its head says" in caplog.text


async def test_a_cancelled_app_is_answered_for_as_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client may come back to the next server."""
    state, entered = ServerState(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await asyncio.get_running_loop().create_future()

    async with wired(app, state) as wire:
        wire.send(GET)
        await entered.wait()
        for task in state.tasks:
            task.cancel()
        reply = await wire.reply()

    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
