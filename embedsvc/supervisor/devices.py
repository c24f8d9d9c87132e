"""The devices whose slots the workers share. Lives on the supervisor's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress

from embedsvc.engine.slots import ANSWER, Op
from embedsvc.supervisor.grants import Answer, Grants

Asking = socket.socket


class SharedDevices:
    """Grants slots to workers over sockets, and takes back those of a worker that is gone."""

    def __init__(self) -> None:
        self._grants: dict[tuple[str, int], Grants[Asking]] = {}

    def open(self, name: str, n_slots: int, asking: Asking) -> None:
        """Listen to one worker's wishes until its end of the socket is closed.

        Workers that know of other numbers of slots do not share with this one: they have another
        configuration, and are about to be replaced.

        Args:
            name: of the device.
            n_slots: batches at once.
            asking: taken over.
        """
        grants = self._grants.setdefault((name, n_slots), Grants(n_slots))
        asking.setblocking(False)
        asyncio.get_running_loop().add_reader(asking, self._hear, grants, asking)

    def _hear(self, grants: Grants[Asking], asking: Asking) -> None:
        try:
            message = asking.recv(1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(asking)
            _tell(grants.leave(asking))
            asking.close()
            return
        _tell(_heeded(grants, Op(message[0]), asking))


def _heeded(grants: Grants[Asking], op: Op, asking: Asking) -> list[Answer[Asking]]:
    match op:
        case Op.WANT:
            return grants.want(asking)
        case Op.WANT_ALL:
            return grants.want_all(asking)
        case Op.CANCEL:
            return grants.cancel(asking)
        case Op.RELEASE:
            return grants.release(asking)


def _tell(answers: Iterable[Answer[Asking]]) -> None:
    for answer in answers:
        # Who is gone is noticed by its end.
        with suppress(OSError):
            message = ANSWER.pack(answer.granted, answer.free, answer.contenders)
            answer.who.send(message)
