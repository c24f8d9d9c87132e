"""How long a connection may take for what, and how that is noticed.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from embedsvc.config import ServerConfig
from embedsvc.errors import RequestError

# Longer than the 90 s that clients and proxies keep idle connections, so that they close first.
KEEP_ALIVE_S = 125.0
# Slower than any network that people use.
MIN_BODY_BYTES_PER_S = 1024


def _tell_nobody(_: RequestError) -> None:
    pass


@dataclass(slots=True)
class Terms:
    """What holds for all connections of a server.

    Attributes:
        header_timeout_s: from the first byte of a request, or from connecting, to its headers' end.
        body_timeout_s: from there to the end of its body.
        write_timeout_s: how long a response may wait for a client that does not read it.
        keep_alive_s: how long an idle connection is kept.
        body_grace_s: a body gets this long, and a second more for each `MIN_BODY_BYTES_PER_S`
            bytes of it that came.
        discard_s: how long a request is still read that has been answered already. A connection
            closed over unread bytes is reset by the kernel, and the client loses the answer.
        last_request_s: how long a client that has just connected may still send its request while
            the server stops.
        retired_idle_s: how long a server that has a successor keeps idle connections. Who is busy
            sends the next request by then, and its answer says to leave; closing the connection at
            once would cross with that request.
        retiring: every connection ends with its next response.
        draining: so it does, and idle ones are closed.
        on_refused: called with the answer to what was no request, which no app has seen.
    """

    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    keep_alive_s: float = KEEP_ALIVE_S
    body_grace_s: float = 10.0
    discard_s: float = 10.0
    last_request_s: float = 1.0
    retired_idle_s: float = 10.0
    retiring: bool = False
    draining: bool = False
    on_refused: Callable[[RequestError], None] = _tell_nobody

    @classmethod
    def of(cls, config: ServerConfig) -> Terms:
        """Return what a configuration asks for."""
        return cls(config.header_timeout_s, config.body_timeout_s, config.write_timeout_s)

    def take_over(self, config: ServerConfig) -> None:
        """Change what a configuration can change; waits that have begun keep their length."""
        self.header_timeout_s = config.header_timeout_s
        self.body_timeout_s = config.body_timeout_s
        self.write_timeout_s = config.write_timeout_s

    def body_s(self, n_bytes: int) -> float:
        """Return the seconds that a body may take of which so many bytes came."""
        return min(self.body_timeout_s, self.body_grace_s + n_bytes / MIN_BODY_BYTES_PER_S)


class Deadline:
    """Calls back when its time has come and was not moved meanwhile.

    Setting a timer and cancelling it costs 3 µs, twice a request. So a later deadline leaves the
    timer as it is: when it fires too early, it is set again.

    Attributes:
        at: when, in the event loop's time; `inf` for never.
    """

    __slots__ = ("_loop", "_on_passed", "_timer", "at")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_passed: Callable[[], None]) -> None:
        self.at = inf
        self._loop = loop
        self._on_passed = on_passed
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> None:
        """Set it some seconds from now."""
        self.set(self._loop.time() + seconds)

    def set(self, at: float) -> None:
        """Move it."""
        self.at = at
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._fire)

    def clear(self) -> None:
        """Expect nothing for now."""
        self.at = inf

    def cancel(self) -> None:
        """Expect nothing any more."""
        self.at = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._loop.time() >= self.at:
            self.at = inf
            self._on_passed()
        elif self.at < inf:
            self.set(self.at)
