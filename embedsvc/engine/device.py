"""A device: a name, a semaphore of slots, and as many threads. Shared by all engines on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar, TypeVarTuple

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
        slots: batches at once.
        threads_per_slot: CPU threads of one batch.
    """

    def __init__(self, name: str, slots: int, threads_per_slot: int = 1) -> None:
        self.name = name
        self.slots = slots
        self.threads_per_slot = threads_per_slot
        self._semaphore = threading.Semaphore(slots)
        self._lock = threading.Lock()
        self._busy = 0
        self._work: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]] | None]
        self._work = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"device-{name}-{k}") for k in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> int:
        """Slots taken."""
        return self._busy

    @property
    def free(self) -> int:
        """Slots not taken."""
        return self.slots - self._busy

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most `timeout_s` seconds; say whether it was taken."""
        if not self._semaphore.acquire(timeout=timeout_s):
            return False
        with self._lock:
            self._busy += 1
        return True

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self._busy -= 1
        self._semaphore.release()

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
