"""A server that stops: who is still answered, how clients are told to leave, and when it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.http.server import Server
from embedsvc.http.sockets import accept_waiting, listen
from tests.http_fakes import FakeService
from tests.http_wire import Site, Wire, post, serving

pytest_plugins = ["tests.http_fixtures"]

READY = "GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
LONG_S = 100.0


@pytest.fixture
async def slow_site(service: FakeService) -> AsyncIterator[Site]:
    """Yield a server that goes on accepting for as long as a test may take."""
    server = ServerConfig(drain_delay_s=LONG_S)
    service.config = Config(server=server, models=service.config.models)
    async with serving(service) as site:
        yield site


async def kept(site: Site) -> Wire:
    """Return a connection that has been used once and is idle."""
    wire = await site.connect()
    wire.send(post())
    assert "connection" not in (await wire.reply()).headers
    return wire


async def assert_last_reply(wire: Wire, status: int = 200) -> None:
    """Check that a reply tells the client to leave, and that the server closes."""
    reply = await wire.reply()
    assert reply.status == status
    assert reply.headers["connection"] == "close"
    assert await wire.closed()


# --- during the delay ----------------------------------------------------------------------------


async def test_readiness_turns_red_while_requests_are_still_served(slow_site: Site) -> None:
    """Load balancers learn it before anyone is refused, on old connections and on new ones."""
    old = await kept(slow_site)
    slow_site.server.drain()
    old.send(READY)
    new = await slow_site.connect()
    new.send(post())

    await assert_last_reply(old, 503)
    await assert_last_reply(new)


async def test_requests_in_flight_end_their_connections(
    slow_site: Site, service: FakeService
) -> None:
    """Also replies that had been asked for before tell their clients to leave."""
    service.gate = asyncio.Event()
    wire = await slow_site.connect()
    wire.send(post())
    await service.entered.wait()
    slow_site.server.drain()
    service.gate.set()

    await assert_last_reply(wire)


async def test_errors_tell_clients_to_leave_too(slow_site: Site) -> None:
    """Whatever the answer is."""
    wires = [await kept(slow_site) for _ in range(3)]
    slow_site.server.drain()
    wires[0].send(post({"input": []}))
    wires[1].send("GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    wires[2].send("nonsense\r\n\r\n")

    await assert_last_reply(wires[0], 400)
    await assert_last_reply(wires[1], 404)
    await assert_last_reply(wires[2], 400)


async def test_pipelined_requests_are_all_answered(slow_site: Site, service: FakeService) -> None:
    """Only the last reply says that the connection ends."""
    service.gate = asyncio.Event()
    wire = await slow_site.connect()
    wire.send(post(), post(), post())
    await service.entered.wait()
    slow_site.server.drain()
    service.gate.set()
    first = [(await wire.reply()).headers.get("connection") for _ in range(2)]

    assert first == [None, None]
    await assert_last_reply(wire)


async def test_a_reply_that_had_begun_ends_its_connection(
    slow_site: Site, service: FakeService
) -> None:
    """Its head promised to keep the connection; the server closes it all the same."""
    service.dim = 200_000
    wire = await slow_site.connect()
    wire.send(post({"input": ["x"] * 20}))
    await wire.reader.readuntil(b"\r\n\r\n")
    slow_site.server.drain()
    body = await wire.reader.read()

    assert body.endswith(b"}")


# --- in earnest ----------------------------------------------------------------------------------


async def test_idle_connections_are_closed_and_requests_in_flight_finished(
    site: Site, service: FakeService
) -> None:
    """Nobody waits for a client that may never come back."""
    idle = await kept(site)
    service.gate = asyncio.Event()
    service.entered.clear()
    wire = await site.connect()
    wire.send(post())
    await service.entered.wait()
    site.server.drain()
    assert await idle.closed()
    service.gate.set()

    await assert_last_reply(wire)


async def test_a_client_that_had_just_connected_may_still_ask(site: Site) -> None:
    """Its request may be on its way; if it is not, the connection ends soon."""
    site.server.terms.last_request_s = LONG_S
    new = await site.connect()
    idle = await kept(site)
    site.server.drain()
    assert await idle.closed()
    new.send(post())

    await assert_last_reply(new)


async def test_a_client_that_connects_and_asks_nothing_does_not_hold_the_end(site: Site) -> None:
    """Neither does one that connected before."""
    site.server.terms.last_request_s = 0.05
    silent = await site.connect()
    site.server.drain()

    assert await silent.closed()


async def test_a_request_that_has_arrived_is_not_lost_with_its_idle_connection(site: Site) -> None:
    """The event loop had not seen it yet when the connection was to be closed."""
    before = set(site.server.server_state.connections)
    with socket.create_connection(site.listener.getsockname()) as client:
        client.setblocking(False)
        wire = Wire(*await asyncio.open_connection(sock=client.dup()))
        site.wires.append(wire)
        wire.send(post())
        await wire.reply()
        (connection,) = set(site.server.server_state.connections) - before
        client.send(post().encode())
        site.server.terms.draining = True
        connection.shutdown()

        await assert_last_reply(wire)


async def test_at_the_end_of_the_drain_time_the_service_is_told_to_drain_no_longer(
    service: FakeService,
) -> None:
    """It has had the time; who still waits is answered at once."""
    server = ServerConfig(drain_timeout_s=0.05)
    service.config = Config(server=server, models=service.config.models)
    service.gate = asyncio.Event()
    async with serving(service) as site:
        wire = await site.connect()
        wire.send(post())
        await service.entered.wait()
        site.server.drain()
        await service.stopped.wait()
        service.gate.set()
        await assert_last_reply(wire)

    assert service.drained_s == 0.0


class Crowded(Server):
    """A server at whose end clients have connected and asked that it has not accepted yet."""

    crowd: list[socket.socket]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let a crowd come, then stop."""
        assert sockets is not None
        address = sockets[0].getsockname()
        self.crowd = [socket.create_connection(address) for _ in range(50)]
        for client in self.crowd:
            client.sendall(post().encode())
        with socket.create_connection(address):
            # Asks nothing, and is not waited for.
            self.terms.last_request_s = 0.05
            await super().shutdown(sockets)


