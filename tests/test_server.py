"""The server process: bytes on sockets, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.errors import ClientGone, StartError
from embedsvc.http.server import KEEP_ALIVE_S, Server, listen, serve
from embedsvc.service import Service
from tests.http_fakes import MAX_BODY_BYTES, URL, FakeService, counted

pytest_plugins = ["tests.http_fixtures"]

H2C_OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


# --- on the wire ---------------------------------------------------------------------------------


@dataclass
class Reply:
    """One HTTP response as read from a socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Wire:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: str | bytes) -> None:
        """Write bytes as they are."""
        for part in parts:
            self.writer.write(part.encode() if isinstance(part, str) else part)

    async def reply(self) -> Reply:
        """Read one response that declares its length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(int(first.split()[1]), headers, body)

    async def closed(self) -> bool:
        """Wait for the server to close; say whether nothing else came."""
        return await self.reader.read() == b""


Connect = Callable[[], Any]


@pytest.fixture
async def connect(service: FakeService) -> AsyncIterator[Connect]:
    """Yield a function that opens connections to a server of the fake service."""
    listener = listen(ServerConfig(port=0))
    ready = asyncio.Event()
    server = Server(cast("Service", service), on_ready=ready.set)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await ready.wait()
    wires: list[Wire] = []

    async def connect() -> Wire:
        wires.append(Wire(*await asyncio.open_connection(*listener.getsockname())))
        return wires[-1]

    yield connect
    server.should_exit = True
    for wire in wires:
        wire.writer.close()
    await running


def post(body: dict[str, Any] | str = "a", *, headers: str = "", version: str = "1.1") -> str:
    """Return a request for vectors as text."""
    payload = json.dumps({"input": body} if isinstance(body, str) else body)
    return (
        f"POST {URL} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(payload)}\r\n{headers}\r\n"
        f"{payload}"
    )


def chunked(payload: str, size: int, headers: str = "") -> str:
    """Return a request for vectors in chunks of some characters."""
    pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
    body = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces)
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{headers}\r\n"
    return f"{head}{body}0\r\n\r\n"


async def test_a_connection_serves_request_after_request(connect: Connect) -> None:
    """Connections are kept, longer than clients and proxies keep theirs."""
    wire = await connect()
    for _ in range(2):
        wire.send(post())
        reply = await wire.reply()
        assert reply.status == 200
        assert "connection" not in reply.headers
    assert KEEP_ALIVE_S > 120


async def test_pipelined_requests_are_answered_in_order(
    connect: Connect, service: FakeService
) -> None:
    """The second and third wait for the first, however slow it is."""
    service.gate = asyncio.Event()
    wire = await connect()
    wire.send(*(post({"input": ["x"] * n}) for n in (1, 2, 3)))
    await service.entered.wait()
    service.gate.set()
    replies = [await wire.reply() for _ in range(3)]

    assert [len(reply.json["data"]) for reply in replies] == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 1000])
async def test_chunked_bodies_are_read(connect: Connect, size: int) -> None:
    """One byte a chunk or all in one."""
    wire = await connect()
    wire.send(chunked('{"input":"a"}', size))

    assert (await wire.reply()).status == 200


async def test_http_1_0_gets_a_length_and_a_close(connect: Connect) -> None:
    """Old clients cannot read chunks."""
    wire = await connect()
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
    connect: Connect, request_text: str
) -> None:
    """Java's HttpClient sends one; pipelined, in one piece or in two, it is answered."""
    wire = await connect()
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


async def test_the_other_words_of_the_connection_header_are_kept(connect: Connect) -> None:
    """Only the offer is taken out."""
    wire = await connect()
    wire.send(post(headers=H2C_OFFER.replace("Upgrade,", "close, Upgrade,")))

    assert (await wire.reply()).headers["connection"] == "close"


