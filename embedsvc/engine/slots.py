"""Slots of a device: how many batches run at once, whichever process they come from.

Counted here where the device is this process's own. Where several workers share it, their
supervisor grants slots in the order of asking, over one socket a worker and device that keeps the
bounds of messages: `Op` goes out, an answer comes back for every wish.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Protocol

# granted (or the wish taken back), slots that nobody has, workers that have or want some
ANSWER = struct.Struct("<?HH")


class Op(IntEnum):
    """What a worker says, in one byte."""

    WANT = 1
    WANT_ALL = 2
    CANCEL = 3
    RELEASE = 4


class Slots(Protocol):
    """The slots of one device; any thread."""

    n_slots: int
    """All of them."""

    @property
    def busy(self) -> int:
        """Slots that this process has."""

    @property
    def free(self) -> int:
        """Slots that nobody has, as far as is known here."""

    @property
    def share(self) -> float:
        """Slots that this process can count on while others want some too."""

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most `timeout_s` seconds; say whether it was taken."""

    def release(self) -> None:
        """Give a slot back."""

    def alone(self) -> AbstractContextManager[None]:
        """Keep all other processes off the device, for one batch that has a slot already.

        Between entering and leaving that slot is given back, by whoever ran the batch.
        """

    def close(self) -> None:
        """Give everything back; nobody waits or has a slot any more."""


class OwnSlots:
    """Slots that no other process knows of."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._semaphore = threading.Semaphore(n_slots)
        self._lock = threading.Lock()
        self.busy = 0

    @property
    def free(self) -> int:
        """Slots not taken."""
        return self.n_slots - self.busy

    @property
    def share(self) -> float:
        """All of them."""
        return self.n_slots

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most `timeout_s` seconds; say whether it was taken."""
        if not self._semaphore.acquire(timeout=timeout_s):
            return False
        with self._lock:
            self.busy += 1
        return True

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self.busy -= 1
        self._semaphore.release()

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: there are no others."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


class SharedSlots:
    """Slots that are granted over a socket; its end gives all of them back."""

    def __init__(self, n_slots: int, supervisor: socket.socket) -> None:
        self.n_slots = n_slots
        self._supervisor = supervisor
        self._readable = select.poll()
        self._readable.register(supervisor, select.POLLIN)
        # Held by the one thread that has an open wish.
        self._wishing = threading.Lock()
        self._lock = threading.Lock()
        self._contenders = 1
        self._free = n_slots
        self.busy = 0

    @property
    def free(self) -> int:
        """Slots that nobody had when one was last granted here."""
        return self._free

    @property
    def share(self) -> float:
        """An equal part among all who had or wanted some when one was last granted here."""
        return self.n_slots / (self._contenders if self.busy or self._wishing.locked() else 1)

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most `timeout_s` seconds; say whether it was taken.

        Raises:
            OSError: the supervisor is gone.
        """
        if not self._wishing.acquire(timeout=timeout_s):
            return False
        try:
            self._say(Op.WANT)
            if not self._readable.poll(timeout_s * 1000):
                # Nobody waits for it any more. It may have been granted meanwhile: then it is.
                self._say(Op.CANCEL)
            return self._answered(1)
        finally:
            self._wishing.release()

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self.busy -= 1
        self._say(Op.RELEASE)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all other processes off the device; waits for the batches that they have on it.

        Raises:
            OSError: the supervisor is gone.
        """
        # Two that kept their slots while they waited for each other's would wait for ever.
        self.release()
        with self._wishing:
            self._say(Op.WANT_ALL)
            self._answered(self.n_slots)
        try:
            yield
        finally:
            for _ in range(self.n_slots - 1):
                self.release()

    def close(self) -> None:
        """Close the socket."""
        self._supervisor.close()

    def _say(self, op: Op) -> None:
        self._supervisor.send(bytes((op,)))

    def _answered(self, wanted: int) -> bool:
        message = self._supervisor.recv(ANSWER.size)
        if not message:
            raise ConnectionResetError("the supervisor is gone")
        granted, self._free, self._contenders = ANSWER.unpack(message)
        if granted:
            with self._lock:
                self.busy += wanted
        return bool(granted)
