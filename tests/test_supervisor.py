"""Several workers: who answers, who is missed, and how all of them are renewed or end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path

import psutil
import pytest

from tests.http_wire import post
from tests.supervised import (
    NOWHERE,
    WAIT_S,
    Client,
    Load,
    Supervised,
    half_a_request,
    one_of_each,
    workers,
)

pytestmark = pytest.mark.timeout(90)

REQUESTS = "embedsvc_requests_total"
MODEL_MODULES = ("embedsvc.models.worker", "tests.poisoned_worker")
# Of 64 connections spread at random over two workers, one gets fewer than this once in 10^9 times.
LEAST_OF_64 = 9

MISSING_MODEL = f'[[models]]\nname = "m"\nsource = "{NOWHERE}"\n'
SHARED_MODEL = """
[server]
cache_dir = "{}"
[[models]]
name = "m"
[[models.versions]]
isolate = true
"""
# As little to measure and to warm up as can be.
REAL_MODEL = """
[[devices]]
slots = 1
threads_per_slot = 1
[[models]]
name = "m"
[[models.versions]]
isolate = true
max_length = 32
[models.versions.batching]
buckets = [32]
max_batch_tokens = 64
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose cache all servers share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def shared(home: Path) -> Iterator[tuple[Supervised, tuple[str, int]]]:
    """Yield a server for the tests that leave it in order."""
    with Supervised(home) as server:
        yield server, server.address()


@pytest.fixture
def server(shared: tuple[Supervised, tuple[str, int]]) -> Supervised:
    """Return a server with an empty configuration file."""
    shared[0].write("")
    return shared[0]


@pytest.fixture
def address(shared: tuple[Supervised, tuple[str, int]]) -> tuple[str, int]:
    """Return its address."""
    return shared[1]


@pytest.fixture
def own(home: Path) -> Iterator[Supervised]:
    """Yield a server that a test may end."""
    with Supervised(home) as server:
        yield server


def models_of(server: Supervised) -> list[psutil.Process]:
    """Return the processes of models, all of which are the supervisor's own."""
    children = server.processes()[0].children()
    found = [child for child in children if child.cmdline()[-2] in MODEL_MODULES]
    assert len(server.processes()) == 1 + 2 + len(found)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    """Wait until processes have ended; say whether all have."""
    return not psutil.wait_procs(processes, timeout=WAIT_S)[1]


# --- serving -------------------------------------------------------------------------------------


def test_connections_are_spread_over_the_workers(address: tuple[str, int]) -> None:
    """At random: the kernel hashes addresses and ports with a secret of its own."""
    clients = [Client(address) for _ in range(64)]
    numbers = [client.worker().number for client in clients]
    for client in clients:
        client.close()

    assert min(numbers.count(0), numbers.count(1)) >= LEAST_OF_64


def test_metrics_are_those_of_all_whoever_is_asked(address: tuple[str, int]) -> None:
    """What one worker has counted, the other one shows too."""
    (one, _), (other, _) = one_of_each(address).values()
    before = one.metric(REQUESTS)
    one.embed()
    one.embed()
    other.embed()

    # Asking for the worker counts as well.
    assert one.metric(REQUESTS) == other.metric(REQUESTS) == before + 3
    assert one.metric("embedsvc_workers") == 2
    one.close()
    other.close()


def test_all_who_ask_for_metrics_at_once_are_answered(address: tuple[str, int]) -> None:
    """Twice as many as workers and more: each asks for those of all."""
    scrapers = [socket.create_connection(address, timeout=WAIT_S) for _ in range(16)]
    for scraper in scrapers:
        scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answers = [scraper.makefile("rb").read() for scraper in scrapers]
    for scraper in scrapers:
        scraper.close()

    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert all(b"\nembedsvc_workers 2.0\n" in answer for answer in answers)


