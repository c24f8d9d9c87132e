"""A device: a name, a semaphore of slots, and as many threads. Shared by all engines on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from math import inf
from queue import SimpleQueue
from time import monotonic
from typing import ParamSpec, TypeVar, TypeVarTuple

from embedsvc.engine.cost import REST_S
from embedsvc.engine.slots import OwnSlots, Slots
from embedsvc.models.threads import set_batch_threads

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
P = ParamSpec("P")
T = TypeVar("T")


class Device:
    """Runs up to `slots` batches at once.

    A slot is taken before the batch is chosen and given back by whoever ran it. All methods may be
    called from any thread.

    Args:
        name: as in the configuration, e.g. `cpu`, `cuda:0`.
        slots: batches at once, or where they are counted.
        threads_per_slot: CPU threads of one batch.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        slots: int | Slots,
        threads_per_slot: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        self.threads_per_slot = threads_per_slot
        self._clock = clock
        self._released_at = -inf
        self._slots: Slots = OwnSlots(slots) if isinstance(slots, int) else slots
        self._work: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]] | None]
        self._work = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"device-{name}-{k}")
            for k in range(self.slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> int:
        """Batches at once."""
        return self._slots.n_slots

    @property
    def share(self) -> float:
        """Slots that this process can count on; fewer where other workers want some too."""
        return self._slots.share

    @property
    def busy(self) -> int:
        """Slots taken by this process."""
        return self._slots.busy

    @property
    def free(self) -> int:
        """Slots not taken."""
        return self._slots.free

    @property
    def rested(self) -> bool:
        """Whether nothing ran for a while, as far as is known here, before its only taken slot."""
        return self.free == self.slots - 1 and self._clock() - self._released_at > REST_S

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most `timeout_s` seconds; say whether it was taken."""
        return self._slots.acquire(timeout_s)

    def release(self) -> None:
        """Give a slot back."""
        self._released_at = self._clock()
        self._slots.release()

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes off, for one batch that has a slot; see `Slots`."""
        return self._slots.alone()

    def start(self, run: Callable[[*Args], object], *args: *Args) -> None:
        """Run a function on a device thread; the caller holds a slot where it is a batch."""
        self._work.put((run, args))

    def submit(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on a device thread and return what will be its result."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(run(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever waits for the result is told
                future.set_exception(error)

        self._work.put((settle, ()))
        return future

    def close(self) -> None:
        """Stop the threads once what they run is done."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._slots.close()

    def _main(self) -> None:
        set_batch_threads(self.threads_per_slot)
        while (work := self._work.get()) is not None:
            self._run(*work)
            # An idle thread keeps nothing of what it ran.
            del work

    def _run(self, run: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            run(*args)
        except Exception:  # a thread that ends would take its slot along
            log.exception("device thread failed device=%s", self.name)
