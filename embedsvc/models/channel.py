"""The server's end of a channel to an isolated model's process: one batch at a time.

Says what `wire.py` describes. Used by one thread at a time; `child.py` hands them out.
"""

from __future__ import annotations

import socket
import weakref

from embedsvc.models.buffers import SharedBuffer
from embedsvc.models.wire import REPLY, REQUEST, Op, Status

# What an answer may still take where its time is over: a server that was frozen together with its
# processes (a paused container or machine) finds all times over when it goes on.
GRACE_S = 0.5


class Channel:
    """One end of a channel: one batch at a time, by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._known: dict[int, weakref.ref[SharedBuffer]] = {}

    @classmethod
    def open(cls, control: socket.socket) -> Channel:
        """Make a channel and send its other end.

        Raises:
            OSError: the process is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return cls(ours)

    def ask(
        self, buffer: SharedBuffer, rows: int, length: int, threads: int, limit_s: float
    ) -> None:
        """Send a batch; `answer` waits `limit_s` seconds for it.

        Raises:
            OSError: the process is gone.
        """
        self._socket.settimeout(limit_s)
        if buffer.number not in self._known:
            self._introduce(buffer)
        self._socket.send(REQUEST.pack(Op.RUN, buffer.number, rows, length, threads))

    def answer(self) -> Status:
        """Return how the batch ended.

        Raises:
            OSError: the process is gone; TimeoutError: it has not answered.
            EOFError: the process is gone.
        """
        try:
            message = self._socket.recv(REPLY.size)
        except TimeoutError:
            self._socket.settimeout(GRACE_S)
            message = self._socket.recv(REPLY.size)
        if not message:
            raise EOFError
        (status,) = REPLY.unpack(message)
        return Status(status)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _introduce(self, buffer: SharedBuffer) -> None:
        """Make a buffer known, and those forgotten that are no more."""
        for number in [number for number, known in self._known.items() if known() is None]:
            del self._known[number]
            self._socket.send(REQUEST.pack(Op.DROP, number, 0, 0, 0))
        max_rows, capacity_tokens = len(buffer.lengths), len(buffer.ids)
        message = REQUEST.pack(Op.ADD, buffer.number, capacity_tokens, max_rows, 0)
        socket.send_fds(self._socket, [message], [buffer.fd])
        self._known[buffer.number] = weakref.ref(buffer)
