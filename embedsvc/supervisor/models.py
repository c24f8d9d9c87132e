"""The model processes that all workers use. Lives on the supervisor's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from embedsvc.errors import ModelError
from embedsvc.models.launch import OwnProcess
from embedsvc.models.wire import KILL, Attach, Attached, Failed, Gone, Ready, encode

log = logging.getLogger(__name__)

User = socket.socket


class SharedModels:
    """One process for whatever is asked for, as long as somebody needs it.

    A process that died is not started again before somebody asks for it again.
    """

    def __init__(self) -> None:
        # Those that can be had, and all that have not ended yet.
        self._wanted: dict[bytes, SharedModel] = {}
        self._running: set[SharedModel] = set()

    def attach(self, wish: Attach, user: User) -> None:
        """Give a worker the process it asks for.

        Args:
            wish: what it is to have loaded.
            user: taken over; closed by the worker when it needs the process no longer.
        """
        key = encode(wish)
        model = self._wanted.get(key)
        if model is None or model.doomed:
            try:
                model = self._wanted[key] = SharedModel(wish, self._forget)
            except OSError as error:
                _say(user, Failed(f"no process can be started for the model: {error}"))
                user.close()
                return
            self._running.add(model)
        model.join(user)

    def warmed_up(self) -> None:
        """Note that a worker has loaded all its models, and run their batches."""
        for model in self._running:
            model.warm = True

    async def close(self) -> None:
        """End all processes that still run, and wait for their ends."""
        running = tuple(self._running)
        for model in running:
            model.kill()
        await asyncio.gather(*(model.ended.wait() for model in running))

    def _forget(self, model: SharedModel) -> None:
        self._running.discard(model)
        self._wanted = {key: m for key, m in self._wanted.items() if m is not model}


class SharedModel:
    """A model's process and those who use it.

    Args:
        wish: what it loads.
        on_end: called when it is gone.

    Attributes:
        warm: whether one of them has run its batches on it.
        doomed: whether it is about to end.
        ended: set when it is gone.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, wish: Attach, on_end: Callable[[SharedModel], None]) -> None:
        self.warm = self.doomed = False
        self.ended = asyncio.Event()
        self._on_end = on_end
        self._source = wish.spec.folder.source
        self._process = OwnProcess(wish.spec, wish.worker)
        self._users: set[User] = set()
        self._ready: Ready | None = None
        self._loop = asyncio.get_running_loop()
        # Set when nobody is given its sockets any more.
        self._over = threading.Event()
        threading.Thread(target=self._live, name="model-process", daemon=True).start()

    def join(self, user: User) -> None:
        """Let one more worker use it, as soon as it is ready."""
        user.setblocking(False)
        self._users.add(user)
        asyncio.get_running_loop().add_reader(user, self._hear, user)
        if self._ready is not None:
            self._attach(user, self._ready)

    def kill(self) -> None:
        """End it; those who use it learn when it is gone."""
        self.doomed = True
        self._process.kill()

    def _live(self) -> None:
        """Wait for all that happens to the process; on a thread of its own."""
        outcome: Ready | Failed
        try:
            # Workers decide how long they wait.
            outcome = self._process.ready(None)
        except ModelError as error:
            outcome = Failed(str(error), error.killed)
        # Not where the supervisor has ended meanwhile.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loaded, outcome)
            self._process.follow()
            self._loop.call_soon_threadsafe(self._end, self._process.end("died"))
            self._over.wait()
            # Waits for the last lines of its log.
            self._process.close()
            self._loop.call_soon_threadsafe(self._forget)

    def _loaded(self, outcome: Ready | Failed) -> None:
        if isinstance(outcome, Failed):
            for user in self._users:
                _say(user, outcome)
            self.kill()
            return
        self._ready = outcome
        log.info("model process ready model=%s pid=%d", self._source, self._process.pid)
        for user in self._users:
            self._attach(user, outcome)

    def _attach(self, user: User, ready: Ready) -> None:
        message = encode(Attached(self._process.pid, self.warm, self._process.load_s, ready))
        with suppress(OSError):
            socket.send_fds(user, [message], [self._process.control.fileno()])

    def _hear(self, user: User) -> None:
        try:
            message = user.recv(len(KILL))
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message == KILL:
            self.kill()
            return
        self._leave(user)
        if not self._users:
            self.kill()

    def _leave(self, user: User) -> None:
        asyncio.get_running_loop().remove_reader(user)
        self._users.discard(user)
        user.close()

    def _end(self, how: str) -> None:
        self.doomed = True
        log.log(
            logging.WARNING if self._users else logging.INFO,
            "model process ended model=%s pid=%d: %s", self._source, self._process.pid, how,
        )  # fmt: skip
        for user in tuple(self._users):
            _say(user, Gone(how))
            self._leave(user)
        self._over.set()

    def _forget(self) -> None:
        self._on_end(self)
        self.ended.set()


def _say(user: User, message: Failed | Gone) -> None:
    # Who is gone is noticed by its end.
    with suppress(OSError):
        user.send(encode(message))
