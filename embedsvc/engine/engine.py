"""The engine: one version of one model, from the first waiting row to the last settled one.

Two crossings out, one back: the event loop puts requests into the inbox, the scheduler thread hands
batches to device threads, and each finished batch comes back as one callback on the event loop.
Every submitted request is settled exactly once, by the ledger; also where the model dies meanwhile
and the scheduler thread loads it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from queue import SimpleQueue
from time import monotonic
from typing import Literal

from embedsvc.engine.admission import Admission, promised_s
from embedsvc.engine.backlog import Claim
from embedsvc.engine.device import Device
from embedsvc.engine.execution import Outcome, run_batch
from embedsvc.engine.ledger import Ledger
from embedsvc.engine.messages import Arrivals, Died, Edges, Message, OutOfMemory
from embedsvc.engine.policy import Policy
from embedsvc.engine.quarantine import Quarantine
from embedsvc.engine.recovery import PATIENCE, Patience, Recovery
from embedsvc.engine.scheduler import Scheduler
from embedsvc.engine.sequence import NO_KEY, Batch, Key, Priority, Request, Sequence
from embedsvc.errors import (
    ClientGone,
    InternalError,
    NotReady,
    Overloaded,
)
from embedsvc.metrics import VersionMetrics
from embedsvc.models import Model
from embedsvc.models.buffers import BufferPool, HostBuffer

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "stopping", "stopped", "failed"]
State = Literal[Phase, "restarting"]


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
        patience: Patience = PATIENCE,
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self.policy = policy
        self.admission = admission
        self._phase: Phase = "starting"
        self._buffers = buffers
        self._metrics = metrics
        self._clock = clock
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._arrived: list[list[Sequence]] = []
        self._patience = patience
        self._quarantine = Quarantine(clock)
        self._recovery = Recovery(name, model, patience, metrics, clock)
        self._scheduler = Scheduler(
            self._inbox, policy, self._recovery, device, buffers, self._execute, clock
        )
        self._ledger = Ledger(
            admission, metrics, self._price, clock, self._inbox.put, lambda: device.share
        )
        self._thread = threading.Thread(target=self._schedule_main, name=f"scheduler-{name}")
        self._show_gauges()

    def _show_gauges(self) -> None:
        self._metrics.gauges_from(
            sequences=lambda: self.admission.sequences,
            tokens=lambda: self.admission.tokens,
            seconds=lambda: self.queue_s,
            oldest=self._ledger.oldest_s,
            slots_busy=lambda: self.device.busy,
            memory_share=lambda: self.policy.buckets.memory_share,
            up=lambda: self.state == "ready",
            p50=self._ledger.correction.p50,
            p95=self._ledger.correction.p95,
        )

    # --- event loop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler thread; requests are accepted from now on."""
        self._loop = asyncio.get_running_loop()
        self.model.watch(self._limit_s, lambda reason: self._inbox.put(Died(reason)))
        self._thread.start()
        self._phase = "ready"

    @property
    def state(self) -> State:
        """What it does now."""
        return "restarting" if self._phase == "ready" and self._recovery.down else self._phase

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
    ) -> Claim:
        """Reserve room for a request that is predicted to be done in time, all or nothing.

        Args:
            rows: texts of the request.
            tokens: their tokens, estimated.
            priority: share class.
            left_s: seconds until its deadline.
            key: whom it counts for.

        Returns:
            What is held until `confirm` or `withdraw`: those who come meanwhile know of it.

        Raises:
            NotReady: the engine has stopped, or its model is not expected back in time.
            Overloaded: a bound would be passed or the deadline would probably be missed.
        """
        ledger = self._ledger
        slot_s, own_s = ledger.slot_s(rows, tokens), self.own_s(rows, tokens)
        finish_s = ledger.backlog.finish_s(slot_s, priority, key)
        left_s -= self._back_in(left_s - finish_s)
        room_s = promised_s(left_s, self.policy.limits.max_age_s)
        try:
            if finish_s > max(room_s, own_s):
                raise Overloaded(
                    f"The queue is too long: done in {finish_s:.1f} s, {left_s:.1f} s are left. "
                    "Retry after the time given, or allow more time."
                )
            self.admission.reserve(rows, tokens, bulk=priority is Priority.BULK, key=key)
        except Overloaded as refusal:
            # Where a bound is reached, there is room once as much has left the queue.
            room_s = min(room_s, finish_s - own_s)
            refusal.retry_after_s = ledger.backlog.invite(slot_s, priority, key, room_s)
            raise
        return ledger.claim(rows, tokens, priority, key)

    def _back_in(self, patience_s: float) -> float:
        """Return the seconds until the model computes; 0 where it does.

        Raises:
            NotReady: the engine has stopped, or it takes longer than `patience_s`.
        """
        if self._phase not in ("starting", "ready"):
            raise self._not_ready(1.0)
        recovery_s = self._recovery.left_s()
        if recovery_s > max(0.0, patience_s):
            raise self._not_ready(self._recovery.retry_after_s())
        return recovery_s

    def confirm(self, claim: Claim, tokens: int) -> None:
        """Correct the room of an admitted request to its real tokens; `submit` comes next."""
        self.admission.adjust(tokens - claim.tokens, claim.key)
        self._ledger.unclaim(claim)

    def withdraw(self, claim: Claim) -> None:
        """Give back all that an admitted request held, which is not submitted."""
        self.admission.release(claim.rows, claim.tokens, claim.key)
        self._ledger.unclaim(claim)

    def submit(self, request: Request, sequences: list[Sequence]) -> None:
        """Queue all rows of an admitted request; its `settled` is resolved in every case."""
        self._ledger.enter(request, sequences)
        if refused := self._quarantine.refusal(sequences):
            self._ledger.close(request, refused[1])
        elif self._phase == "ready":
            # What arrives in one turn of the loop wakes the scheduler once, as one message: a
            # wake-up for each costs more than the rest of the way of a short text.
            if not self._arrived:
                self._loop.call_soon(self._hand_over)
            self._arrived.append(sequences)
        else:
            self._ledger.close(request, self._not_ready(1.0))

    def _not_ready(self, retry_after_s: float) -> NotReady:
        return NotReady(
            f"Model {self.name} is {self.state}. Retry after the time given.",
            retry_after_s=retry_after_s,
        )

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._inbox.put(Arrivals(arrived))

    def abandon(self, request: Request) -> None:
        """Forget a request nobody waits for; its waiting rows never reach the device."""
        self._ledger.close(request, ClientGone("The client closed the connection."))

    async def stop(self, drain_timeout_s: float) -> None:
        """Finish what is submitted, at most `drain_timeout_s` seconds; end thread and model."""
        self._phase = "stopping"
        if not await self._ledger.wait_empty(drain_timeout_s):
            log.warning("drain time over model=%s open=%d", self.name, len(self._ledger))
        self._ledger.close_all(self._not_ready(1.0))
        self._recovery.interrupt()
        self._inbox.put(None)
        await asyncio.to_thread(self.model.close)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._phase = "stopped"

    def _die(self) -> None:
        self._phase = "failed"
        self._ledger.close_all(InternalError("The scheduler stopped; the server's log says why."))

    # --- scheduler thread ------------------------------------------------------------------------

    def _schedule_main(self) -> None:
        try:
            self._scheduler.run()
        except Exception:  # every waiter must be answered, whatever went wrong
            log.exception("scheduler died model=%s", self.name)
            self._post(self._die)

    # --- device threads --------------------------------------------------------------------------

    def _execute(self, batch: Batch, buffer: HostBuffer) -> None:
        """Run a batch, give buffer and slot back, and report once."""
        lost = InternalError("The batch ended without a result; the server's log says why.")
        outcome = Outcome(dict.fromkeys(batch.sequences, lost), [])
        started = self._clock()
        try:
            outcome = run_batch(self.model, batch, buffer, self._quarantine, self._on_out_of_memory)
        finally:
            ended = self._clock()
            done = self._hand_back(batch, outcome.undone)
            self._buffers.put(buffer)
            self.device.release()
            self._post(self._ledger.settle, done, started, ended, outcome.failures)
            self._observe(done, ended - started, ok=done is batch and not outcome.failures)

    def _hand_back(self, batch: Batch, undone: Seq[Batch]) -> Batch:
        """Let rows be tried again; return a batch of the others, which are done."""
        if not undone:
            return batch
        for again in undone:
            self._inbox.put(again)
        left = {row for again in undone for row in again.sequences}
        return Batch([row for row in batch.sequences if row not in left], batch.length, 0.0)

    def _limit_s(self, rows: int, length: int) -> float:
        return self._patience.batch_limit_s(self.policy.cost(rows, length))

    def _on_out_of_memory(self, rows: int, length: int) -> None:
        self._inbox.put(OutOfMemory(rows, length))

    def _observe(self, batch: Batch, seconds: float, *, ok: bool) -> None:
        if ok:
            self._recovery.worked()
        m = self._metrics
        m.batches["ok" if ok else "failed"].inc()
        m.busy_seconds.inc(seconds)
        m.rows.observe(batch.rows)
        m.inference.observe(seconds)
        m.tokens["real"].inc(batch.real_tokens)
        for key, tokens in batch.tokens_by_key.items():
            if key is not NO_KEY:
                m.key_tokens(key.name, tokens)
        m.tokens["computed"].inc(batch.rows * batch.length)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        """Run a call on the event loop; a loop that is closed has no waiters left."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("event loop closed before a batch could be settled")
