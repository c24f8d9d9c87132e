"""One life of an isolated model's process, as those see it who run batches on it. Any thread.

Whose the process is and how it is started, followed and ended is the business of a `Running`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from embedsvc.errors import ModelDied
from embedsvc.models.buffers import SharedBuffer
from embedsvc.models.channel import Channel
from embedsvc.models.launch import KILLED, Reason
from embedsvc.models.wire import Ready, Status

log = logging.getLogger(__name__)


class Running(Protocol):
    """A process: one's own, or one that others use too."""

    control: socket.socket
    """Socket to it, over which channels are sent once it is ready."""
    warm: bool
    """Others have run their batches on it before."""
    load_s: float
    """Seconds it took until it was ready, whoever waited for it; 0 before."""

    @property
    def pid(self) -> int:
        """Its process id; 0 where that is not known yet."""

    def ready(self, limit_s: float) -> Ready:
        """Wait until it has loaded the model.

        Raises:
            ModelError: it cannot, it ended, or it took longer than `limit_s` seconds.
        """

    def end(self, reason: Reason) -> str:
        """End it, wait until it is gone, and say in words how it ended.

        A process that others use too is not ended where the reason is that this one needs it no
        longer.
        """

    def follow(self) -> None:
        """Return when it is gone."""

    def close(self) -> None:
        """Free what is left of it."""


@dataclass(slots=True, frozen=True)
class Death:
    """How a process ended.

    Attributes:
        reason: `died` by itself, `hung` and was killed, lost its `device`, or was `closed`.
        detail: in words.
    """

    reason: Reason
    detail: str

    @property
    def killed(self) -> bool:
        """Whether that came from outside; see `ModelDied`."""
        return self.reason == "died" and self.detail == KILLED


class Child:
    """A running process; `end` and `close` in this order free everything.

    Args:
        running: taken over.
        on_death: called once, by whichever thread notices the end first, when the process is gone
            and before anybody is told of it by `ModelDied`.
    """

    def __init__(self, running: Running, on_death: Callable[[Child], None]) -> None:
        self._running = running
        self._on_death = on_death
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self.death: Death | None = None
        # Where nobody closed the model it is not waited for: it waits for the process, and that one
        # for the end of this.
        self._follower = threading.Thread(target=self._follow, name="model-process", daemon=True)
        self._follower.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running.pid

    @property
    def warm(self) -> bool:
        """Whether others have run their batches on it before."""
        return self._running.warm

    @property
    def load_s(self) -> float:
        """Seconds it took until it was ready, whoever waited for it."""
        return self._running.load_s

    def ready(self, limit_s: float) -> Ready:
        """Wait until it has loaded the model.

        Raises:
            ModelError: it cannot, it ended, or it took longer than `limit_s` seconds.
        """
        return self._running.ready(limit_s)

    def run(
        self, buffer: SharedBuffer, rows: int, length: int, threads: int, limit_s: float
    ) -> Status:
        """Run one batch and wait for its end, at most `limit_s` seconds.

        Raises:
            ModelDied: the process is gone, and with it whoever wrote to the buffer.
        """
        channel = self._take()
        try:
            channel.ask(buffer, rows, length, threads, limit_s)
        except OSError:
            channel.close()
            raise self._died("died", in_flight=False) from None
        try:
            status = channel.answer()
        except TimeoutError:
            channel.close()
            detail = f"no answer to {rows} x {length} tokens within {limit_s:.1f} s"
            raise self._died("hung", detail) from None
        except (OSError, EOFError):
            channel.close()
            raise self._died("died") from None
        if status is Status.DEVICE_LOST:
            channel.close()
            raise self._died("device", "its device failed for good")
        self._give_back(channel)
        return status

    def end(self, reason: Reason, detail: str = "") -> Death:
        """End the process where it still runs, and wait until it is gone; only the first counts."""
        with self._lock:
            if self.death is None:
                how = self._running.end(reason)
                self.death = Death(reason, how if reason == "died" else detail)
                while self._idle:
                    self._idle.pop().close()
                self._on_death(self)
            return self.death

    def close(self) -> None:
        """Free what is left of a process that has ended; nobody may wait in `ready`."""
        self._follower.join()
        self._running.close()

    # --- channels --------------------------------------------------------------------------------

    def _take(self) -> Channel:
        """Return an idle channel, or a new one."""
        with self._lock:
            if self.death is None:
                if self._idle:
                    return self._idle.pop()
                with suppress(OSError):
                    return Channel.open(self._running.control)
        raise self._died("died", in_flight=False)

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if self.death is None:
                self._idle.append(channel)
                return
        channel.close()

    def _died(self, reason: Reason, detail: str = "", *, in_flight: bool = True) -> ModelDied:
        death = self.end(reason, detail)
        return ModelDied(
            f"the model's process is gone: {death.detail}",
            in_flight=in_flight,
            killed=death.killed,
        )

    # --- the follower thread ---------------------------------------------------------------------

    def _follow(self) -> None:
        """Notice the end of a process that is idle."""
        self._running.follow()
        self.end("died")
