"""`embedsvc health`: what a container's health check is told."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from embedsvc.http.server import Server
from embedsvc.service import Service
from tests.http_fakes import FakeService
from tests.terminal import embedsvc

pytest_plugins = ["tests.http_fixtures"]


@pytest.fixture
async def port(service: FakeService) -> AsyncIterator[int]:
    """Yield the port of a server of the fake service."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = asyncio.Event()
    server = Server(cast("Service", service), on_ready=ready.set)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await ready.wait()
    yield listener.getsockname()[1]
    server.should_exit = True
    await running


def health(port: int, **environment: str) -> tuple[int, str, str]:
    """Run `embedsvc health`; return its exit status, stdout and stderr."""
    return embedsvc("health", **{"EMBEDSVC_PORT": str(port), **environment})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_ready_server_is_healthy(port: int, host: str) -> None:
    """A server that listens on every address is asked on this machine's own."""
    assert await asyncio.to_thread(health, port, EMBEDSVC_HOST=host) == (0, "ready\n", "")


async def test_a_proxy_is_not_asked(port: int) -> None:
    """The variables for downloads from outside do not send the question there."""
    proxy = "http://127.0.0.1:9"

    assert (await asyncio.to_thread(health, port, http_proxy=proxy))[0] == 0


async def test_a_server_that_cannot_serve_is_not_healthy(port: int, service: FakeService) -> None:
    """The state is told."""
    service.state = "loading"

    assert await asyncio.to_thread(health, port) == (1, "", "loading\n")


def test_no_server_is_not_healthy() -> None:
    """The address that was asked is told."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        status, _, err = health(port)

    assert status == 1
    assert err.startswith(f"no answer from 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n[",
    ],
)
def test_another_server_is_not_healthy(answer: bytes) -> None:
    """Whatever else listens there is no traceback."""
    with answering(answer) as port:
        status, _, err = health(port)

    assert status == 1
    assert f"127.0.0.1:{port}" in err
    assert err.count("\n") == 1


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """Give one connection this answer; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
