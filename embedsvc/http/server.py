"""The server process: uvicorn with our settings, our HTTP details and our shutdown.

The service loads while the server listens, so that probes and clients are answered at once. Runs on
the main thread, which owns SIGTERM and SIGINT: the first one drains, the second one kills.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from litestar import Litestar

from embedsvc.config import ServerConfig
from embedsvc.errors import StartError
from embedsvc.http.app import create_app
from embedsvc.http.connection import Connection
from embedsvc.service import Service

log = logging.getLogger(__name__)

# Longer than the 90 s that clients and proxies keep idle connections, so that they close first.
KEEP_ALIVE_S = 125
# Bursts of new connections wait here; the kernel cuts it to net.core.somaxconn.
BACKLOG = 4096
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What uvicorn may still wait for connections after the service gave its last answers.
LAST_ANSWERS_S = 5


def serve(service: Service, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
        service: not started yet.
        on_ready: called with the server's address when the models are loaded.

    Raises:
        StartError: the address cannot be listened on, or a model cannot be served.
    """
    with listen(service.config.server) as listener:
        server = Server(service, on_ready=lambda: on_ready(url_of(listener)))
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """One run of one service.

    Attributes:
        failure: what ended the run, where it was not a signal.
    """

    def __init__(self, service: Service, on_ready: Callable[[], None]) -> None:
        self._service = service
        self._on_ready = on_ready
        self._app = create_app(service, self._service_lifespan)
        self._stopping: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        super().__init__(_uvicorn_config(self._app, service.config.server))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over, in the one place uvicorn provides for it."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in SIGNALS:
                loop.add_signal_handler(number, self._on_signal, number)
            try:
                yield
            finally:
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
        else:
            yield

    def _on_signal(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            # Even a loop that hangs is ended by the second signal. The kernel keeps the default
            # action from the first process of a container.
            signal.signal(each, _exit_killed if os.getpid() == 1 else signal.SIG_DFL)
        log.info("%s: finishing what is in flight", signal.Signals(number).name)
        if self._service.state == "loading":
            _exit_now()
        self._app.state.draining = True
        self.should_exit = True
        # Stopping the service answers everyone who still waits then.
        loop.call_later(self._service.config.server.drain_timeout_s, self._stop_service)

    def _stop_service(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._service.stop())
        return self._stopping

    @asynccontextmanager
    async def _service_lifespan(self, _: Litestar) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._service.start())
        loading.add_done_callback(self._loaded)
        try:
            yield
        finally:
            loading.cancel()
            await self._stop_service()

    def _loaded(self, loading: asyncio.Task[None]) -> None:
        if loading.cancelled():
            return
        self.failure = loading.exception()
        if self.failure is None:
            self._on_ready()
        else:
            self.should_exit = True


def _uvicorn_config(app: Litestar, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="uvloop",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + LAST_ANSWERS_S,
    )


def listen(config: ServerConfig) -> socket.socket:
    """Take the address before anything is loaded.

    Raises:
        StartError: it is in use, not ours, or not an address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(
            f"server.host, server.port: cannot listen on {config.host}:{config.port}: "
            f"{error.strerror}. Choose another port, or stop what uses it."
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _exit_now() -> None:
    """End without waiting for the threads that load; nothing has been accepted yet."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_killed(number: int, _: FrameType | None) -> None:
    """End at once, with the exit status that a shell shows for this signal."""
    os._exit(128 + number)
