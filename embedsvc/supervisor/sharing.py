"""What workers share, given to those who ask. Lives on the supervisor's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket

from embedsvc.models.wire import MAX_MESSAGE_BYTES, Attach, Share, decode_wish
from embedsvc.supervisor.devices import SharedDevices
from embedsvc.supervisor.models import SharedModels

log = logging.getLogger(__name__)


class Sharing:
    """Hears the wishes of workers; what they hold is freed by the end of their sockets."""

    def __init__(self) -> None:
        self.models = SharedModels()
        self._devices = SharedDevices()

    def serve(self, worker: socket.socket) -> None:
        """Hear what a worker asks for until it is gone.

        Args:
            worker: socket to it; taken over.
        """
        worker.setblocking(False)
        asyncio.get_running_loop().add_reader(worker, self._hear, worker)

    def _hear(self, worker: socket.socket) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(
                worker, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            asyncio.get_running_loop().remove_reader(worker)
            worker.close()
            return
        if not fds:
            # No more files can be opened here; the end of the lost socket tells the worker.
            log.error("a wish of a worker is lost: too many open files")
            return
        answers = socket.socket(fileno=fds[0])
        match decode_wish(message):
            case Attach() as wish:
                self.models.attach(wish, answers)
            case Share(device, n_slots):
                self._devices.open(device, n_slots, answers)
