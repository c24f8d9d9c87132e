"""The server process: how it starts and how it ends."""

from __future__ import annotations

import queue
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import openai
import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.errors import StartError
from embedsvc.http.server import serve
from embedsvc.http.sockets import listen, listen_together
from embedsvc.service import Service
from tests.http_fakes import FakeService
from tests.http_process import Process
from tests.http_wire import post


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


@pytest.mark.parametrize("process", ["impatient", "stuck"], indirect=True)
def test_calls_over_the_drain_time_are_answered_and_the_exit_is_0(process: Process) -> None:
    """Who cannot be served in time is told to come back, though a device may never come back."""
    with held_request(process, process.address()) as held:
        process.child.terminate()
        reply = everything(held)

    assert reply.startswith("HTTP/1.1 503")
    assert "retry-after: 1" in reply
    assert "connection: close" in reply
    assert process.child.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(process: Process, number: signal.Signals) -> None:
    """Whoever cannot wait need not."""
    with held_request(process, process.address()):
        process.child.terminate()
        process.line("SIGTERM: finishing")
        process.child.send_signal(number)

        assert process.child.wait(10) == -number


@pytest.mark.parametrize("process", ["patient"], indirect=True)
def test_during_the_delay_the_server_still_accepts(process: Process) -> None:
    """Newcomers are served and told to leave; the second signal does not wait for the delay."""
    address = process.address()
    process.child.terminate()
    process.line("SIGTERM: finishing")
    with held_request(process, address) as held:
        process.release()
        reply = everything(held)
    process.child.terminate()

    assert reply.startswith("HTTP/1.1 200")
    assert "connection: close" in reply
    assert process.child.wait(10) == -signal.SIGTERM


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


def test_what_is_loaded_is_left_out_of_garbage_collections(process: Process) -> None:
    """A full one would stop everybody for as long as it looks at it."""
    spared = int(process.line("spared").split()[1])

    assert spared > 10_000


class Client(threading.Thread):
    """Asks for vectors, one request after the other, as OpenAI's own client does."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__()
        self._stop_asking = stop
        self._openai = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=10
        )
        self.answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.error: Exception | None = None

    def run(self) -> None:
        """Ask until told to stop, or until a request has failed."""
        try:
            while not self._stop_asking.is_set():
                reply = self._openai.embeddings.create(model="org/model", input=["a", "b"])
                self.answers.put(len(reply.data))
        except openai.OpenAIError as error:
            self.error = error
        self._openai.close()

    def wait_answers(self, n: int) -> None:
        """Wait for some more answers."""
        for _ in range(n):
            assert self.answers.get(timeout=15) == 2


def test_a_restart_under_load_fails_no_request() -> None:
    """Clients that retry see nothing of it, on kept connections or new ones."""
    with listen(ServerConfig(port=0)) as free:
        port = free.getsockname()[1]
    stop = threading.Event()
    clients = [Client(port, stop) for _ in range(4)]
    first = Process("free", port)
    with first.child:
        first.address()
        for client in clients:
            client.start()
        for client in clients:
            client.wait_answers(20)
        first.child.terminate()
        status = first.child.wait(10)
    second = Process("free", port)
    with second.child:
        second.address()
        for client in clients:
            while not client.answers.empty():
                client.answers.get()
            client.wait_answers(20)
        stop.set()
        for client in clients:
            client.join()
        second.child.kill()

    assert status == 0
    assert [client.error for client in clients] == [None] * 4


# --- limits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[str, int]]:
    """Yield the address of a process with short time limits and large replies."""
    process = Process("hasty")
    with process.child:
        yield process.address()
        process.child.kill()


@pytest.mark.parametrize("cut", [-1, 5])
def test_slow_requests_get_408(hasty: tuple[str, int], cut: int) -> None:
    """In the body as in the head."""
    with socket.create_connection(hasty, timeout=10) as connection:
        connection.sendall(post().encode()[:cut])
        reply = everything(connection)

    assert reply.startswith("HTTP/1.1 408 Request Timeout")
    assert "connection: close" in reply


def test_silent_connections_are_closed(hasty: tuple[str, int]) -> None:
    """Without a word."""
    with socket.create_connection(hasty, timeout=10) as connection:
        assert everything(connection) == ""


def test_replies_that_are_not_read_end(hasty: tuple[str, int]) -> None:
    """Their end is missing, and the client can see it."""
    with socket.create_connection(hasty, timeout=10) as connection:
        connection.sendall(post({"input": ["x"] * 20}).encode())
        head = connection.recv(100)
        with socket.create_connection(hasty, timeout=10) as other:
            # It is closed for its silence, later than the reply is found stuck.
            everything(other)
        reply = head.decode() + everything(connection)
    declared = int(reply.partition("content-length: ")[2].partition("\r\n")[0])

    assert len(reply) < declared


def test_the_limit_of_open_files_is_raised() -> None:
    """As far as the user may, for thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        process = Process("free")
        with process.child:
            process.address()
            limits = Path(f"/proc/{process.child.pid}/limits").read_text()
            process.child.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert re.search(rf"^Max open files +{hard} +{hard} ", limits, re.MULTILINE)


# --- starts --------------------------------------------------------------------------------------


def test_an_address_in_use_is_named() -> None:
    """Before anything is loaded, the user learns which setting to change."""
    with listen(ServerConfig(port=0)) as taken:
        service = FakeService()
        server = ServerConfig(port=taken.getsockname()[1])
        service.config = Config(server=server, models=service.config.models)

        with pytest.raises(StartError, match=rf"server\.port: .*{server.port}"):
            serve(cast("Service", service))


def test_an_address_for_several_sockets_is_taken_alone_first() -> None:
    """A second server of the same user is an address in use, not half of the connections."""
    sockets = listen_together(ServerConfig(port=0), 2)
    ports = [one.getsockname()[1] for one in sockets]
    with sockets[0], sockets[1], pytest.raises(StartError, match=r"server\.port: .*in use"):
        listen_together(ServerConfig(port=ports[0]), 2)

    assert ports[0] == ports[1]
