"""The engine: one version of one model, from the first waiting row to the last settled one.

Two crossings out, one back: the event loop puts requests into the inbox, the scheduler thread hands
batches to device threads, and each finished batch comes back as one callback on the event loop.
Every submitted request is settled exactly once, by the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal

from embedsvc.engine.admission import Admission, promised_s
from embedsvc.engine.correction import Corrected
from embedsvc.engine.device import Device
from embedsvc.engine.execution import Failures, run_batch
from embedsvc.engine.ledger import Ledger
from embedsvc.engine.messages import Arrivals, Edges, Message, OutOfMemory
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import NO_KEY, Batch, Key, Priority, Request, Sequence
from embedsvc.errors import (
    ClientGone,
    InternalError,
    NotReady,
    Overloaded,
)
from embedsvc.metrics import VersionMetrics
from embedsvc.models import Model
from embedsvc.models.buffers import BufferPool

log = logging.getLogger(__name__)

# How long the scheduler thread waits for a slot before it looks into its inbox again.
SLOT_WAIT_S = 1.0

State = Literal["starting", "ready", "stopping", "stopped", "failed"]


class Engine:
    """Queues, policy, buffers and device of one loaded model."""

    def __init__(
        self,
        name: str,
        model: Model,
        device: Device,
        policy: Policy,
        buffers: BufferPool,
        admission: Admission,
        metrics: VersionMetrics,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self.policy = policy
        self.admission = admission
        self.state: State = "starting"
        self._buffers = buffers
        self._metrics = metrics
        self._clock = clock
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._arrived: list[list[Sequence]] = []
        self._ledger = Ledger(admission, metrics, self._price, clock, self._inbox.put, device.slots)
        self._thread = threading.Thread(target=self._schedule_main, name=f"scheduler-{name}")
        metrics.gauges_from(
            sequences=lambda: admission.sequences,
            tokens=lambda: admission.tokens,
            seconds=lambda: self.queue_s,
            oldest=self._ledger.oldest_s,
            slots_busy=lambda: device.busy,
            memory_share=lambda: policy.buckets.memory_share,
            p50=self._ledger.correction.p50,
            p95=self._ledger.correction.p95,
        )

    # --- event loop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler thread; requests are accepted from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self.state = "ready"

    @property
    def queue_s(self) -> float:
        """Predicted seconds until everything submitted now is done."""
        return self._ledger.backlog.total_s

    def _price(self, length: int) -> float:
        # The policy has other buckets after a switch of edges.
        return self.policy.buckets.price(length)

    def set_edges(self, edges: Seq[int]) -> None:
        """Use other bucket edges from the next batch on."""
        self._inbox.put(Edges(tuple(edges)))

    def own_s(self, rows: int, tokens: int) -> float:
        """Return the predicted seconds of a request on the idle device."""
        return self._ledger.slot_s(rows, tokens) / self.device.slots

    def admit(
        self, rows: int, tokens: int, priority: Priority, left_s: float, key: Key = NO_KEY
    ) -> None:
        """Reserve room for a request that is predicted to be done in time, all or nothing.

        Args:
            rows: texts of the request.
            tokens: their tokens, estimated; `admission.adjust` corrects them once they are known.
            priority: share class.
            left_s: seconds until its deadline.
            key: whom it counts for.

        Raises:
            Overloaded: a bound would be passed or the deadline would probably be missed.
        """
        ledger = self._ledger
        slot_s, own_s = ledger.slot_s(rows, tokens), self.own_s(rows, tokens)
        finish_s = ledger.backlog.finish_s(slot_s, priority, key)
        room_s = promised_s(left_s, self.policy.limits.max_age_s)
        try:
            if finish_s > max(room_s, own_s):
                raise Overloaded(
                    f"The queue is too long: done in {finish_s:.1f} s, {left_s:.1f} s are left. "
                    "Retry after the time given, or allow more time."
                )
            self.admission.reserve(rows, tokens, bulk=priority is Priority.BULK)
        except Overloaded as refusal:
            # Where a bound is reached, there is room once as much has left the queue.
            room_s = min(room_s, finish_s - own_s)
            refusal.retry_after_s = ledger.backlog.invite(slot_s, priority, key, room_s)
            raise

    def submit(self, request: Request, sequences: list[Sequence]) -> None:
        """Queue all rows of an admitted request; its `settled` is resolved in every case."""
        self._ledger.enter(request, sequences)
        if self.state == "ready":
            # What arrives in one turn of the loop wakes the scheduler once, as one message: a
            # wake-up for each costs more than the rest of the way of a short text.
            if not self._arrived:
                self._loop.call_soon(self._hand_over)
            self._arrived.append(sequences)
        else:
            refusal = NotReady(f"Model {self.name} is {self.state}.", retry_after_s=1)
            self._ledger.close(request, refusal)

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._inbox.put(Arrivals(arrived))

    def abandon(self, request: Request) -> None:
        """Forget a request nobody waits for; its waiting rows never reach the device."""
        self._ledger.close(request, ClientGone("The client closed the connection."))

    async def stop(self, drain_timeout_s: float) -> None:
        """Finish what is submitted, at most `drain_timeout_s` seconds, then stop the thread."""
        self.state = "stopping"
        if not await self._ledger.wait_empty(drain_timeout_s):
            log.warning("drain time over model=%s open=%d", self.name, len(self._ledger))
        self._ledger.close_all(NotReady(f"Model {self.name} is stopping.", retry_after_s=1))
        self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self.state = "stopped"

    def _die(self) -> None:
        self.state = "failed"
        self._ledger.close_all(InternalError("The scheduler stopped; the server's log says why."))

    # --- scheduler thread ------------------------------------------------------------------------

    def _schedule_main(self) -> None:
        try:
            self._schedule()
        except Exception:  # every waiter must be answered, whatever went wrong
            log.exception("scheduler died model=%s", self.name)
            self._post(self._die)

    def _schedule(self) -> None:
        ask_again = inf
        while self._read_inbox(ask_again):
            ask_again = inf
            while self.policy.n_waiting and ask_again == inf:
                if not self.device.acquire(SLOT_WAIT_S):
                    if not self._read_inbox(0.0):
                        return
                    continue
                ask_again = self._dispatch()
                if ask_again < 0:
                    return

    def _dispatch(self) -> float:
        """Choose and launch one batch with the slot just taken.

        Late arrivals join and dead rows leave right before the choice.

        Returns:
            `inf` after a batch, the time to ask again without one, or -inf to stop.
        """
        launched = False
        try:
            if not self._read_inbox(0.0):
                return -inf
            choice = self.policy.next(self._clock(), self.device.free + 1)
            if not isinstance(choice, Batch):
                return choice
            self.device.start(self._execute, choice)
            launched = True
            return inf
        finally:
            if not launched:
                self.device.release()

    def _read_inbox(self, until: float) -> bool:
        """Apply all messages, waiting for the first one until a time; False means stop.

        Args:
            until: monotonic seconds; 0 does not wait, `inf` waits without bound.
        """
        timeout = None if until == inf else max(0.0, until - self._clock())
        try:
            message = self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait()
            while self._apply(message):
                message = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _apply(self, message: Message) -> bool:
        if message is None:
            return False
        if isinstance(message, Request):
            self.policy.discard(message)
        elif isinstance(message, OutOfMemory):
            self.policy.shrink(message.rows, message.length)
        elif isinstance(message, Edges):
            self.policy.set_edges(message.edges)
        elif isinstance(message, Corrected):
            self.policy.correct(message)
        else:
            now = self._clock()
            for sequences in message.requests:
                if not sequences[0].request.abandoned:
                    self.policy.add(sequences, now)
        return True

    # --- device threads --------------------------------------------------------------------------

    def _execute(self, batch: Batch) -> None:
        """Run a batch, give buffer and slot back, and report once."""
        lost = InternalError("The batch ended without a result; the server's log says why.")
        failures: Failures = dict.fromkeys(batch.sequences, lost)
        buffer = self._buffers.take()
        started = self._clock()
        try:
            failures = run_batch(
                self.model, batch.sequences, batch.length, buffer, self._on_out_of_memory
            )
        finally:
            ended = self._clock()
            self._buffers.put(buffer)
            self.device.release()
            self._post(self._ledger.settle, batch, started, ended, failures)
            self._observe(batch, ended - started, ok=not failures)

    def _on_out_of_memory(self, rows: int, length: int) -> None:
        self._inbox.put(OutOfMemory(rows, length))

    def _observe(self, batch: Batch, seconds: float, *, ok: bool) -> None:
        m = self._metrics
        m.batches["ok" if ok else "failed"].inc()
        m.busy_seconds.inc(seconds)
        m.rows.observe(batch.rows)
        m.inference.observe(seconds)
        m.tokens["real"].inc(batch.real_tokens)
        m.tokens["computed"].inc(batch.rows * batch.length)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        """Run a call on the event loop; a loop that is closed has no waiters left."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("event loop closed before a batch could be settled")
