"""A device: a name, a semaphore of slots, and as many threads. Shared by all engines on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def _no_preparation() -> None:
    pass


class Device:
    """Runs up to `slots` batches at once.

    A slot is taken before the batch is chosen and given back by whoever ran it. All methods may be
    called from any thread.

    Args:
        name: as in the configuration, e.g. `cpu`, `cuda:0`.
        slots: batches at once.
        threads_per_slot: CPU threads of one batch; shown only, `prepare_thread` sets them.
        prepare_thread: called once in each device thread before its first batch.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        threads_per_slot: int = 1,
        prepare_thread: Callable[[], None] = _no_preparation,
    ) -> None:
        self.name = name
        self.slots = slots
        self.threads_per_slot = threads_per_slot
        self._semaphore = threading.Semaphore(slots)
        self._lock = threading.Lock()
        self._busy = 0
        self._threads = ThreadPoolExecutor(slots, f"device-{name}", initializer=prepare_thread)

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

    def submit(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on a device thread; the caller holds a slot where it is a batch."""
        return self._threads.submit(run, *args, **kwargs)

    def close(self) -> None:
        """Stop the threads once what they run is done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
