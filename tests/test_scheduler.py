"""The scheduler thread's own work: what it tells a batch that it launches."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

import pytest

from embedsvc.engine.cost import CostModel
from embedsvc.engine.device import Device
from embedsvc.engine.messages import Arrivals, Message
from embedsvc.engine.recovery import PATIENCE, Recovery
from embedsvc.engine.scheduler import Scheduler
from embedsvc.engine.sequence import Batch
from embedsvc.metrics import Metrics
from embedsvc.models.buffers import BufferPool, HostBuffer
from tests.fakes import SumModel, make_policy, make_request


def test_a_device_at_rest_is_predicted_to_take_longer() -> None:
    """So does the first of two batches, but not the one right behind it."""
    model, device = SumModel(), Device("cpu", 1, clock=lambda: 0.0)
    policy = make_policy(max_batch_size=1, cost=CostModel(1e-3, 0, 0, 0, cold=5e-3))
    buffers = BufferPool(partial(model.allocate, 512, 32), 1)
    inbox: SimpleQueue[Message] = SimpleQueue()
    predicted: list[float] = []

    def execute(batch: Batch, buffer: HostBuffer) -> None:
        predicted.append(batch.predicted_s)
        if len(predicted) == 2:
            inbox.put(None)
        buffers.put(buffer)
        device.release()

    inbox.put(Arrivals([make_request([8])[1], make_request([8])[1]]))
    recovery = Recovery("m", model, PATIENCE, Metrics().version("m", "v1"), lambda: 0.0)
    Scheduler(inbox, policy, recovery, device, buffers, execute, lambda: 0.0).run()
    device.close()

    assert predicted == pytest.approx([6e-3, 1e-3])
