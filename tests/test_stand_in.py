"""The stand-in for workers by itself: whom it takes, and how it lets go of them."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator

import pytest

from embedsvc.config import ServerConfig
from embedsvc.http.sockets import listen
from embedsvc.keys import Keys
from embedsvc.metrics import Metrics
from embedsvc.supervisor import stand_in
from embedsvc.supervisor.stand_in import StandIn
from tests.http_wire import Wire, no_connections, post

MOST = 3


class Site:
    """A stand-in that accepts from one socket."""

    def __init__(self) -> None:
        self.listener = listen(ServerConfig(host="127.0.0.1", port=0))
        metrics = Metrics()
        self.stand_in = StandIn(ServerConfig(), Keys({}), metrics, metrics.render)
        self._wires: list[Wire] = []

    async def connect(self) -> Wire:
        """Return a connection to it."""
        self._wires.append(Wire(*await asyncio.open_connection(*self.listener.getsockname())))
        return self._wires[-1]

    async def close(self) -> None:
        """End all connections."""
        self.stand_in.accept_from([])
        self.listener.close()
        for wire in self._wires:
            wire.writer.close()
        await no_connections(self.stand_in._crowd)


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Yield one that takes few connections at once."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(stand_in, "FILES_PER_CONNECTION", files // MOST)
    site = Site()
    site.stand_in.accept_from([site.listener])
    yield site
    await site.close()


async def test_files_are_left_for_those_who_start(site: Site) -> None:
    """Connections beyond a share of the files that may be open end at once; those before do not."""
    taken = [await site.connect() for _ in range(MOST)]
    crowd = [socket.create_connection(site.listener.getsockname()) for _ in range(20)]
    # Taken after those who came before.
    one_more = await site.connect()
    one_more_ends = await one_more.closed()
    n_taken = len(site.stand_in._crowd.connections)
    for client in crowd:
        client.close()
    for wire in taken:
        wire.send(post())
    replies = [await wire.reply() for wire in taken]
    again = await site.connect()
    again.send(post())

    assert (one_more_ends, n_taken) == (True, MOST)
    assert [reply.status for reply in replies] == [503] * MOST
    assert all([await wire.closed() for wire in taken])
    assert (await again.reply()).status == 503


async def test_a_drain_answers_who_has_connected(site: Site) -> None:
    """Also those whom the kernel alone has accepted; nobody is waited for who says nothing."""
    silent = await site.connect()
    with socket.create_connection(site.listener.getsockname()) as client:
        client.sendall(post().encode())
        await site.stand_in.drain()
        reply = client.recv(65536)

    assert reply.startswith(b"HTTP/1.1 503")
    assert await silent.closed()


async def test_who_has_asked_nothing_is_let_go(site: Site) -> None:
    """Once a worker is ready, its connection ends, so that the next request goes there."""
    wire = await site.connect()
    wire.send("POST /v1/embeddings HTTP/1.1\r\n")
    silent = await site.connect()
    # Answered, so both before have been accepted.
    asking = await site.connect()
    asking.send(post())
    assert (await asking.reply()).status == 503
    site.stand_in.accept_from([])
    wire.send("Content-Length: 0\r\n\r\n")

    assert (await wire.reply()).status == 503
    assert await wire.closed()
    assert await silent.closed()
