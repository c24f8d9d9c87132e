"""The server process: how it starts and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.errors import StartError
from embedsvc.http.server import serve
from embedsvc.http.sockets import listen
from embedsvc.service import Service
from tests.http_fakes import FakeService
from tests.http_wire import post


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
