"""One worker process as its supervisor sees it. Lives on the supervisor's event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from embedsvc.config import Config
from embedsvc.errors import StartError
from embedsvc.keys import Keys
from embedsvc.models.launch import same_modules
from embedsvc.supervisor.messages import (
    FROM_WORKER,
    AskMetrics,
    Failed,
    FromWorker,
    Line,
    Loaded,
    OwnMetrics,
    Serve,
    Start,
    TellMetrics,
    ToWorker,
)
from embedsvc.totals import Family

# A worker that loads may be silent for so many times as long as one that serves: before its event
# loop runs it imports its libraries, perhaps from a slow disk.
LOADING_FACTOR = 15


class Child:
    """A worker from its process's start to its end.

    Attributes:
        number: of the worker whose place it has.
        pid: of its process.
        wishes: on which it asks for what workers share.
        ended: done with the exit status when everything it said has been heard.
        relieved: done when another one has its place.
    """

    def __init__(
        self,
        number: int,
        process: asyncio.subprocess.Process,
        line: Line[FromWorker],
        wishes: socket.socket,
        on_metrics: Callable[[Child, list[Family] | None], None],
    ) -> None:
        self.number = number
        self.wishes = wishes
        self.pid = process.pid
        self._process = process
        self._line = line
        self._on_metrics = on_metrics
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded | Failed] = loop.create_future()
        self._loaded_at = 0.0
        self._spoke = self._unwanted = False
        self._serving: list[int] = []
        self._told: asyncio.Future[None] | None = None
        self.relieved: asyncio.Future[None] = loop.create_future()
        self.ended = asyncio.create_task(self._follow())

    @classmethod
    async def spawn(
        cls,
        number: int,
        command: Sequence[str],
        listeners: Sequence[socket.socket],
        on_metrics: Callable[[Child, list[Family] | None], None],
    ) -> Child:
        """Start a process; it imports what it needs, and waits to be told what to load.

        Args:
            number: of the worker.
            command: starts one, given its number and its file descriptors: of two sockets to this
                process, for what it is told and for its wishes, and of the listening ones.
            listeners: all listening sockets.
            on_metrics: called with its numbers, or with None where it asks for those of all.

        Raises:
            StartError: the system allows no more processes or files.
        """
        try:
            control, its_control = socket.socketpair()
            wishes, its_wishes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its_control, its_wishes:
                process = await _started(number, command, [its_control, its_wishes, *listeners])
        except OSError as error:
            raise StartError(f"no process can be started for worker {number}: {error}") from error
        return cls(number, process, await Line.open(control, FROM_WORKER), wishes, on_metrics)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return not self.ended.done()

    @property
    def ready(self) -> bool:
        """Whether it has loaded, and runs."""
        return self.alive and self._loaded_at > 0

    @property
    def ready_s(self) -> float:
        """Seconds since it had loaded; 0 where it never has."""
        return time.monotonic() - self._loaded_at if self._loaded_at else 0.0

    def load(self, config: Config, keys: Keys, n_workers: int) -> None:
        """Have it load; the first thing it is told."""
        self.tell(Start(config, dict(keys.by_digest), self.number, n_workers))

    async def loaded(self, silent_s: float) -> dict[str, Any]:
        """Wait until it has loaded, however long; return what it serves. One that hangs is killed.

        Args:
            silent_s: seconds after which one that serves and says nothing is taken for hung.

        Raises:
            StartError: it cannot load, it died, or it hangs.
        """
        limit_s, n_silent_s = LOADING_FACTOR * silent_s, 0
        while not self._loaded.done():
            # See `answers`.
            await asyncio.wait([self._loaded], timeout=1.0)
            n_silent_s = 0 if self._spoke else n_silent_s + 1
            self._spoke = False
            if n_silent_s >= limit_s:
                why = f"it said nothing for {limit_s:.0f} s while it loaded"
                self._fail(Failed(f"worker {self.number} hangs: {why}"))
                self.kill()
        outcome = self._loaded.result()
        if isinstance(outcome, Failed):
            raise StartError(outcome.reason)
        return outcome.info

    def serve(self, numbers: list[int]) -> None:
        """Have it accept from these of the listening sockets, and from no others."""
        if numbers != self._serving:
            self._serving = numbers
            self.tell(Serve(numbers))

    async def numbers_told(self) -> None:
        """Ask for its numbers and wait until they are here, or it is gone."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
            self.tell(TellMetrics())
        await asyncio.shield(self._told)

    async def answers(self, within_s: float) -> bool:
        """Say whether it tells its numbers within about some seconds, or is gone."""
        told = asyncio.ensure_future(self.numbers_told())
        # Second by second: a machine that stood still for a minute has used up one of them only.
        for _ in range(max(1, round(within_s))):
            done, _ = await asyncio.wait([told], timeout=1.0)
            if done:
                return True
        return False

    def tell(self, message: ToWorker) -> None:
        """Send it a message."""
        self._line.tell(message)

    async def was_killed(self) -> bool:
        """Wait until it is gone; say whether somebody else than this process killed it."""
        return await asyncio.shield(self.ended) == -signal.SIGKILL and not self._unwanted

    def kill(self) -> None:
        """End its process at once."""
        self._unwanted = True
        if self._process.returncode is None:
            self._process.kill()

    async def _follow(self) -> int:
        while (message := await self._line.hear()) is not None:
            self._spoke = True
            match message:
                case Loaded() if not self._loaded.done():
                    self._loaded_at = time.monotonic()
                    self._loaded.set_result(message)
                case Failed():
                    self._fail(message)
                case OwnMetrics(families):
                    self._on_metrics(self, families)
                    self._hear_told()
                case AskMetrics():
                    self._on_metrics(self, None)
        status = await self._process.wait()
        self._line.close()
        self._fail(Failed(f"worker {self.number} ended while it loaded: {in_words(status)}"))
        self._hear_told()
        return status

    def _fail(self, failed: Failed) -> None:
        if not self._loaded.done():
            self._loaded.set_result(failed)

    def _hear_told(self) -> None:
        if self._told is not None:
            self._told.set_result(None)
            self._told = None


async def _started(
    number: int, command: Sequence[str], sockets: Sequence[socket.socket]
) -> asyncio.subprocess.Process:
    fds = [one.fileno() for one in sockets]
    return await asyncio.create_subprocess_exec(
        *command,
        *map(str, (number, *fds)),
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=same_modules(),
        # Not with the terminal's keys, which would end it before it has drained.
        process_group=0,
    )


def in_words(status: int) -> str:
    """Return an exit status as a user knows it."""
    return f"status {status}" if status >= 0 else signal.Signals(-status).name
