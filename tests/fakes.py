"""Fakes owned by the tests: models that can be held, broken and counted; requests without HTTP."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic

import numpy as np

from embedsvc.engine.admission import Admission
from embedsvc.engine.buckets import Limits, half_powers_of_two
from embedsvc.engine.cost import DEFAULT_COST, CostModel
from embedsvc.engine.device import Device
from embedsvc.engine.engine import Engine
from embedsvc.engine.policy import Policy
from embedsvc.engine.recovery import PATIENCE, Patience
from embedsvc.engine.sequence import NO_KEY, Key, Priority, Request, Sequence
from embedsvc.errors import DeviceOutOfMemory, ModelDied
from embedsvc.metrics import Metrics
from embedsvc.models import Model
from embedsvc.models.buffers import BufferPool, HostBuffer
from embedsvc.models.inprocess import InProcess

WAIT_S = 10.0


@dataclass
class SumModel(InProcess):
    """Vectors that tell a row's own ids: (sum, length, first, last)."""

    dim: int = 4
    max_length: int = 128
    pad_id: int = 0
    dtype: str = "hash"
    device: str = "cpu"
    batches: list[list[int]] = field(default_factory=list)

    def load(self) -> None:
        """Nothing to load."""

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Write the vectors and remember the row lengths."""
        self.batches.append(buffer.lengths[:rows].tolist())
        for row in range(rows):
            ids = buffer.grid(rows, length)[row, : buffer.lengths[row]]
            buffer.output[row] = (ids.sum(), len(ids), ids[0], ids[-1])

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class GateModel(SumModel):
    """A model that reports each batch on `entered` and waits for `permit` before it computes."""

    entered: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Report, wait, compute."""
        self.entered.put(rows)
        assert self.permits.acquire(timeout=WAIT_S)
        super().forward(buffer, rows, length)

    async def wait_entered(self) -> int:
        """Return the rows of the next batch once it is on the device."""
        return await asyncio.to_thread(self.entered.get, timeout=WAIT_S)

    def open(self, n: int = 1) -> None:
        """Let n batches pass."""
        self.permits.release(n)


@dataclass
class BrokenModel(SumModel):
    """Fails, or gives NaN, for rows whose first id says so."""

    RAISE: int = 666
    NAN: int = 667

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute, then break what asks for it."""
        super().forward(buffer, rows, length)
        first = buffer.grid(rows, length)[:, 0]
        if (first == self.RAISE).any():
            raise RuntimeError("broken on purpose")
        buffer.output[:rows][first == self.NAN] = np.nan


@dataclass
class SmallDevice(SumModel):
    """Holds only so many rows at once."""

    fits: int = 3
    calls: list[int] = field(default_factory=list)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Refuse what does not fit."""
        self.calls.append(rows)
        if rows > self.fits:
            raise DeviceOutOfMemory("no room")
        super().forward(buffer, rows, length)


