"""One HTTP/1.1 connection: requests in and responses out, in order, within limits of time.

Knows nothing of routes. It is what uvicorn calls an HTTP protocol, and runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from embedsvc.errors import RequestError, RequestTimeout
from embedsvc.http.exchange import Exchange, scope_of
from embedsvc.http.outbox import Outbox
from embedsvc.http.parser import Head, RequestParser
from embedsvc.http.replies import CLOSE, Header, error_reply, head_of_reply
from embedsvc.http.sockets import address_of, readable
from embedsvc.http.timing import Deadline, Terms

if TYPE_CHECKING:
    from litestar.types import ASGIApp
    from uvicorn.server import ServerState

# A body is read no further while so much of it waits for the app.
MAX_BUFFERED_BYTES = 1024 * 1024


@dataclass(slots=True)
class Crowd:
    """What the connections of a server share, where uvicorn does not keep it for them.

    Attributes:
        connections: all that are open.
        tasks: in which the app answers.
        default_headers: of every response.
    """

    connections: set[Any] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    default_headers: list[Header] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """Reads requests one after the other, and lets the app answer them one after the other."""

    outbox: Outbox
    _transport: asyncio.Transport

    def __init__(
        self,
        *,
        terms: Terms,
        app: ASGIApp,
        server_state: ServerState | Crowd,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._terms = terms
        self._app = app
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = RequestParser(self)
        # The exchange whose body the parser is in, since when, and how much of it came.
        self._receiving: Exchange | None = None
        self._body_began, self._body_bytes = 0.0, 0
        # The exchange that the app answers, and those that wait for it to be done.
        self._active: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        # Nothing has come yet; nothing is read any more.
        self._fresh, self._deaf = True, False
        self._reading_paused = False
        self._deadline = Deadline(self._loop, self._on_deadline)
        self._head_timed = True

    # --- called by the event loop ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self.outbox = Outbox(self._transport, self._loop, self._terms.write_timeout_s)
        self._server = address_of(transport.get_extra_info("sockname"))
        self._client = address_of(transport.get_extra_info("peername"))
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # `shutdown` is enough
        terms = self._terms
        self._deadline.within(terms.last_request_s if terms.draining else terms.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        if self._deaf:
            return
        self._fresh = False
        try:
            self._parser.feed(data)
        except RequestError as error:
            self._refuse(error)
            return
        if self._parser.in_head:
            if not self._head_timed:
                self._head_timed = True
                self._deadline.within(self._terms.header_timeout_s)
        elif self._receiving is not None and not self._receiving.complete:
            self._expect_body()

    def pause_writing(self) -> None:
        """Hold the app back while the client does not read."""
        self.outbox.block()

    def resume_writing(self) -> None:
        """Let the app go on."""
        self.outbox.unblock(between_responses=self._active is None)

    def eof_received(self) -> None:
        """Take a client that has closed its side for one that is gone."""
        self._leave()
        if self.outbox.blocked:
            self._transport.abort()
        else:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._server_state.connections.discard(self)
        self._deaf = True
        self._deadline.cancel()
        self._leave()
        self.outbox.drop()

    # --- called by the parser --------------------------------------------------------------------

    def begin_request(self, head: Head) -> None:
        """Start a request, or let it wait for those before it."""
        self._head_timed = False
        self._deadline.clear()
        exchange = Exchange(
            self,
            scope_of(head, self._server, self._client, self._app_state.copy()),
            keep_alive=head.keep_alive,
            expects_continue=head.expects_continue,
        )
        self._receiving = exchange
        self._body_began, self._body_bytes = self._loop.time(), 0
        if self._active is None:
            self._start(exchange)
        else:
            self._queue.append(exchange)
            self._pause_reading()

    def add_body(self, part: bytes) -> None:
        """Hand a part of the body over, or throw it away where the answer is out already."""
        exchange = self._receiving
        if exchange is None or exchange.complete:
            return
        self._body_bytes += len(part)
        exchange.take(part)
        if exchange.buffered > MAX_BUFFERED_BYTES:
            self._pause_reading()

    def end_request(self) -> None:
        """End the request."""
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            return
        self._deadline.clear()
        exchange.end()
        if exchange.complete:
            self._go_on(exchange)

    # --- called by exchanges ---------------------------------------------------------------------

    @property
    def default_headers(self) -> list[Header]:
        """Headers of every response."""
        return self._server_state.default_headers

    def resume_reading(self) -> None:
        """Read on, unless other requests wait."""
        if self._reading_paused and not self._queue and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def closes_after(self, exchange: Exchange) -> bool:
        """Say whether the connection ends with this response."""
        more = self._queue or self._parser.in_head
        leaving = self._terms.draining or self._terms.retiring
        return not exchange.keep_alive or (leaving and not more)

    def completed(self, exchange: Exchange) -> None:
        """Go on after a response."""
        self._active = None
        self.outbox.end_response()
        self.resume_reading()
        if exchange.received:
            self._go_on(exchange)
        elif exchange.keep_alive:
            self._deadline.within(self._terms.discard_s)
        else:
            self._linger()

    def answer_for(self, exchange: Exchange, error: RequestError) -> None:
        """Answer in the place of an app that failed."""
        if exchange.started:
            # Half a response must not pass for a whole one.
            self._transport.abort()
        else:
            exchange.complete, exchange.keep_alive = True, False
            self._write_error(error)
            self.completed(exchange)

    # --- called by the server --------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close once nothing is in flight; what has arrived is answered first."""
        busy = self._active is not None or self._receiving is not None or self._parser.in_head
        if busy or self._deaf:
            return
        if self._fresh or readable(self._transport):
            self._deadline.within(self._terms.last_request_s)
        else:
            self._close()

    # --- the order of things ---------------------------------------------------------------------

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        self.resume_reading()
        task = self._loop.create_task(exchange.run(self._app))
        tasks = self._server_state.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _go_on(self, exchange: Exchange) -> None:
        """Begin what follows an exchange that is over."""
        if not exchange.keep_alive:
            self._close()
        elif self._queue:
            self._start(self._queue.popleft())
        elif self._parser.in_head:
            pass
        elif self._terms.draining:
            self._close()
        else:
            self._deadline.within(self._terms.keep_alive_s)

    def _refuse(self, error: RequestError) -> None:
        """Answer what is no request, and read no further.

        Those before it are answered first, and one that ends in the middle by its own app.
        """
        self._deaf = True
        self._deadline.clear()
        broken, self._receiving = self._receiving, None
        last = self._queue[-1] if self._queue else self._active
        if broken is not None and broken.complete:
            self._linger()
        elif broken is not None:
            broken.fail(error)
        elif last is not None:
            last.keep_alive = False
        else:
            self._terms.on_refused(error)
            self._write_error(error)
            self._linger()

    def _linger(self) -> None:
        """Say that nothing follows, and throw away what still comes."""
        self._deaf = True
        self.outbox.end_writing()
        self.resume_reading()
        self._deadline.within(self._terms.discard_s)

    def _leave(self) -> None:
        """Tell everyone who still works for this client."""
        for exchange in (self._active, *self._queue):
            if exchange is not None:
                exchange.leave()
        self._queue.clear()

    def _close(self) -> None:
        self._deaf = True
        self._deadline.cancel()
        self.outbox.close()

    # --- time ------------------------------------------------------------------------------------

    def _expect_body(self) -> None:
        self._deadline.set(self._body_began + self._terms.body_s(self._body_bytes))

    def _on_deadline(self) -> None:
        exchange = self._receiving
        if self._deaf:
            self._close()
        elif self._parser.in_head:
            self._refuse(RequestTimeout("The headers of the request took too long to arrive."))
        elif exchange is None or exchange.complete:
            self._close()
        elif self._reading_paused:
            # It is not the client who is slow.
            self._body_began = self._loop.time()
            self._expect_body()
        else:
            exchange.fail(
                RequestTimeout("The body of the request took too long to arrive; send it again.")
            )

    # --- details ---------------------------------------------------------------------------------

    def _pause_reading(self) -> None:
        if not self._reading_paused and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _write_error(self, error: RequestError) -> None:
        reply = error_reply(error, CLOSE)
        self.outbox.write(head_of_reply(reply.status, reply.headers), reply.body)
