"""Bytes on sockets to and from a real server of a fake service, for the tests of the HTTP layer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.server import ServerState

from embedsvc.config import ServerConfig
from embedsvc.http.connection import Crowd
from embedsvc.http.server import Server
from embedsvc.http.sockets import listen
from embedsvc.service import Service
from tests.http_fakes import URL, FakeService


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


@dataclass
class Site:
    """A server that listens.

    Attributes:
        server: in this event loop.
        listener: its socket.
        wires: the connections made so far.
    """

    server: Server
    listener: socket.socket
    wires: list[Wire] = field(default_factory=list)

    async def connect(self) -> Wire:
        """Open a connection."""
        self.wires.append(Wire(*await asyncio.open_connection(*self.listener.getsockname())))
        return self.wires[-1]


@asynccontextmanager
async def serving(
    service: FakeService | Service, server_type: type[Server] = Server
) -> AsyncIterator[Site]:
    """Run a server of a service; at the end, close all connections and wait for its end."""
    ready = asyncio.Event()
    with listen(ServerConfig(port=0)) as listener:
        server = server_type(cast("Service", service), on_ready=ready.set)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        site = Site(server, listener)
        try:
            yield site
        finally:
            server.should_exit = True
            for wire in site.wires:
                wire.writer.close()
            await running


async def no_connections(state: ServerState | Crowd) -> None:
    """Wait until a server has none."""
    while state.connections:  # noqa: ASYNC110  # uvicorn's set tells nobody
        await asyncio.sleep(0)


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
