"""One worker: the server of `embedsvc.http` as a process that does what its supervisor says."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from embedsvc.config import Config
from embedsvc.errors import EmbedsvcError
from embedsvc.http.server import Server, spare_what_is_loaded
from embedsvc.http.sockets import allow_many_connections
from embedsvc.keys import Keys
from embedsvc.models.owner import Owner
from embedsvc.service import Service
from embedsvc.supervisor.messages import (
    TO_WORKER,
    AllMetrics,
    AskMetrics,
    Drain,
    Failed,
    Line,
    Loaded,
    Loading,
    OwnMetrics,
    Retire,
    Serve,
    Start,
    TellMetrics,
    ToWorker,
    first_message,
)
from embedsvc.totals import families_of

# prctl(2): the signal this process gets when the one that started it is gone.
_PR_SET_PDEATHSIG = 1


def run(
    control_fd: int,
    wishes_fd: int,
    listener_fds: Sequence[int],
    service_of: Callable[[Config, Owner, Keys], Service] = Service,
) -> None:
    """Serve until told to end; runs on the main thread of a process of its own.

    Args:
        control_fd: socket on which the supervisor says what to do.
        wishes_fd: socket on which to ask it for what workers share.
        listener_fds: the listening sockets that all workers share.
        service_of: makes the service of a configuration and its keys.
    """
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The supervisor gets them too, from whoever signals a whole group, and says what to do.
        signal.signal(number, signal.SIG_IGN)
    for fd in (control_fd, wishes_fd, *listener_fds):
        os.set_inheritable(fd, False)
    control = socket.socket(fileno=control_fd)
    start = first_message(control)
    if not isinstance(start, Start):
        return
    allow_many_connections()
    owner = Owner(socket.socket(fileno=wishes_fd))
    service = service_of(start.config, owner, Keys(start.keys))
    listeners = [socket.socket(fileno=fd) for fd in listener_fds]
    Worker(service, start, control, listeners).run(sockets=[])


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, even in the middle of an import.

    Where there is no prctl, the end of the socket to the supervisor ends the event loop.
    """
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Worker(Server):
    """A server that accepts from the sockets it is told, and knows the metrics of all workers."""

    def __init__(
        self,
        service: Service,
        start: Start,
        control: socket.socket,
        listeners: list[socket.socket],
    ) -> None:
        super().__init__(service, self._tell_loaded)
        self._control = control
        self._listeners = listeners
        self._asked: deque[asyncio.Future[bytes]] = deque()
        state = self._app.state
        state.worker = {"number": start.number, "of": start.n_workers, "pid": os.getpid()}
        state.all_metrics = self._all_metrics

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals ignored."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to load, and to listen to the supervisor."""
        self._line = await Line.open(self._control, TO_WORKER)
        await super().startup(sockets)
        self._hearing = asyncio.create_task(self._hear())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as other servers do; say why where that was not asked for, and leave the counts."""
        await super().shutdown(self._listeners)
        self._hearing.cancel()
        if self.failure is not None:
            self._line.tell(Failed(_reason(self.failure)))
        self._tell_metrics()
        await self._line.flush()
        self._line.close()

    async def on_tick(self, counter: int) -> bool:
        """Say once a second that the event loop runs, as long as a thread loads."""
        if counter % 10 == 0 and self._service.state == "loading":
            self._line.tell(Loading())
        return await super().on_tick(counter)

    def _tell_loaded(self) -> None:
        spare_what_is_loaded()
        self._line.tell(Loaded(self._service.info()))

    def _tell_metrics(self) -> None:
        self._line.tell(OwnMetrics(families_of(self._service.metrics.registry)))

    async def _all_metrics(self) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._line.tell(AskMetrics())
        return await answer

    async def _hear(self) -> None:
        while (message := await self._line.hear()) is not None:
            await self._follow(message)
        # The supervisor is gone, and with it whoever could end or replace this process.
        os._exit(1)

    async def _follow(self, message: ToWorker) -> None:
        match message:
            case Serve(numbers):
                await self.accept_from([self._listeners[k] for k in numbers])
            case Retire():
                await self.retire()
            case Drain():
                self._close_others()
                self.drain()
            case TellMetrics():
                self._tell_metrics()
            case AllMetrics(text):
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(text)

    def _close_others(self) -> None:
        """Close the sockets that others accept from, so that they end when those close them."""
        for listener in set(self._listeners) - self._accepting.keys():
            listener.close()


def _reason(failure: BaseException) -> str:
    if isinstance(failure, EmbedsvcError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
