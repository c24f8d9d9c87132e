"""What answers while no worker can: the service runs, is not ready, come back.

Lives on the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Sequence
from math import inf
from socket import socket
from typing import TYPE_CHECKING, cast

import orjson

from embedsvc.config import ServerConfig
from embedsvc.errors import NotReady, RequestError
from embedsvc.http.access import presented_key
from embedsvc.http.body import Headers
from embedsvc.http.connection import Connection, Crowd
from embedsvc.http.journal import NO_ROUTE, PATHS, ROUTE, Journal
from embedsvc.http.replies import (
    JSON_CONTENT,
    NOT_READY_RETRY_S,
    Header,
    RequestIds,
    WholeReply,
    error_reply,
)
from embedsvc.http.sockets import accept_waiting
from embedsvc.http.timing import Terms
from embedsvc.keys import Keys
from embedsvc.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from litestar.types import HTTPScope, Receive, Scope, Send

log = logging.getLogger(__name__)

# Of a service whose workers all load.
STATE = "loading"
# So many files are left for each connection: this process opens files to start others.
FILES_PER_CONNECTION = 4
# When it is tried again to accept, where the system did not allow it.
AGAIN_S = 1.0
# How often it is looked whether all connections have ended.
LOOK_S = 0.05


class StandIn:
    """Takes the place of workers while none is ready; every connection ends with its answer.

    Without it clients would wait until a process has imported its libraries, which takes seconds,
    and longer than they said they would.

    Args:
        config: limits of connections.
        keys: who is told anything but health and metrics.
        metrics: where requests are counted.
        render: returns the metrics of all.
    """

    def __init__(
        self, config: ServerConfig, keys: Keys, metrics: Metrics, render: Callable[[], bytes]
    ) -> None:
        self._keys = keys
        self._terms = Terms.of(config)
        self._terms.retiring = True
        self._journal = Journal(metrics, inf)
        self._terms.on_refused = self._journal.refuse
        self._render = render
        self._request_ids = RequestIds()
        self._crowd = Crowd()
        self._listeners: Sequence[socket] = ()
        self._connecting: set[asyncio.Task[object]] = set()

    def accept_from(self, listeners: Sequence[socket]) -> None:
        """Accept from these listening sockets and from no others; they stay open."""
        self._pause()
        self._listeners = listeners
        self._resume()
        if not listeners:
            # Who has asked nothing yet asks a worker, on a new connection.
            for connection in tuple(self._crowd.connections):
                connection.shutdown()

    def _pause(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)

    def _resume(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket) -> None:
        """Take one connection, or end it where there are too many; asyncio's servers have no limit.

        Where no file can be opened, nothing is accepted for a while: the loop would only fail.
        """
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            self._pause()
            loop.call_later(AGAIN_S, self._resume)
            return
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_PER_CONNECTION
        if len(self._crowd.connections) + len(self._connecting) >= most:
            accepted.close()
            return
        connecting = loop.create_task(loop.connect_accepted_socket(self._connection, accepted))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def drain(self) -> None:
        """Answer those who have connected; accept no more."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            for accepted in accept_waiting(listener):
                await loop.connect_accepted_socket(self._connection, accepted)
        self.accept_from([])
        until = loop.time() + self._terms.last_request_s
        while self._crowd.connections and loop.time() < until:  # noqa: ASYNC110  # a set tells nobody
            await asyncio.sleep(LOOK_S)

    def take_over(self, config: ServerConfig, keys: Keys) -> None:
        """Change what a configuration can change."""
        self._terms.take_over(config)
        self._keys = keys

    def _connection(self) -> Connection:
        return Connection(
            terms=self._terms, app=self._answer, server_state=self._crowd, app_state={}
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an ASGI app."""
        asked = cast("HTTPScope", scope)
        reply = self._reply(asked["path"], dict(asked["headers"]))
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        )
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})

    def _reply(self, path: str, headers: Headers) -> WholeReply:
        match path:
            case "/health/live":
                return _reply(200, orjson.dumps({"status": "live"}))
            case "/health/ready" | "/health":
                return _reply(503, orjson.dumps({"state": STATE}))
            case "/metrics":
                return _reply(200, self._render(), (b"content-type", CONTENT_TYPE.encode()))
        error = self._error(headers)
        route = ROUTE if path in PATHS else NO_ROUTE
        self._journal.count(route, error.status, error.reason, None)
        return error_reply(error, self._request_ids.header(headers.get(b"x-request-id")))

    def _error(self, headers: Headers) -> RequestError:
        try:
            self._keys.of(presented_key(headers))
        except RequestError as error:
            return error
        return NotReady(f"The service is {STATE}; try again.", retry_after_s=NOT_READY_RETRY_S)


def _reply(status: int, body: bytes, content_type: Header = JSON_CONTENT) -> WholeReply:
    return WholeReply(status, [content_type, (b"content-length", b"%d" % len(body))], body)
