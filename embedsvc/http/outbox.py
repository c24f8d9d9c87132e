"""What a connection has to write: in few system calls, and not for ever.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio

# Parts from this size on are not copied.
LARGE_BYTES = 64 * 1024


class Outbox:
    """Writes to one transport.

    What is written together leaves in one system call. Each one wakes the peer, which has to read
    once more, and where cores are few, it takes the core away from the event loop at once. Waiting
    for the end of the event loop's turn, to write several replies in a row, gained nothing more.

    Args:
        transport: of the connection; nobody else writes to it.
        loop: the event loop.
        timeout_s: how long a response may wait for a client that does not read it; the connection
            is cut off after that.
    """

    __slots__ = ("_loop", "_resumed", "_timeout_s", "_timer", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._resumed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def blocked(self) -> bool:
        """Whether the client has to read first."""
        return self._resumed is not None

    async def unblocked(self) -> None:
        """Wait until the client has read, or is gone."""
        if self._resumed is not None:
            await self._resumed

    def write(self, *parts: bytes) -> None:
        """Send parts, the small ones of them together."""
        small: list[bytes] = []
        for part in parts:
            if len(part) < LARGE_BYTES:
                small.append(part)
            else:
                self._write(b"".join(small))
                self._write(part)
                small.clear()
        self._write(b"".join(small))

    def close(self) -> None:
        """Send everything, then close; cut the connection off where that takes too long."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._start_timer()

    def end_writing(self) -> None:
        """Send everything and say that nothing follows."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        if self._transport.get_write_buffer_size():
            self._start_timer()

    # --- called by the connection ----------------------------------------------------------------

    def block(self) -> None:
        """Begin to wait for the client. The time runs on until its response is all read."""
        self._resumed = self._loop.create_future()
        self._start_timer()

    def unblock(self, *, between_responses: bool) -> None:
        """End the wait."""
        self._resume()
        if between_responses:
            self._stop_timer()

    def end_response(self) -> None:
        """Note that a response is written."""
        if self._resumed is None:
            self._stop_timer()

    def drop(self) -> None:
        """End all waiting: the connection is closed."""
        self._stop_timer()
        self._resume()

    def _write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _resume(self) -> None:
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            resumed.set_result(None)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
