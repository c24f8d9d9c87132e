"""A server of several workers in processes of its own, and clients that never ask twice.

`python -m tests.supervised serve FILE` supervises workers with a fake service, which start sooner
than real ones; `python -m tests.supervised worker …` is one of these.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple, cast

import psutil

from embedsvc.calls import EmbedCall, Embedded
from embedsvc.config import Config
from embedsvc.configfile import Overrides, load
from embedsvc.errors import ModelDied, ModelError, StartError
from embedsvc.keys import Keys
from embedsvc.models.owner import Owner
from embedsvc.models.process import ProcessModel
from embedsvc.service import Service
from embedsvc.supervisor.supervisor import supervise
from embedsvc.supervisor.worker import run
from tests.http_fakes import FakeService
from tests.http_wire import post
from tests.isolated import PoisonedModel, embed, spec_of

WAIT_S = 60.0
NOWHERE = "/nowhere"
N_WORKERS = 2
SILENT_S = 4.0


class Worker(NamedTuple):
    """Who answered."""

    number: int
    pid: int


class Client:
    """One connection; reconnects only where a reply said that the connection ends."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._http = http.client.HTTPConnection(*address, timeout=WAIT_S)
        self._http.connect()

    def worker(self) -> Worker:
        """Ask who answers."""
        found = json.loads(self._get("/info"))["worker"]
        return Worker(found["number"], found["pid"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all its labels."""
        lines = self._get("/metrics").decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if re.match(rf"{name}[{{ ]", line)]
        assert values, name
        return sum(map(float, values))

    def embed(self) -> None:
        """Ask for a vector, and get it."""
        body = json.dumps({"input": "a"})
        self._http.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        reply = self._http.getresponse()
        assert len(json.loads(reply.read())["data"]) == 1
        assert reply.status == 200

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _get(self, path: str) -> bytes:
        self._http.request("GET", path)
        return self._http.getresponse().read()


class Load(threading.Thread):
    """A client that asks for vectors, one after the other, until told to stop or disappointed."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        self._client = Client(address)
        self.stop = threading.Event()
        self.answers = 0
        self.error: Exception | None = None

    def run(self) -> None:
        """Ask."""
        try:
            # Leaves the processors to those that start meanwhile.
            while not self.stop.wait(0.005):
                self._client.embed()
                self.answers += 1
        except (OSError, http.client.HTTPException, AssertionError, LookupError) as error:
            self.error = error
        self._client.close()


class Supervised:
    """A server of two workers with a configuration file that a test may rewrite.

    Args:
        folder: of the file, and of the cache.
        module: with a command `serve` that is given the file.
        text: what is in the file.

    Attributes:
        child: the supervisor.
        n_files: how many it had open when all were ready.
    """

    n_files: int

    def __init__(self, folder: Path, module: str = "tests.supervised", text: str = "") -> None:
        self._file = folder / "config.toml"
        self.write(text)
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, "serve", str(self._file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "HOME": str(folder),
                "EMBEDSVC_BACKEND": "hash",
                "EMBEDSVC_PORT": "0",
                "EMBEDSVC_WORKERS": str(N_WORKERS),
            },
        )
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def write(self, text: str) -> None:
        """Change the file."""
        self._file.write_text(text)

    def address(self) -> tuple[str, int]:
        """Wait until it is ready; return its address."""
        assert self.child.stdout is not None
        found = re.search(r"ready on http://([^:]+):(\d+)", self.child.stdout.readline())
        assert found
        self.n_files = psutil.Process(self.child.pid).num_fds()
        return found[1], int(found[2])

    def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log."""
        while (line := self._said.get(timeout=WAIT_S)) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"the process ended without {pattern!r}")

    def processes(self) -> list[psutil.Process]:
        """Return its processes."""
        parent = psutil.Process(self.child.pid)
        return [parent, *parent.children(recursive=True)]

    def hang_up(self) -> None:
        """Have the file read again."""
        self.child.send_signal(signal.SIGHUP)

    def __enter__(self) -> Supervised:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, and wait for all that is left."""
        with self.child:
            self.child.kill()
            self._listening.join()

    def _listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self._said.put(line.rstrip())
        self._said.put(None)


def one_of_each(address: tuple[str, int]) -> dict[int, tuple[Client, Worker]]:
    """Return a connection to each worker."""
    found: dict[int, tuple[Client, Worker]] = {}
    while len(found) < N_WORKERS:
        client = Client(address)
        worker = client.worker()
        if worker.number in found:
            client.close()
        else:
            found[worker.number] = client, worker
    return found


def workers(address: tuple[str, int]) -> list[Worker]:
    """Return who serves now."""
    found = one_of_each(address)
    for client, _ in found.values():
        client.close()
    return sorted(worker for _, worker in found.values())


def half_a_request(address: tuple[str, int]) -> socket.socket:
    """Return a connection on which the rest of a request is still to come."""
    connection = socket.create_connection(address, timeout=WAIT_S)
    connection.sendall(post().encode()[:-1])
    return connection


# --- in the processes ----------------------------------------------------------------------------


class QuickService(FakeService):
    """A fake service of one configuration, which cannot serve a model from `NOWHERE`.

    It loads from a named pipe until somebody has written to it.
    An isolated model is a real process, shared with the other workers.
    """

    def __init__(self, config: Config, owner: Owner, keys: Keys) -> None:
        super().__init__(config.models[0].name)
        self.keys = keys
        self.config = config
        self.state = "loading"
        self.metrics.ready_from(lambda: self.ready)
        self._model: ProcessModel | None = None
        if config.models[0].versions[0].isolate is True:
            self._model = PoisonedModel(spec_of(Path(config.server.cache_dir)), owner=owner)

    async def start(self) -> None:
        """Become ready, or fail."""
        source = self.config.models[0].versions[0].source
        await asyncio.to_thread(_read_pipe, Path(source))
        if source == NOWHERE:
            raise ModelError(f"models[0].source: no such folder: {NOWHERE}")
        if self._model is not None:
            await asyncio.to_thread(self._model.load)
        await super().start()

    async def embed(self, call: EmbedCall) -> Embedded:
        """Run a batch first, where there is a model, which is loaded again where it died."""
        while self._model is not None:
            try:
                await asyncio.to_thread(embed, self._model, [[1, 2, 3]])
                break
            except ModelDied:
                await asyncio.to_thread(self._model.load)
        return await super().embed(call)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Need the model no longer."""
        if self._model is not None:
            await asyncio.to_thread(self._model.close)
        await super().stop(drain_timeout_s)


def _read_pipe(path: Path) -> None:
    if path.is_fifo():
        path.read_text()


def main() -> None:
    """Supervise, or be a worker."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    kind, *arguments = sys.argv[1:]
    if kind == "worker":
        _, control, wishes, *listeners = map(int, arguments)
        run(
            control,
            wishes,
            listeners,
            lambda config, owner, keys: cast("Service", QuickService(config, owner, keys)),
        )
        return

    def load_again() -> Config:
        return load(Path(arguments[0]), Overrides(port=0, workers=N_WORKERS))

    def say_ready(url: str, _: dict[str, object]) -> None:
        sys.stdout.write(f"ready on {url}\n")
        sys.stdout.flush()

    try:
        command = [sys.executable, "-P", "-m", "tests.supervised", "worker"]
        supervise(load_again(), command, load_again, say_ready, silent_s=SILENT_S)
    except StartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