def test_the_supervisor_imports_nothing_heavy() -> None:
    """It needs memory for nothing but its workers."""
    script = (
        "import sys, embedsvc.supervisor.supervisor; "
        "print({'torch', 'transformers', 'litestar', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert done.stdout == b"set()\n"


# --- a worker dies -------------------------------------------------------------------------------


def test_a_workers_death_costs_its_own_connections_and_nothing_else(
    server: Supervised, address: tuple[str, int]
) -> None:
    """Others are served, newcomers too, at once; it is replaced; what was counted stays."""
    (kept, survivor), (lost, victim) = one_of_each(address).values()
    lost.embed()
    deaths = kept.metric("embedsvc_worker_deaths_total")
    before = kept.metric(REQUESTS)
    os.kill(victim.pid, signal.SIGKILL)
    newcomers = [Client(address) for _ in range(32)]
    for client in newcomers:
        client.embed()
        client.close()
    with pytest.raises(OSError):  # noqa: PT011  # reset or closed, as the kernel sees fit
        lost.embed()
    kept.embed()
    again = server.said(rf"worker ready number={victim.number} pid=(\d+)")
    now = workers(address)

    assert {worker.pid for worker in now} == {survivor.pid, int(again[1])}
    assert kept.metric(REQUESTS) >= before + 33
    assert kept.metric("embedsvc_worker_deaths_total") == deaths + 1
    assert kept.metric("embedsvc_workers") == 2
    assert psutil.Process(server.child.pid).num_fds() == server.n_files
    kept.close()
    lost.close()


def test_a_worker_that_hangs_is_replaced(server: Supervised, address: tuple[str, int]) -> None:
    """Its process is there and does nothing any more; what it had counted stays."""
    (kept, survivor), (lost, victim) = one_of_each(address).values()
    lost.embed()
    before = kept.metric(REQUESTS)
    os.kill(victim.pid, signal.SIGSTOP)

    server.said(rf"worker {victim.number} answers nothing")
    again = server.said(rf"worker ready number={victim.number} pid=(\d+)")

    assert {worker.pid for worker in workers(address)} == {survivor.pid, int(again[1])}
    assert kept.metric(REQUESTS) >= before
    kept.close()
    lost.close()


# --- no worker is ready --------------------------------------------------------------------------


def listening(server: Supervised) -> tuple[str, int]:
    """Return the address on which somebody accepts."""
    found = psutil.Process(server.child.pid).net_connections("tcp")
    (address,) = {connection.laddr for connection in found if not connection.raddr}
    return address


def ask(
    address: tuple[str, int], method: str, path: str, body: str = "", **headers: str
) -> tuple[int, HTTPMessage, bytes]:
    """Return status, headers and body of the answer to one request on a connection of its own."""
    connection = HTTPConnection(*address, timeout=WAIT_S)
    connection.request(method, path, body, {"x-request-id": "mine"} | headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, reply.headers, content


def assert_says_that_it_is_not_ready(address: tuple[str, int], n_before: float) -> None:
    """Every kind of request is answered at once, on whichever socket it comes."""
    for _ in range(16):
        status, headers, body = ask(address, "POST", "/v1/embeddings", "x" * (1 << 20))
        assert status == 503
        assert headers["retry-after"] == "2"
        assert headers["x-request-id"] == "mine"
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == "not_ready"
    assert ask(address, "GET", "/health/live")[::2] == (200, b'{"status":"live"}')
    assert ask(address, "GET", "/health/ready")[::2] == (503, b'{"state":"loading"}')
    assert ask(address, "HEAD", "/health")[::2] == (503, b"")
    assert ask(address, "GET", "/info")[0] == 503
    metrics = ask(address, "GET", "/metrics")[2].decode()
    assert "\nembedsvc_ready 0.0\n" in metrics
    assert "\nembedsvc_workers 0.0\n" in metrics
    counts = re.findall(r'embedsvc_requests_total{.*route="(.*)",status="503"} (.*)', metrics)
    assert {route: float(count) for route, count in counts} == {
        "/v1/embeddings": n_before + 16,
        "none": n_before / 16 + 1,
    }


class Gate:
    """A source of models at which workers that load wait until it is opened.

    Attributes:
        path: of the source.
        model: its section of a configuration.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self.model = f'[[models]]\nname = "m"\nsource = "{self.path}"\n'

    def shut(self) -> None:
        """Let those wait who load from now on."""
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path)

    def let_one_pass(self) -> None:
        """Let go who waits, or is the first to."""
        writer = os.open(self.path, os.O_WRONLY)
        again = self.path.with_suffix(".again")
        os.mkfifo(again)
        again.replace(self.path)
        os.close(writer)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until somebody waits; let all go in the end, and those who come later."""
        writer = os.open(self.path, os.O_WRONLY)
        yield
        free = self.path.with_suffix(".free")
        free.touch()
        free.replace(self.path)
        os.close(writer)


def test_somebody_answers_while_no_worker_is_ready(tmp_path: Path) -> None:
    """While the first one loads, and after all have died, until one is ready again."""
    gate = Gate(tmp_path)
    gate.shut()
    with Supervised(tmp_path, text=gate.model) as server:
        with gate.held():
            address = listening(server)
            assert_says_that_it_is_not_ready(address, 0)
        assert server.address() == address
        before = workers(address)

        gate.shut()
        for worker in before:
            os.kill(worker.pid, signal.SIGKILL)
            server.said(f"worker {worker.number} died")
        with gate.held():
            assert_says_that_it_is_not_ready(address, 16)
        for _ in before:
            server.said("worker ready")
        for _ in range(16):
            assert ask(address, "GET", "/health/ready")[0] == 200
        assert len(workers(address)) == 2
        assert psutil.Process(server.child.pid).num_fds() == server.n_files


def test_the_first_workers_death_is_noticed_while_the_other_one_loads(tmp_path: Path) -> None:
    """Newcomers do not wait until that is ready; then it is replaced."""
    gate = Gate(tmp_path)
    gate.shut()
    with Supervised(tmp_path, text=gate.model) as server:
        gate.let_one_pass()
        with gate.held():
            address = listening(server)
            client = Client(address)
            first = psutil.Process(client.worker().pid)
            first.kill()
            assert gone([first])
            assert ask(address, "GET", "/info")[0] == 503
            client.close()
        assert server.address() == address
        server.said("worker ready number=0")

        assert len(workers(address)) == 2


def test_workers_that_are_killed_while_they_load_are_begun_anew(tmp_path: Path) -> None:
    """At the start, too; all deaths are counted."""
    gate = Gate(tmp_path)
    gate.shut()
    with Supervised(tmp_path, text=gate.model) as server:
        with gate.held():
            for child in server.processes()[1:]:
                child.kill()
            server.said("worker 0 is started again: .*SIGKILL")
        (client, _), (other, victim) = one_of_each(server.address()).values()
        n_at_start = client.metric("embedsvc_worker_deaths_total")

        gate.shut()
        known = server.processes()
        os.kill(victim.pid, signal.SIGKILL)
        with gate.held():
            (successor,) = set(server.processes()) - set(known)
            successor.kill()
            server.said("could not be started: .*SIGKILL")
        server.said("worker ready")

        assert n_at_start == 2
        assert client.metric("embedsvc_worker_deaths_total") == 4
        client.close()
        other.close()


def test_keys_are_asked_for_while_no_worker_is_ready(tmp_path: Path) -> None:
    """Strangers learn nothing but health and metrics. Keys are read at SIGHUP and never else."""
    gate = Gate(tmp_path)
    gate.path.touch()
    keys = tmp_path / "keys.toml"
    entry = '[[keys]]\nname = "a"\nsha256 = "{}"\n'
    keys.write_text(entry.format(sha256(b"old").hexdigest()))
    text = f'[server]\nkeys_file = "{keys}"\n{gate.model}'
    with Supervised(tmp_path, text=text) as server:
        address = server.address()
        keys.write_text(entry.format(sha256(b"new").hexdigest()))
        server.hang_up()
        server.said("all workers are renewed")
        keys.unlink()
        gate.shut()
        for child in server.processes()[1:]:
            child.kill()
        server.said(r"worker \d died")
        server.said(r"worker \d died")
        with gate.held():
            statuses = [
                ask(address, "GET", path, **{"api-key": key})[0]
                for path in ("/info", "/health/live")
                for key in ("", "old", "new")
            ]
        server.said("worker ready")
        server.said("worker ready")
        statuses += [ask(address, "GET", "/info", **{"api-key": key})[0] for key in ("old", "new")]

    assert statuses == [401, 401, 503, 200, 200, 200, 401, 200]


# --- SIGHUP --------------------------------------------------------------------------------------


def test_a_renewal_under_load_fails_no_request(
    server: Supervised, address: tuple[str, int]
) -> None:
    """No client asks twice; all of them end up with new workers and the new configuration."""
    before = workers(address)
    load = [Load(address) for _ in range(4)]
    for client in load:
        client.start()
    server.write('[server]\nmax_inputs = 7\nhost = "::1"\n')
    server.hang_up()
    deferred = server.said("these need a restart, the old values stay: (.*)")
    server.said("all workers are renewed")
    after = workers(address)
    for client in load:
        client.stop.set()
        client.join()

    assert [client.error for client in load] == [None] * 4
    assert min(client.answers for client in load) > 0
    assert not {worker.pid for worker in before} & {worker.pid for worker in after}
    assert deferred[1] == "server.host"


def test_a_renewal_loses_no_counts_and_leaves_nothing_open(
    server: Supervised, address: tuple[str, int]
) -> None:
    """Who leaves tells the last ones."""
    client = Client(address)
    client.embed()
    before = client.metric(REQUESTS)
    client.embed()
    client.close()
    server.hang_up()
    server.said("all workers are renewed")
    client = Client(address)

    assert client.metric(REQUESTS) == before + 1
    assert psutil.Process(server.child.pid).num_fds() == server.n_files
    assert len(server.processes()) == 3
    client.close()


def test_a_successor_that_dies_is_replaced_while_the_old_worker_finishes(
    server: Supervised, address: tuple[str, int]
) -> None:
    """Newcomers wait for neither."""
    old = psutil.Process(workers(address)[0].pid)
    held = [half_a_request(address) for _ in range(32)]
    server.hang_up()
    first = server.said(r"worker ready number=0 pid=(\d+)")
    os.kill(int(first[1]), signal.SIGKILL)
    server.said("worker 0 died: SIGKILL")
    for _ in range(32):
        client = Client(address)
        client.embed()
        client.close()
    server.said(r"worker ready number=0 pid=(\d+)")
    waited = not old.is_running()
    for connection in held:
        connection.close()
    server.said("all workers are renewed")

    assert not waited
    assert len(workers(address)) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[server]\nmax_inputs = 0\n", r"not taken over.*: server\.max_inputs: must be"),
        (MISSING_MODEL, r"worker 0 not renewed, the old one stays: models\[0\]"),
    ],
    ids=["a mistake", "a model that is not there"],
)
def test_a_configuration_that_cannot_be_served_changes_nothing(
    server: Supervised, address: tuple[str, int], text: str, complaint: str
) -> None:
    """The log says what is wrong with it, and the old workers serve on."""
    before = workers(address)
    server.write(text)
    server.hang_up()
    server.said(complaint)

    assert workers(address) == before