@pytest.mark.parametrize(
    "garbage",
    ["nonsense\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "\x16\x03\x01\x02\x00"],
)
async def test_what_is_not_http_gets_the_envelope(connect: Connect, garbage: str) -> None:
    """Malformed requests, tunnels and TLS are told so, and cut off."""
    wire = await connect()
    wire.send(garbage)
    reply = await wire.reply()

    assert reply.status == 400
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert await wire.closed()


async def test_garbage_does_not_cost_the_request_before_it(
    connect: Connect, service: FakeService
) -> None:
    """A complete request is answered although nonsense follows it."""
    service.gate = asyncio.Event()
    wire = await connect()
    wire.send(post(), "nonsense\r\n\r\n")
    await service.entered.wait()
    service.gate.set()

    assert (await wire.reply()).status == 200
    assert await wire.closed()


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("kind", ["chunked", "declared"])
async def test_the_client_sees_413_after_a_large_upload(
    connect: Connect, kind: str, headers: str
) -> None:
    """The upload is read to its end, so that no reset overtakes the answer."""
    payload = json.dumps({"input": "x" * 20 * MAX_BODY_BYTES})
    wire = await connect()
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


async def test_a_client_that_asks_first_is_told_to_go_on(connect: Connect) -> None:
    """Expect: 100-continue gets its 100, or the refusal instead of it."""
    head, body = post(headers="Expect: 100-continue\r\n").split("\r\n\r\n")
    wire = await connect()
    wire.send(head, "\r\n\r\n")
    go_on = await wire.reply()
    wire.send(body)
    reply = await wire.reply()
    wire.send(head.replace("Content-Length: ", "Content-Length: 9999999"), "\r\n\r\n")
    refusal = await wire.reply()

    assert (go_on.status, reply.status, refusal.status) == (100, 200, 413)
    assert await wire.closed()


@pytest.mark.parametrize("half", [True, False])
async def test_a_closed_connection_cancels_its_call(
    connect: Connect, service: FakeService, half: bool
) -> None:
    """Closed on both sides or on the client's only, nobody waits for the answer."""
    service.gate = asyncio.Event()
    wire = await connect()
    wire.send(post())
    await service.entered.wait()
    if half:
        wire.writer.write_eof()
    else:
        wire.writer.close()
    await service.cancelled.wait()
    other = await connect()
    service.gate.set()
    other.send(post())

    assert (await other.reply()).status == 200
    assert counted(service) == {("499", ClientGone.reason): 1, ("200", "ok"): 1}


async def test_a_client_that_leaves_in_the_middle_of_a_large_reply_harms_nobody(
    connect: Connect, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are answered, and nothing is logged as an error."""
    service.dim = 100_000
    wire = await connect()
    wire.send(post({"input": ["x"] * 50}))
    await wire.reader.readuntil(b"\r\n\r\n")
    wire.writer.transport.abort()
    service.dim = 8
    other = await connect()
    other.send(post())

    assert (await other.reply()).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# --- processes -----------------------------------------------------------------------------------


class Process:
    """A `HeldService` in a process of its own."""

    def __init__(self, mode: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.http_fakes", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, start: str) -> str:
        """Return the next line that begins like this."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"the process ended without saying {start!r}")

    def address(self) -> tuple[str, int]:
        """Wait until it is ready; return its address."""
        host, port = self.line("ready on http://").removeprefix("ready on http://").split(":")
        return host, int(port)

    def release(self) -> None:
        """Let the calls go on."""
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    """Yield a process in the mode of the test's parameter; kill it at the end."""
    process = Process(getattr(request, "param", "held"))
    with process.child:
        yield process
        process.child.kill()


def held_request(process: Process, address: tuple[str, int]) -> socket.socket:
    """Send a request and return its socket once the service holds its call."""
    connection = socket.create_connection(address, timeout=10)
    connection.sendall(post().encode())
    process.line("held")
    return connection


def everything(connection: socket.socket) -> str:
    """Read until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def refused(address: tuple[str, int]) -> bool:
    """Say whether nobody listens any more."""
    try:
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_what_is_in_flight(
    process: Process, number: signal.Signals
) -> None:
    """Nothing new is accepted, idle connections end, the held call is answered, the exit is 0."""
    address = process.address()
    with (
        socket.create_connection(address, timeout=10) as idle,
        held_request(process, address) as held,
    ):
        process.child.send_signal(number)
        process.line(f"{number.name}: finishing")
        rest_of_idle = everything(idle)
        while not refused(address):
            pass
        process.release()
        reply = everything(held)

    assert rest_of_idle == ""
    assert reply.startswith("HTTP/1.1 200")
    assert "connection: close" in reply
    assert process.child.wait(10) == 0


@pytest.mark.parametrize("process", ["impatient"], indirect=True)
def test_calls_over_the_drain_time_are_answered_and_the_exit_is_0(process: Process) -> None:
    """Who cannot be served in time is told to come back."""
    with held_request(process, process.address()) as held:
        process.child.terminate()
        reply = everything(held)

    assert reply.startswith("HTTP/1.1 503")
    assert "retry-after: 1" in reply
    assert process.child.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(process: Process, number: signal.Signals) -> None:
    """Whoever cannot wait need not."""
    with held_request(process, process.address()):
        process.child.terminate()
        process.line("SIGTERM: finishing")
        process.child.send_signal(number)

        assert process.child.wait(10) == -number


@pytest.mark.parametrize("process", ["loading"], indirect=True)
def test_a_signal_while_loading_ends_at_once(process: Process) -> None:
    """Nothing is in flight, and a load may take minutes."""
    process.line("loading")
    process.child.terminate()

    assert process.child.wait(10) == 0


@pytest.mark.parametrize("process", ["broken"], indirect=True)
def test_a_model_that_fails_to_load_ends_the_process(process: Process) -> None:
    """The error says why, and the exit status is not 0."""
    process.line("models[0].source: no such model")

    assert process.child.wait(10) == 1


def test_an_address_in_use_is_named() -> None:
    """Before anything is loaded, the user learns which setting to change."""
    with listen(ServerConfig(port=0)) as taken:
        service = FakeService()
        server = ServerConfig(port=taken.getsockname()[1])
        service.config = Config(server=server, models=service.config.models)

        with pytest.raises(StartError, match=rf"server\.port: .*{server.port}"):
            serve(cast("Service", service))
