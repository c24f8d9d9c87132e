"""A device: slots are bounded, threads outlive what fails on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from embedsvc.engine.device import Device
from embedsvc.models.threads import batch_threads


def fail() -> None:
    raise RuntimeError("broken on purpose")


@pytest.fixture
def device() -> Iterator[Device]:
    """Two slots."""
    device = Device("cpu", slots=2, threads_per_slot=3)
    yield device
    device.close()


def test_as_many_slots_as_configured(device: Device) -> None:
    """A slot is had once; the next one waits for it to come back."""
    assert [device.acquire(0.0) for _ in range(3)] == [True, True, False]
    assert (device.busy, device.free) == (2, 0)

    device.release()

    assert device.acquire(0.0)


def test_a_device_is_at_rest_a_while_after_its_last_batch() -> None:
    """Before the first batch, too; never while another batch runs."""
    now = 0.0
    device = Device("cpu", slots=2, clock=lambda: now)
    seen = []
    for pause_s in (0.0, 0.001, 1.0):
        now += pause_s
        device.acquire(0.0)
        seen.append(device.rested)
        device.release()
    now += 1.0
    device.acquire(0.0)
    device.acquire(0.0)
    seen.append(device.rested)
    device.close()

    assert seen == [True, False, True, False]


def test_a_thread_outlives_what_fails_on_it(device: Device) -> None:
    """A failure is logged, and the thread takes the next piece of work."""
    for _ in range(4):
        device.start(fail)

    assert device.submit(lambda: 7).result(timeout=10) == 7


def test_a_failure_reaches_who_waits_for_the_result(device: Device) -> None:
    """A result that cannot be had is an error, not a wait for ever."""
    with pytest.raises(RuntimeError, match="on purpose"):
        device.submit(fail).result(timeout=10)


def test_batches_are_told_their_cpu_threads(device: Device) -> None:
    """Whoever runs a batch on a device thread can look up how many threads it may use."""
    assert device.submit(batch_threads).result(timeout=10) == 3


def test_slots_work_at_the_same_time(device: Device) -> None:
    """Each slot has a thread of its own."""
    both = threading.Barrier(2, timeout=10)

    runs = [device.submit(both.wait) for _ in range(2)]

    assert sorted(run.result(timeout=10) for run in runs) == [0, 1]


def test_an_idle_device_keeps_nothing_of_its_last_batch() -> None:
    """Its rows and its buffer are freed although no other batch comes."""

    class Batch:
        pass

    device = Device("cpu", slots=1)
    batch = Batch()
    freed = threading.Event()
    weakref.finalize(batch, freed.set)
    device.start(lambda batch: None, batch)
    del batch

    assert freed.wait(5)
    device.close()
