"""What workers share, as one of them sees it: model processes that its supervisor owns.

A worker asks over one socket, and sends with each wish the far end of a new socket on which the
answers come. The kernel closes them all with the worker. Any thread.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from embedsvc.errors import ModelError
from embedsvc.models.launch import KILLED, Reason
from embedsvc.models.wire import (
    KILL,
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Failed,
    Gone,
    Ready,
    Share,
    decode_tidings,
    encode,
)


class Owner:
    """The supervisor of this worker.

    Args:
        line: to it; keeps the bounds of messages.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def ask(self, wish: Attach | Share) -> socket.socket:
        """Ask for something; return the socket that answers.

        Raises:
            OSError: the supervisor is gone, or no more files can be opened.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._line, [encode(wish)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


class SharedProcess:
    """A model's process that other workers use too; see `Running`.

    Raises:
        OSError: the supervisor cannot be asked.
    """

    def __init__(self, owner: Owner, wish: Attach) -> None:
        self.pid = 0
        self.warm = False
        self.load_s = 0.0
        self.control: socket.socket
        self._source = wish.spec.folder.source
        self._supervisor = owner.ask(wish)
        # What comes of the wish, read by `follow` and waited for in `ready`; None is the end.
        self._answers: SimpleQueue[Ready | Failed | None] = SimpleQueue()
        self._gone = threading.Event()
        self._how = "it is not needed any more"

    def ready(self, limit_s: float) -> Ready:
        """Wait until it has loaded the model, for this worker or for another one before.

        Raises:
            ModelError: it cannot, it ended, or it took longer than `limit_s` seconds.
        """
        try:
            answer = self._answers.get(timeout=limit_s)
        except Empty:
            raise ModelError(
                f"{self._source}: the model's process was not ready within {limit_s:g} s"
            ) from None
        if isinstance(answer, Ready):
            return answer
        if isinstance(answer, Failed):
            raise ModelError(answer.message, killed=answer.killed)
        raise ModelError(
            f"{self._source}: the model's process ended before it was ready ({self._how})",
            killed=self._how == KILLED,
        )

    def end(self, reason: Reason) -> str:
        """End it for all, and wait until it is gone; if it is only not needed, leave it to others.

        The supervisor ends what nobody needs.
        """
        # Where it is gone already, nobody is at the other end.
        with suppress(OSError):
            if reason == "closed":
                self._supervisor.shutdown(socket.SHUT_RDWR)
            else:
                self._supervisor.send(KILL)
        self._gone.wait()
        return self._how

    def follow(self) -> None:
        """Read what the supervisor says until the process is gone, or not needed any more."""
        while message := self._heard():
            match message:
                case Attached(pid, warm, load_s, ready):
                    self.pid, self.warm, self.load_s = pid, warm, load_s
                    self._answers.put(ready)
                case Failed():
                    self._answers.put(message)
                case Gone(how):
                    self._how = how
        self._answers.put(None)
        self._gone.set()

    def close(self) -> None:
        """Close the sockets."""
        self._supervisor.close()
        if self.pid:
            self.control.close()

    def _heard(self) -> Attached | Failed | Gone | None:
        try:
            message, fds = self._received()
        except ConnectionResetError:
            # Said once, where the other end was closed over an unread `KILL`; its words follow.
            message, fds = self._received()
        if fds:
            self.control = socket.socket(fileno=fds[0])
        return decode_tidings(message) if message else None

    def _received(self) -> tuple[bytes, list[int]]:
        message, fds, _, _ = socket.recv_fds(
            self._supervisor, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        return message, fds
