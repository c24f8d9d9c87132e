"""The scheduler thread: what it is told becomes batches on the device.

Takes a slot of the device first, looks into its inbox again, and only then chooses. Loads the model
again where it died, and tries again what was on the device then, before what waits. Knows nothing
of event loops, answers or metrics.

Source: a batch that stays open until a device is free for it, as the payloads of NVIDIA's Triton
Inference Server do; requests that join at every turn, as in G.-I. Yu et al., "Orca", OSDI 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue

from embedsvc.engine.correction import Corrected
from embedsvc.engine.device import Device
from embedsvc.engine.messages import Died, Edges, Message, OutOfMemory
from embedsvc.engine.policy import Policy
from embedsvc.engine.recovery import Recovery
from embedsvc.engine.sequence import Batch, Request
from embedsvc.models.buffers import BufferPool, HostBuffer

# How long it waits for a slot before it looks into its inbox again.
SLOT_WAIT_S = 1.0


class Scheduler:
    """Owns policy and recovery; everything runs on the thread that calls `run`.

    Args:
        inbox: the only way in which other threads tell it anything.
        policy: the waiting rows.
        recovery: of the model.
        device: where batches run.
        buffers: as many as batches may be on the device.
        execute: runs a batch in a buffer on a device thread, then gives back first the buffer and
            then the slot.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        inbox: SimpleQueue[Message],
        policy: Policy,
        recovery: Recovery,
        device: Device,
        buffers: BufferPool,
        execute: Callable[[Batch, HostBuffer], None],
        clock: Callable[[], float],
    ) -> None:
        self._inbox = inbox
        self._policy = policy
        self._recovery = recovery
        self._device = device
        self._buffers = buffers
        self._execute = execute
        self._clock = clock

    def run(self) -> None:
        """Choose and launch batches until the inbox says to stop."""
        ask_again = inf
        while self._read(ask_again) and self._recovery.revive():
            ask_again = inf
            while self._has_work and ask_again == inf:
                if not self._device.acquire(SLOT_WAIT_S):
                    ask_again = self._clock()
                    continue
                ask_again = self._dispatch()
                if ask_again < 0:
                    return

    @property
    def _has_work(self) -> bool:
        return self._policy.n_waiting > 0 or self._recovery.n_undone > 0

    def _dispatch(self) -> float:
        """Choose and launch one batch with the slot just taken.

        Late arrivals join and dead rows leave right before the choice.

        Returns:
            `inf` after a batch, the time to ask again without one, or -inf to stop.
        """
        launched = False
        try:
            if not self._read(0.0):
                return -inf
            now = self._clock()
            if self._recovery.down:
                return now
            choice = self._recovery.next() or self._policy.next(now, self._device.free + 1)
            if not isinstance(choice, Batch):
                return choice
            # What is tried again was not predicted.
            if choice.predicted_s > 0 and self._device.rested:
                choice.predicted_s += self._policy.cost.cold
            launched = True
            self._launch(choice)
            return inf
        finally:
            if not launched:
                self._device.release()

    def _launch(self, batch: Batch) -> None:
        """Give a batch to a device thread; wait for the end of one that must be alone."""
        if not batch.alone:
            self._device.start(self._execute, batch, self._buffers.take())
            return
        # Where nobody else has a buffer no other batch of this process is on its way.
        with self._device.alone(), self._buffers.alone() as buffer:
            self._device.start(self._execute, batch, buffer)

    def _read(self, until: float) -> bool:
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
            self._policy.discard(message)
        elif isinstance(message, OutOfMemory):
            self._policy.shrink(message.rows, message.length)
        elif isinstance(message, Edges):
            self._policy.set_edges(message.edges)
        elif isinstance(message, Corrected):
            self._policy.correct(message)
        elif isinstance(message, Died):
            self._recovery.died(message.reason)
        elif isinstance(message, Batch):
            self._recovery.undone(message)
        else:
            now = self._clock()
            for sequences in message.requests:
                if not sequences[0].request.abandoned:
                    self._policy.add(sequences, now)
        return True