# --- a shared model ------------------------------------------------------------------------------


def embed_with_each(address: tuple[str, int]) -> None:
    """Let each worker give a vector."""
    for client, _ in one_of_each(address).values():
        client.embed()
        client.close()


def test_the_process_of_a_model_is_shared_and_replaced(tmp_path: Path) -> None:
    """Calls outlive its death, and it outlives a renewal that leaves the model as it is.

    Where the model is another one, its process goes with the last of the old workers.
    """
    (tmp_path / "new").mkdir()
    with Supervised(tmp_path, text=SHARED_MODEL.format(tmp_path)) as server:
        address = server.address()
        (first,) = models_of(server)
        first.kill()
        embed_with_each(address)
        (second,) = models_of(server)
        server.hang_up()
        server.said("all workers are renewed")
        embed_with_each(address)
        assert models_of(server) == [second]

        server.write(SHARED_MODEL.format(tmp_path / "new"))
        server.hang_up()
        server.said("all workers are renewed")
        assert gone([second])
        embed_with_each(address)
        (third,) = models_of(server)

    assert gone([third])


# --- the end -------------------------------------------------------------------------------------


def test_sigterm_finishes_what_is_in_flight(own: Supervised) -> None:
    """Also where everybody of the group gets it; then nobody is left, and the exit is 0."""
    address = own.address()
    processes = own.processes()
    held = [half_a_request(address) for _ in range(8)]
    for process in reversed(processes):
        process.terminate()
    own.said("SIGTERM: the workers finish what is in flight")
    replies = []
    for connection in held:
        connection.sendall(post().encode()[-1:])
        replies.append(b"".join(iter(lambda: connection.recv(65536), b"")))  # noqa: B023  # at once
        connection.close()

    assert [reply[:12] for reply in replies] == [b"HTTP/1.1 200"] * 8
    assert own.child.wait(WAIT_S) == 0
    assert gone(processes)