async def test_the_backlog_is_served(service: FakeService) -> None:
    """The kernel has accepted them, so that they were promised an answer."""
    async with serving(service, Crowded) as site:
        pass
    server = cast("Crowded", site.server)
    for client in server.crowd:
        with client:
            reply = b"".join(iter(lambda: client.recv(65536), b"")).decode()  # noqa: B023  # at once
            assert reply.startswith("HTTP/1.1 200")
            assert "connection: close" in reply


def test_accepting_the_backlog_takes_all_and_does_not_wait() -> None:
    """None is left, and none is no error."""
    with listen(ServerConfig(port=0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        accepted = accept_waiting(listener)
        nobody = accept_waiting(listener)
        for connection in (*clients, *accepted):
            connection.close()

    assert len(accepted) == 3
    assert nobody == []


# --- with a successor ----------------------------------------------------------------------------


async def test_a_server_with_a_successor_leaves_idle_connections_until_their_next_request(
    site: Site,
) -> None:
    """Nobody notices: it still calls itself ready, and each reply tells its client to leave."""
    wires = [await kept(site) for _ in range(2)]
    await site.server.retire()
    wires[0].send(READY)
    wires[1].send(post())

    await assert_last_reply(wires[0])
    await assert_last_reply(wires[1])


async def test_a_server_with_a_successor_leaves_new_connections_to_it(site: Site) -> None:
    """They wait on the socket that both share."""
    busy = await kept(site)
    await site.server.retire()
    with socket.create_connection(site.listener.getsockname()) as new:
        busy.send(post())
        await assert_last_reply(busy)
        (accepted,) = accept_waiting(site.listener)
        with accepted:
            assert accepted.getpeername() == new.getsockname()


async def test_connections_that_stay_idle_do_not_hold_the_end(site: Site) -> None:
    """A client that is not busy may never come back."""
    idle = await kept(site)
    site.server.terms.retired_idle_s = 0.05
    await site.server.retire()

    assert await idle.closed()


async def test_a_server_accepts_from_the_sockets_it_is_told(site: Site) -> None:
    """From another one as well, and from none."""
    with listen(ServerConfig(port=0)) as other:
        await site.server.accept_from([site.listener, other])
        wire = Wire(*await asyncio.open_connection(*other.getsockname()))
        site.wires.append(wire)
        wire.send(post())
        assert (await wire.reply()).status == 200
        await site.server.accept_from([])
        with socket.create_connection(other.getsockname()):
            wire.send(post())
            assert (await wire.reply()).status == 200
            (waiting,) = accept_waiting(other)
            waiting.close()
