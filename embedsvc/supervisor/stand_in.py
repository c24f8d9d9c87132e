"""What answers while no worker can: the service runs, is not ready, come back.

Lives on the supervisor's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from socket import socket
from typing import TYPE_CHECKING, cast

import orjson
from uvicorn.server import ServerState

from embedsvc.config import ServerConfig
from embedsvc.errors import NotReady
from embedsvc.http.connection import Connection
from embedsvc.http.journal import NO_ROUTE, Journal
from embedsvc.http.replies import (
    JSON_CONTENT,
    NOT_READY_RETRY_S,
    Header,
    RequestIds,
    WholeReply,
    error_reply,
)
from embedsvc.http.sockets import Acceptor
from embedsvc.http.timing import Terms
from embedsvc.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from litestar.types import HTTPScope, Receive, Scope, Send

# Of a service whose workers all load.
STATE = "loading"


class StandIn:
    """Takes the place of workers while none is ready; every connection ends with its answer.

    Without it clients would wait until a process has imported its libraries, which takes seconds,
    and longer than they said they would.

    Args:
        config: limits of connections.
        metrics: where requests are counted.
        render: returns the metrics of all.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics, render: Callable[[], bytes]) -> None:
        self._terms = Terms.of(config)
        self._terms.retiring = True
        self._journal = Journal(metrics, inf)
        self._terms.on_refused = self._journal.refuse
        self._render = render
        self._request_ids = RequestIds()
        self._state = ServerState()
        self._acceptor = Acceptor(self._connection)

    async def accept_from(self, listeners: Collection[socket]) -> None:
        """Accept from these listening sockets and from no others."""
        await self._acceptor.accept_from(listeners)

    def _connection(self) -> Connection:
        return Connection(
            terms=self._terms, app=self._answer, server_state=self._state, app_state={}
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an ASGI app."""
        asked = cast("HTTPScope", scope)
        reply = self._reply(asked["path"], dict(asked["headers"]).get(b"x-request-id"))
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        )
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})

    def _reply(self, path: str, request_id: bytes | None) -> WholeReply:
        match path:
            case "/health/live":
                return _reply(200, orjson.dumps({"status": "live"}))
            case "/health/ready" | "/health":
                return _reply(503, orjson.dumps({"state": STATE}))
            case "/metrics":
                return _reply(200, self._render(), (b"content-type", CONTENT_TYPE.encode()))
        error = NotReady(f"The service is {STATE}; try again.", retry_after_s=NOT_READY_RETRY_S)
        self._journal.count(NO_ROUTE, error.status, error.reason, None)
        return error_reply(error, self._request_ids.header(request_id))


def _reply(status: int, body: bytes, content_type: Header = JSON_CONTENT) -> WholeReply:
    return WholeReply(status, [content_type, (b"content-length", b"%d" % len(body))], body)
