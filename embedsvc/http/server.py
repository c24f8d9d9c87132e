"""The server process: uvicorn with our settings, our connections and our shutdown.

The service loads while the server listens, so that probes and clients are answered at once. Runs on
the main thread, which owns SIGTERM and SIGINT: the first one drains, the second one kills. SIGHUP
reads the configuration again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from litestar import Litestar

from embedsvc.changes import changes
from embedsvc.config import Config, ServerConfig
from embedsvc.errors import ConfigError
from embedsvc.http.app import create_app
from embedsvc.http.connection import Connection
from embedsvc.http.signals import END_SIGNALS, next_one_kills
from embedsvc.http.sockets import (
    BACKLOG,
    accept_waiting,
    allow_many_connections,
    listen,
    url_of,
)
from embedsvc.http.timing import Terms
from embedsvc.keys import read_keys
from embedsvc.service import Service

log = logging.getLogger(__name__)

# What uvicorn may still wait for connections after the service gave its last answers.
LAST_ANSWERS_S = 5
# How long a device may keep its last batch before the process ends without it.
LAST_BATCH_S = 1.0


def serve(
    service: Service,
    on_ready: Callable[[str], None] = lambda url: None,
    reread: Callable[[], Config] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
        service: not started yet.
        on_ready: called with the server's address when the models are loaded.
        reread: reads the configuration again, at SIGHUP; on a worker thread.

    Raises:
        StartError: the address cannot be listened on, or a model cannot be served.
    """

    def ready() -> None:
        spare_what_is_loaded()
        on_ready(url_of(listener))

    allow_many_connections()
    with listen(service.config.server) as listener:
        server = Server(service, ready, reread)
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def spare_what_is_loaded() -> None:
    """Leave all that is there out of later garbage collections, for the rest of the process.

    A full collection stops the event loop for as long as it looks at the 240,000 objects of the
    libraries: 0.2 s (measured, one core of a Xeon).
    """
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """One run of one service.

    Attributes:
        terms: what holds for its connections.
        failure: what ended the run, where it was not a signal.
    """

    def __init__(
        self,
        service: Service,
        on_ready: Callable[[], None],
        reread: Callable[[], Config] | None = None,
    ) -> None:
        self._service = service
        self._on_ready = on_ready
        self._reread = reread
        self._taking_over: set[asyncio.Task[None]] = set()
        self._accepting: dict[socket.socket, asyncio.Server] = {}
        self._app = create_app(service, self._service_lifespan)
        self._stopping: asyncio.Task[None] | None = None
        self._told_to_end = False
        self.failure: BaseException | None = None
        config = service.config.server
        self.terms = Terms.of(config)
        self.terms.on_refused = self._app.journal.refuse
        super().__init__(_uvicorn_config(self._app, config))

    # --- while it runs ---------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin the app's life, then accept from these sockets."""
        await super().startup([])
        await self.accept_from(sockets or [])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over, in the one place uvicorn provides for it."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in END_SIGNALS:
                loop.add_signal_handler(number, self._on_signal, number)
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
            try:
                yield
            finally:
                for number in (*END_SIGNALS, signal.SIGHUP):
                    loop.remove_signal_handler(number)
        else:
            yield

    def _on_hangup(self) -> None:
        if self._reread is not None and not self._told_to_end:
            task = asyncio.get_running_loop().create_task(self._take_over(self._reread))
            self._taking_over.add(task)
            task.add_done_callback(self._taking_over.discard)

    async def _take_over(self, reread: Callable[[], Config]) -> None:
        """Apply what has changed in the configuration and can change; say what cannot."""
        try:
            found = changes(self._service.config, await asyncio.to_thread(reread))
            keys = await asyncio.to_thread(read_keys, found.config.server.keys_file)
        except ConfigError as error:
            log.error("configuration not taken over, the old one stays: %s", error)
            return
        self._service.config, server = found.config, found.config.server
        self._service.keys = keys
        self.terms.take_over(server)
        self._app.journal.slow_request_s = server.slow_request_s
        self.config.timeout_graceful_shutdown = _graceful_s(server)
        log.info("configuration read again changed=%s", " ".join(found.applied) or "nothing")
        if keys:
            log.info("keys read again n=%d", len(keys))
        if found.deferred:
            log.warning("these need a restart, the old values stay: %s", " ".join(found.deferred))

    async def accept_from(self, listeners: Sequence[socket.socket]) -> None:
        """Accept from these listening sockets and from no others; those that are left stay open."""
        loop = asyncio.get_running_loop()
        for listener in self._accepting.keys() - set(listeners):
            self._accepting.pop(listener).close()
        for listener in listeners:
            if listener not in self._accepting:
                self._accepting[listener] = await loop.create_server(
                    self._connection, sock=listener.dup(), backlog=BACKLOG
                )

    def _connection(self) -> Connection:
        return Connection(
            terms=self.terms,
            app=self._app,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    # --- the way down ----------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for each in END_SIGNALS:
            loop.remove_signal_handler(each)
        next_one_kills()
        log.info("%s: finishing what is in flight", signal.Signals(number).name)
        if self._service.state == "loading":
            _exit_now()
        self.drain()

    def drain(self) -> None:
        """Turn unready and end every connection with its next response; later, accept no more."""
        self._told_to_end = True
        self._app.state.draining = self.terms.draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._service.config.server.drain_delay_s, self._accept_no_more)

    async def retire(self) -> None:
        """Leave new connections to a successor, which has the same sockets; then end.

        Nobody notices: it stays ready for those it has, and every connection ends with its next
        response. Those that are idle for long are closed.
        """
        self.terms.retiring = self._told_to_end = True
        await self.accept_from([])
        asyncio.get_running_loop().call_later(self.terms.retired_idle_s, self._accept_no_more)

    async def on_tick(self, counter: int) -> bool:
        """Do what uvicorn does ten times a second."""
        if self.terms.retiring and not self.server_state.connections:
            self._accept_no_more()
        return await super().on_tick(counter)

    def _accept_no_more(self) -> None:
        if self.should_exit:
            return
        self.should_exit = True
        loop = asyncio.get_running_loop()
        # Stopping the service answers everyone who still waits then.
        loop.call_later(self._service.config.server.drain_timeout_s, self._stop_service, 0.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners and wait for what is in flight, but lose nobody in the backlog."""
        self._app.state.draining = self.terms.draining = True
        loop = asyncio.get_running_loop()
        # They get connected while uvicorn pauses, right after it has closed the listeners.
        connecting = [
            loop.create_task(loop.connect_accepted_socket(self._connection, accepted))
            for listener in self._accepting
            for accepted in accept_waiting(listener)
        ]
        await self.accept_from([])
        await super().shutdown(sockets)
        await asyncio.gather(*connecting, return_exceptions=True)

    # --- the service's life ----------------------------------------------------------------------

    @asynccontextmanager
    async def _service_lifespan(self, _: Litestar) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._service.start())
        loading.add_done_callback(self._loaded)
        try:
            yield
        finally:
            loading.cancel()
            stopping = self._stop_service(None)
            if self._told_to_end:
                await asyncio.wait([stopping], timeout=LAST_BATCH_S)
                if not stopping.done():
                    log.error("a batch does not come back from its device; leaving it there")
                    _exit_now()
            await stopping

    def _loaded(self, loading: asyncio.Task[None]) -> None:
        if loading.cancelled():
            return
        self.failure = loading.exception()
        if self.failure is None:
            self._on_ready()
        else:
            self.should_exit = True

    def _stop_service(self, drain_timeout_s: float | None) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._service.stop(drain_timeout_s))
        return self._stopping


def _uvicorn_config(app: Litestar, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # Made by `Server._connection` instead.
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
        timeout_graceful_shutdown=_graceful_s(config),
    )


def _graceful_s(config: ServerConfig) -> int:
    return math.ceil(config.drain_timeout_s) + LAST_ANSWERS_S


def _exit_now() -> None:
    """End without waiting for threads that may never end; nobody waits for an answer."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
