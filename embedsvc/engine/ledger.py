"""The ledger: every submitted request until it is settled, exactly once.

Lives on the event loop alone. Holds the counters, deadlines and futures of requests; knows nothing
of threads, of how batches are made, or of devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from embedsvc.engine.admission import Admission
from embedsvc.engine.execution import Failures
from embedsvc.engine.sequence import Batch, Priority, Request, Sequence
from embedsvc.errors import ClientGone, DeadlineExceeded, RequestError
from embedsvc.metrics import VersionMetrics, length_class

PACE_MEMORY = 0.02
# One batch that was held up by something else does not decide what is admitted.
MAX_PACE = 4.0


class Ledger:
    """Open requests of one engine.

    Args:
        admission: where settled rows give their room back.
        metrics: counts how texts end.
        price: predicted slot seconds of a row of some tokens, its share of a batch included.
        clock: monotonic seconds.
        on_dropped: told each request that ended with an error, so that its rows leave the queue.
    """

    def __init__(
        self,
        admission: Admission,
        metrics: VersionMetrics,
        price: Callable[[int], float],
        clock: Callable[[], float],
        on_dropped: Callable[[Request], None],
    ) -> None:
        self.admission = admission
        self.pending_s = dict.fromkeys(Priority, 0.0)
        # Measured over predicted time of recent batches: half of it is from the last 35.
        self.pace = 1.0
        self._n_open = dict.fromkeys(Priority, 0)
        self._metrics = metrics
        self._price = price
        self._clock = clock
        self._on_dropped = on_dropped
        self._open: dict[Request, None] = {}
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        """Take in a request whose room is reserved; its `settled` is resolved in every case."""
        self._open[request] = None
        request.open_rows = len(sequences)
        request.open_tokens = sum(s.length for s in sequences)
        self._n_open[request.priority] += 1
        self.pending_s[request.priority] += sum(self._price(s.length) for s in sequences)
        left = max(0.0, request.deadline - self._clock())
        request.timer = asyncio.get_running_loop().call_later(left, self._expire, request)

    def settle(
        self,
        batch: Batch,
        started: float,
        ended: float,
        failures: Failures,
    ) -> None:
        """Book a batch that came back from the device.

        Args:
            batch: the rows.
            started: when it went to the device, monotonic seconds.
            ended: when it came back.
            failures: the answer to the request of each guilty row.
        """
        if not failures and batch.predicted_s > 0:
            pace = min(MAX_PACE, (ended - started) / batch.predicted_s)
            self.pace += PACE_MEMORY * (pace - self.pace)
        for sequence, error in failures.items():
            self.close(sequence.request, error)
        for sequence in batch.sequences:
            if sequence.request in self._open:
                self._book(sequence.request, sequence, started, ended)

    def close(self, request: Request, error: RequestError | None) -> None:
        """Settle a request, once; later calls change nothing."""
        if request not in self._open:
            return
        del self._open[request]
        self._n_open[request.priority] -= 1
        if request.timer is not None:
            request.timer.cancel()
        self._metrics.texts[_outcome(error)].inc(len(request.vectors))
        if error is not None:
            request.abandoned = True
            self._on_dropped(request)
            mean_length = request.open_tokens // max(1, request.open_rows)
            seconds = request.open_rows * self._price(mean_length)
            self._release(request, request.open_rows, request.open_tokens, seconds)
        if not request.settled.done():
            request.settled.set_result(error)
        if not self._open:
            self.pending_s = dict.fromkeys(Priority, 0.0)
            self._emptied.set()

    def close_all(self, error: RequestError) -> None:
        """Settle everyone with the same error."""
        for request in list(self._open):
            self.close(request, error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is open; return whether that came within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def finish_s(self, own_s: float, priority: Priority) -> float:
        """Return the slot seconds until a new request would be done, before correction by pace.

        Bulk work waits for everything. Interactive work shares the device with the open bulk
        requests by weight, so they take no more than their share before it is done.
        """
        interactive, bulk = Priority.INTERACTIVE, Priority.BULK
        if priority is bulk:
            return own_s + sum(self.pending_s.values())
        ahead_s = own_s + self.pending_s[interactive]
        weight = float(interactive) * (self._n_open[interactive] + 1)
        bulk_share_s = ahead_s * float(bulk) * self._n_open[bulk] / weight
        return ahead_s + min(self.pending_s[bulk], bulk_share_s)

    def oldest_s(self) -> float:
        """Return the age of the oldest request of which no row has been on the device."""
        for request in self._open:
            if request.first_start == inf:
                return self._clock() - request.arrival
        return 0.0

    def _book(self, request: Request, sequence: Sequence, started: float, ended: float) -> None:
        self._release(request, 1, sequence.length, self._price(sequence.length))
        wait = self._metrics.queue[length_class(sequence.length)]
        wait.observe(started - request.arrival)
        request.first_start = min(request.first_start, started)
        if request.open_rows == 0:
            request.last_end = ended
            self.close(request, None)

    def _release(self, request: Request, rows: int, tokens: int, seconds: float) -> None:
        request.open_rows -= rows
        request.open_tokens -= tokens
        pending = self.pending_s[request.priority]
        self.pending_s[request.priority] = max(0.0, pending - seconds)
        self.admission.release(rows, tokens)

    def _expire(self, request: Request) -> None:
        self.close(
            request,
            DeadlineExceeded(
                f"The deadline passed with {request.open_rows} of {len(request.vectors)} texts "
                "left. "
                "Send fewer texts at once or allow more time."
            ),
        )


def _outcome(error: RequestError | None) -> str:
    match error:
        case None:
            return "ok"
        case DeadlineExceeded():
            return "expired"
        case ClientGone():
            return "abandoned"
    return "failed"