@dataclass
class MortalModel(SumModel):
    """Dies of rows whose first id says so, and holds others, as `GateModel` does.

    Attributes:
        killed: whether its deaths look as if they came from outside.
        beside: at each death, how many other batches were on the device.
        loads: how often it was loaded.
    """

    KILL: int = 668
    HOLD: int = 669
    killed: bool = False
    beside: list[int] = field(default_factory=list)
    loads: int = 0
    dead: bool = False
    held: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _on_death: Callable[[str], None] = lambda reason: None

    def watch(self, limit_s: Callable[[int, int], float], on_death: Callable[[str], None]) -> None:
        """Remember whom to tell."""
        self._on_death = on_death

    def load(self) -> None:
        """Live again."""
        self.loads += 1
        self.dead = False

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute, hold or die."""
        with self._lock:
            self._running += 1
        try:
            self._forward(buffer, rows, length)
        finally:
            with self._lock:
                self._running -= 1

    def _forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        if self.dead:
            raise ModelDied("it was dead", in_flight=False)
        first = buffer.grid(rows, length)[:, 0]
        if (first == self.KILL).any():
            self.dead = True
            self.beside.append(self._running - 1)
            self._on_death("died")
            raise ModelDied("it died", in_flight=True, killed=self.killed)
        if (first == self.HOLD).any():
            self.held.put(None)
            assert self.permits.acquire(timeout=WAIT_S)
        super().forward(buffer, rows, length)


def make_policy(
    max_length: int = 128,
    max_batch_tokens: int = 512,
    max_batch_size: int = 32,
    cost: CostModel = DEFAULT_COST,
    edges: list[int] | None = None,
    max_batch_delay_s: float = 0.0,
    max_age_s: float = 5.0,
) -> Policy:
    """Return a policy with small limits."""
    limits = Limits(max_length, max_batch_tokens, max_batch_size, max_batch_delay_s, max_age_s)
    return Policy(edges or half_powers_of_two(max_length), cost, limits)


def make_request(
    lengths: list[int],
    *,
    settled: asyncio.Future[object] | None = None,
    deadline: float = inf,
    arrival: float = 0.0,
    priority: Priority = Priority.INTERACTIVE,
    first_id: int = 1,
    key: Key = NO_KEY,
) -> tuple[Request, list[Sequence]]:
    """Return a request with one row per length; ids count up from `first_id`."""
    request = Request(
        vectors=np.full((len(lengths), 4), -1, np.float32),
        deadline=deadline,
        arrival=arrival,
        priority=priority,
        settled=settled,  # type: ignore[arg-type]  # the policy never looks at it
        key=key,
    )
    rows = [
        Sequence(request, row, np.arange(first_id, first_id + length, dtype=np.int64))
        for row, length in enumerate(lengths)
    ]
    return request, rows


@dataclass
class EngineRig:
    """An engine on a fake model, with the accounting a service does around it."""

    engine: Engine
    model: Model
    metrics: Metrics

    def send(
        self,
        lengths: list[int],
        *,
        timeout_s: float = 60.0,
        priority: Priority = Priority.INTERACTIVE,
        first_id: int = 1,
        key: Key = NO_KEY,
    ) -> Request:
        """Admit and submit a request."""
        now = self.engine._clock()
        request, rows = make_request(
            lengths,
            settled=asyncio.get_running_loop().create_future(),
            deadline=now + timeout_s,
            arrival=now,
            priority=priority,
            first_id=first_id,
            key=key,
        )
        self.engine.admission.reserve(len(rows), sum(lengths), bulk=False, key=key)
        self.engine.submit(request, rows)
        return request

    def value(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 where it has none."""
        labels = {"model": "m", "version": "v1", **labels}
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def idle(self) -> bool:
        """Whether every counter is back at zero."""
        engine = self.engine
        return (
            engine.admission.sequences == engine.admission.tokens == 0
            and engine.queue_s == 0.0
            and engine.device.busy == 0
            and engine._buffers.n_free == engine._buffers.n_buffers
        )

    async def close(self) -> None:
        """Stop the engine and its device."""
        await self.engine.stop(drain_timeout_s=WAIT_S)
        self.engine.device.close()


def make_rig(
    model: Model | None = None,
    *,
    slots: int = 1,
    policy: Policy | None = None,
    clock: Callable[[], float] = monotonic,
    max_queue_sequences: int = 10_000,
    patience: Patience = PATIENCE,
    start: bool = True,
) -> EngineRig:
    """Make an engine and start it on the running loop."""
    model = model or SumModel()
    policy = policy or make_policy(model.max_length)
    limits, metrics = policy.limits, Metrics()
    capacity = max(limits.max_batch_tokens, limits.max_length)
    engine = Engine(
        "m",
        model,
        Device("cpu", slots),
        policy,
        BufferPool(partial(model.allocate, capacity, limits.max_batch_size), slots),
        Admission(max_queue_sequences, 10_000_000),
        metrics.version("m", "v1"),
        clock,
        patience,
    )
    if start:
        engine.start()
    return EngineRig(engine, model, metrics)
