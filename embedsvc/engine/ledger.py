"""The ledger: every submitted request until it is settled, exactly once.

Lives on the event loop alone. Holds the counters, deadlines and futures of requests; knows nothing
of threads, of how batches are made, or of devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from embedsvc.engine.admission import Admission
from embedsvc.engine.backlog import Backlog, Claim
from embedsvc.engine.correction import Corrected, Correction, width_class
from embedsvc.engine.execution import Failures
from embedsvc.engine.sequence import Batch, Key, Priority, Request, Sequence
from embedsvc.errors import ClientGone, DeadlineExceeded, RequestError
from embedsvc.metrics import VersionMetrics, length_class


class Ledger:
    """Open requests of one engine.

    Args:
        admission: where settled rows give their room back.
        metrics: counts how texts end.
        price: predicted slot seconds of a row of some tokens, its share of a batch included.
        clock: monotonic seconds.
        tell: told each request that ended with an error, so that its rows leave the queue, and when
            batches take longer or less long than they did.
        slots: of the device that can be counted on now.

    Attributes:
        admission: as given.
        correction: how much longer batches take than predicted.
        backlog: what is open, by key and priority.
    """

    def __init__(
        self,
        admission: Admission,
        metrics: VersionMetrics,
        price: Callable[[int], float],
        clock: Callable[[], float],
        tell: Callable[[Request | Corrected], None],
        slots: Callable[[], float],
    ) -> None:
        self.admission = admission
        self.correction = Correction()
        self.backlog = Backlog(self.correction.p50, slots, clock)
        self._metrics = metrics
        self._price = price
        self._clock = clock
        self._tell = tell
        self._open: dict[Request, None] = {}
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def claim(self, rows: int, tokens: int, priority: Priority, key: Key) -> Claim:
        """Take in the estimated work of a request whose room is reserved, until `unclaim`."""
        mean_length = -(-tokens // rows)
        open_s = rows * self._price(mean_length)
        claim = Claim(key, priority, rows, tokens, width_class(mean_length), open_s)
        self.backlog.enter(claim)
        return claim

    def unclaim(self, claim: Claim) -> None:
        """Take out what was claimed: the request is entered next, or never."""
        self.backlog.release(claim, claim.open_s)
        self.backlog.close(claim)

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        """Take in a request whose room is reserved; its `settled` is resolved in every case."""
        self._open[request] = None
        request.open_rows = len(sequences)
        request.open_tokens = sum(s.length for s in sequences)
        request.open_s = sum(self._price(s.length) for s in sequences)
        request.width_class = width_class(-(-request.open_tokens // request.open_rows))
        self.backlog.enter(request)
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
        # Rows that left on the way make a batch shorter than it was priced.
        complete = not failures and not any(s.request.abandoned for s in batch.sequences)
        if complete and batch.predicted_s > 0:
            self._learn(batch.length, (ended - started) / batch.predicted_s)
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
        if request.timer is not None:
            request.timer.cancel()
        self._metrics.texts[_outcome(error)].inc(len(request.vectors))
        if error is not None:
            request.abandoned = True
            self._tell(request)
            self._release(request, request.open_rows, request.open_tokens)
        self.backlog.close(request)
        if not request.settled.done():
            request.settled.set_result(error)
        if not self._open:
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

    def slot_s(self, rows: int, tokens: int) -> float:
        """Return the slot seconds that a request would take, as batches do now."""
        mean_length = -(-tokens // rows)
        return rows * self._price(mean_length) * self.correction.factor(mean_length)

    def oldest_s(self) -> float:
        """Return the age of the oldest request of which no row has been on the device."""
        for request in self._open:
            if request.first_start == inf:
                return self._clock() - request.arrival
        return 0.0

    def _book(self, request: Request, sequence: Sequence, started: float, ended: float) -> None:
        self._release(request, 1, sequence.length)
        wait = self._metrics.queue[length_class(sequence.length)]
        wait.observe(started - request.arrival)
        request.first_start = min(request.first_start, started)
        if request.open_rows == 0:
            request.last_end = ended
            self.close(request, None)

    def _learn(self, width: int, ratio: float) -> None:
        """Compare a batch with its prediction, then let it correct the next ones.

        Source: each prediction is judged by what it was made without: A. P. Dawid, "The prequential
        approach", Journal of the Royal Statistical Society A 147, 1984.
        """
        error = abs(ratio / self.correction.factor(width) - 1)
        self._metrics.cost_error(width_class(width), error)
        news = self.correction.observe(width, ratio)
        if news is not None:
            self._tell(news)

    def _release(self, request: Request, rows: int, tokens: int) -> None:
        # By tokens, so that the last row takes whatever is left.
        seconds = request.open_s * tokens / request.open_tokens
        request.open_s -= seconds
        request.open_rows -= rows
        request.open_tokens -= tokens
        self.backlog.release(request, seconds)
        self.admission.release(rows, tokens, request.key)

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
