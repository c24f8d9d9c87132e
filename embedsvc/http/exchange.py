"""One request on a connection and its response, as ASGI sees them.

Knows of bytes and of ASGI's messages; how they reach the peer, and what comes before and after, is
the connection's business. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from embedsvc.errors import InternalError, NotReady, RequestError
from embedsvc.http.parser import Head, split_target
from embedsvc.http.replies import CLOSE, head_of_reply

if TYPE_CHECKING:
    from litestar.types import (
        ASGIApp,
        HTTPReceiveMessage,
        HTTPResponseBodyEvent,
        HTTPResponseStartEvent,
        HTTPScope,
        Message,
    )

    from embedsvc.http.connection import Connection

log = logging.getLogger(__name__)

# Where an app finds the `Client` among the extensions of its scope.
CLIENT = "embedsvc.client"
_ASGI = {"version": "3.0", "spec_version": "2.3"}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client:
    """What an app may know of who waits for its response, without a task that listens for it.

    Attributes:
        gone: nobody waits any more.
        on_gone: called once when that happens.
    """

    __slots__ = ("gone", "on_gone")

    def __init__(self) -> None:
        self.gone = False
        self.on_gone: Callable[[], object] | None = None

    def leave(self) -> None:
        """Note that nobody waits any more."""
        if not self.gone:
            self.gone = True
            if self.on_gone is not None:
                self.on_gone()


class Exchange:
    """What was received for one request, and how much of its response was sent.

    Attributes:
        scope: of the request.
        keep_alive: whether the connection may be used again afterwards.
        received: the whole request is here.
        buffered: bytes of its body that the app has not taken yet.
        started: the app began its response.
        complete: it ended its response.
    """

    __slots__ = (
        "_chunks",
        "_client",
        "_connection",
        "_delivered",
        "_expects_continue",
        "_failure",
        "_head",
        "_left",
        "_waiter",
        "buffered",
        "complete",
        "keep_alive",
        "received",
        "scope",
        "started",
    )

    def __init__(
        self, connection: Connection, scope: HTTPScope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.received = False
        self.buffered = 0
        self.started = False
        self.complete = False
        self._client = Client()
        scope["extensions"] = {CLIENT: self._client}  # type: ignore[dict-item]  # not only dicts
        self._connection = connection
        self._expects_continue = expects_continue
        self._chunks: list[bytes] = []
        self._delivered = False
        self._failure: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Sent together with the first part of the body.
        self._head = b""
        # Bytes of the body still to be sent; None ends it by closing the connection.
        self._left: int | None = None

    # --- told by the connection ------------------------------------------------------------------

    def take(self, body: bytes) -> None:
        """Add a part of the request's body."""
        self._expects_continue = False
        self._chunks.append(body)
        self.buffered += len(body)
        self._wake()

    def end(self) -> None:
        """Note that the request is complete."""
        self._expects_continue = False
        self.received = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Let the app learn why its request will not arrive whole."""
        self._failure = error
        self.keep_alive = False
        self._wake()

    def leave(self) -> None:
        """Let the app learn that nobody waits for it."""
        if not self.complete:
            self._client.leave()
            self._wake()

    async def run(self, app: ASGIApp) -> None:
        """Let the app answer, and answer for it where it does not."""
        stopping = False
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            stopping = True
            raise
        except Exception:  # whatever it is, the client gets an answer
            log.exception("unexpected error path=%.200r", self.scope["path"])
        finally:
            if not (self.complete or self._client.gone):
                self._connection.answer_for(self, _failure(stopping))

    # --- called by the app -----------------------------------------------------------------------

    async def receive(self) -> HTTPReceiveMessage:
        """Return the next part of the request's body, or the news that the client is gone.

        Raises:
            RequestError: the body does not arrive whole, or not in time.
        """
        if self._expects_continue and not self._client.gone:
            self._expects_continue = False
            self._connection.outbox.write(CONTINUE)
        while not self._has_news():
            self._connection.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._client.gone or self.complete:
            return {"type": "http.disconnect"}
        if self._failure is not None:
            raise self._failure
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.buffered = 0
        self._delivered = self.received
        return {"type": "http.request", "body": body, "more_body": not self.received}

    async def send(self, message: Message) -> None:
        """Send a part of the response; a client that left meanwhile is no error."""
        if self._connection.outbox.blocked and not self._client.gone:
            await self._connection.outbox.unblocked()
        if self._client.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            self._send_part(message)

    # --- details ---------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        fresh = self._chunks or (self.received and not self._delivered)
        return bool(fresh or self._client.gone or self.complete or self._failure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _start(self, message: HTTPResponseStartEvent) -> None:
        """Write the head of the response, to be sent with the first part of its body."""
        if self.started:
            raise RuntimeError("a response has begun already")
        self.started = True
        status = message["status"]
        # One who still waits for a word to go on might take the next request's for it.
        closes = self._expects_continue or self._connection.closes_after(self)
        left = 0 if status in (204, 304) else None
        headers = [*self._connection.default_headers, *message.get("headers", ())]
        for name, value in headers:
            if name == b"content-length":
                left = int(value)
        if closes or left is None:
            headers.append(CLOSE)
            self.keep_alive = False
        self._head = head_of_reply(status, headers)
        self._left = left

    def _send_part(self, message: HTTPResponseBodyEvent) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            self._left, body = 0, b""
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("the body of a response is not as long as its head says")
        head, self._head = self._head, b""
        self._connection.outbox.write(head, body)
        if not more:
            self.complete = True
            self._wake()
            self._connection.completed(self)


def _failure(stopping: bool) -> RequestError:
    if stopping:
        return NotReady("The server is stopping.", retry_after_s=1)
    return InternalError("The server failed; its log says why.")


def scope_of(
    head: Head,
    server: tuple[str, int] | None,
    client: tuple[str, int] | None,
    state: dict[str, Any],
) -> HTTPScope:
    """Return the scope of a request.

    Args:
        head: of the request.
        server: address of this end of the connection.
        client: address of the other one.
        state: of the app's life, a copy.

    Raises:
        InvalidRequest: its target is neither a path nor a URL.
    """
    path, raw_path, query = split_target(head.target)
    scope = {
        "type": "http",
        "asgi": _ASGI,
        "http_version": head.version,
        "method": head.method,
        "scheme": "http",
        "server": server,
        "client": client,
        "root_path": "",
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": head.headers,
        "state": state,
    }
    return cast("HTTPScope", scope)
