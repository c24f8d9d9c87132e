"""Clients that leave, at every point of a request's way: nothing is computed for them, or kept."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from embedsvc.calls import EmbedCall
from embedsvc.errors import ClientGone, NotReady
from tests.http_fakes import URL
from tests.http_real import NAME, Gate, RealService, config_of
from tests.http_wire import Site, Wire, post, serving

GONE = (ClientGone.status, ClientGone.reason)
Leave = Callable[[Wire], None]


def close(wire: Wire) -> None:
    """Leave as programs do that end."""
    wire.writer.close()


def half_close(wire: Wire) -> None:
    """Leave as programs do that will send nothing more."""
    wire.writer.write_eof()


def abort(wire: Wire) -> None:
    """Leave as programs do that are killed."""
    wire.writer.transport.abort()


# Where nothing is read or written, the ways to leave are the same for the server.
in_every_way = pytest.mark.parametrize("leave", [close, half_close, abort])


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[RealService]:
    """Yield a service that is not started; its gate is open in the end."""
    service = RealService(config_of(tmp_path))
    yield service
    service.model.gate.open()


@pytest.fixture
async def real_site(real: RealService, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Site]:
    """Yield its server; whoever left, nothing is left of them and nothing was logged."""
    async with serving(real) as site:
        yield site

        real.model.gate.open()
        last = await site.connect()
        last.send(post("last"))
        assert (await last.reply()).status == 200
        assert real.idle
        last.writer.close()
    assert not site.server.server_state.tasks
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def ask(site: Site, n_inputs: int = 1) -> Wire:
    """Send a request for vectors and return its connection."""
    wire = await site.connect()
    wire.send(post({"input": ["a text"] * n_inputs}))
    return wire


async def hold_the_device(site: Site, service: RealService) -> Wire:
    """Let a request fill the device, and return its connection."""
    service.model.gate.shut()
    wire = await ask(site)
    await service.model.gate.reached()
    return wire


async def assert_gone(service: RealService, wire: Wire, leave: Leave = close) -> None:
    """Let a client leave and wait until the server has noticed."""
    leave(wire)
    assert await service.heard.heard.get() == GONE


@in_every_way
async def test_during_the_upload(real_site: Site, real: RealService, leave: Leave) -> None:
    """Half a request is no error of the server."""
    wire = await real_site.connect()
    wire.send(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{")
    await wire.writer.drain()

    await assert_gone(real, wire, leave)
    assert real.model.rows == 0


async def test_while_tokenizing(real_site: Site, real: RealService) -> None:
    """The tokenizer's thread cannot be stopped, but nothing comes of its work."""
    gate = Gate()
    tokenizer = real.deployment.tokenizer
    tokenizer.encode = gate.before(tokenizer.encode)  # type: ignore[method-assign]  # held
    gate.shut()
    wire = await ask(real_site, n_inputs=1000)
    await gate.reached()

    await assert_gone(real, wire)
    gate.open()
    assert real.model.rows == 0


@pytest.mark.parametrize("place", ["queued", "in the inbox"])
async def test_while_waiting(real_site: Site, real: RealService, place: str) -> None:
    """The scheduler waits for the device with one request queued; what comes then is unread."""
    first = await hold_the_device(real_site, real)
    others = [await ask(real_site) for _ in range(3)]
    ghost = others.pop(0 if place == "queued" else -1)
    await assert_gone(real, ghost)
    real.model.gate.open()
    replies = [await wire.reply() for wire in (first, *others)]

    assert [reply.status for reply in replies] == [200, 200, 200]
    assert real.model.rows == 3


@pytest.mark.parametrize("place", ["batch choice", "before the forward"])
async def test_between_the_queue_and_the_device(
    real_site: Site, real: RealService, place: str
) -> None:
    """The scheduler has looked for news the last time, or the device's thread has the batch."""
    gate = Gate()
    engine = real.deployment.engine
    if place == "batch choice":
        engine.policy.next = gate.before(engine.policy.next)  # type: ignore[method-assign]  # held
    else:
        buffers = engine._buffers
        buffers.take = gate.before(buffers.take)  # type: ignore[method-assign]  # held
    gate.shut()
    wire = await ask(real_site)
    await gate.reached()
    await assert_gone(real, wire)
    gate.open()
    other = await ask(real_site)

    assert (await other.reply()).status == 200
    assert real.model.rows == 1


@in_every_way
async def test_during_the_forward(real_site: Site, real: RealService, leave: Leave) -> None:
    """It is too late to save the work; its vectors are for nobody."""
    wire = await hold_the_device(real_site, real)
    await assert_gone(real, wire, leave)
    real.model.gate.open()
    other = await ask(real_site)

    assert (await other.reply()).status == 200


@in_every_way
async def test_while_the_reply_is_written(real_site: Site, real: RealService, leave: Leave) -> None:
    """A client that read the first bytes only is no error either."""
    connection = socket.create_connection(real_site.listener.getsockname())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    wire = Wire(*await asyncio.open_connection(sock=connection, limit=1))
    real_site.wires.append(wire)
    wire.send(post({"input": ["a text"] * 2048}))
    await wire.reader.read(1)

    await assert_gone(real, wire, leave)


async def test_a_service_that_stops_at_once_answers_who_waits_for_a_stuck_model(
    real: RealService,
) -> None:
    """Only the end of the last batch is waited for."""
    await real.start()
    real.model.gate.shut()
    call = asyncio.create_task(real.embed(EmbedCall(NAME, ["a"])))
    await real.model.gate.reached()
    stopping = asyncio.create_task(real.stop(drain_timeout_s=0.0))

    with pytest.raises(NotReady):
        await call
    assert not stopping.done()
    real.model.gate.open()
    await stopping