def test_the_second_signal_ends_all_at_once(own: Supervised) -> None:
    """Whoever cannot wait need not."""
    address = own.address()
    processes = own.processes()
    with half_a_request(address):
        own.child.terminate()
        own.said("SIGTERM: the workers finish what is in flight")
        own.child.terminate()

        assert own.child.wait(WAIT_S) == -signal.SIGTERM
        assert gone(processes)


def test_nobody_outlives_the_supervisor(server: Supervised, address: tuple[str, int]) -> None:
    """Even where it is killed, and its address is free again. Ends the server of other tests."""
    processes = server.processes()
    with half_a_request(address):
        server.child.kill()

        assert gone(processes)
    with socket.create_server(address):
        pass


# --- the start -----------------------------------------------------------------------------------


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """The error is the first worker's, the exit status 1."""
    with Supervised(tmp_path, text=MISSING_MODEL) as server:
        server.said(r"models\[0\]\.source: no such folder")

        assert server.child.wait(WAIT_S) == 1


@pytest.mark.slow
def test_workers_of_the_command_line_share_a_model(tmp_path: Path) -> None:
    """Either gives vectors; the process of the model is the supervisor's."""
    with Supervised(tmp_path, "embedsvc.cli", REAL_MODEL) as server:
        embed_with_each(server.address())
        processes = server.processes()
        models = models_of(server)
        server.child.terminate()

        assert len(models) == 1
        assert server.child.wait(WAIT_S) == 0
        assert gone(processes)
