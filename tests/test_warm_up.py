"""Warm-up on a device with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from embedsvc.engine.calibrate import SMALLEST_BUDGET, calibrate
from embedsvc.engine.device import Device
from embedsvc.engine.warm_up import warm_up
from embedsvc.errors import ConfigError, DeviceOutOfMemory
from embedsvc.models.buffers import HostBuffer
from tests.fakes import SumModel, make_policy


@dataclass
class FewTokens(SumModel):
    """A device that holds so many padded tokens at once."""

    fits: int = 10**9
    device: str = "cuda"
    warm: bool = False

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Refuse what does not fit."""
        if rows * length > self.fits:
            raise DeviceOutOfMemory("tried to allocate 2 GiB")
        super().forward(buffer, rows, length)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device("cuda", slots=2)
    yield device
    device.close()


def test_a_batch_that_does_not_fit_is_halved_until_it_does(device: Device) -> None:
    """The server starts; each bucket is left with what ran, and no more than half of that more."""
    model = FewTokens(fits=200)
    policy = make_policy(edges=[8, 32, 64, 128], max_batch_tokens=1024, max_batch_size=256)

    warm_up(model, device, policy)

    # In turn 128 x 8, 64, 32, 16; 16 x 32, 8, 4; 4 x 64, 2; 2 x 128, 1.
    assert policy.buckets.rows == [16, 4, 2, 1]
    assert policy.buckets.memory_share == 1 / 8


def test_where_all_fits_nothing_shrinks(device: Device) -> None:
    """Each bucket's full batch runs on every slot, and the longest text alone."""
    model = FewTokens()
    policy = make_policy(edges=[8, 32, 128], max_batch_tokens=64)

    warm_up(model, device, policy)

    assert policy.buckets.memory_share == 1
    for batch in ([8] * 8, [32] * 2, [128]):
        assert model.batches.count(batch) == device.slots + (batch == [8] * 8) * device.slots


def test_a_model_that_others_have_warmed_up_is_left_alone(device: Device) -> None:
    """They serve by now."""
    model = FewTokens(warm=True)

    warm_up(model, device, make_policy(edges=[8, 128]))

    assert model.batches == []


def test_a_text_that_does_not_fit_alone_stops_the_start(device: Device) -> None:
    """The message names the setting and a value to stay under."""
    with pytest.raises(ConfigError, match=r"max_length: one text of 128 tokens .*below 128"):
        warm_up(FewTokens(fits=127), device, make_policy(edges=[8, 128]))


def test_the_longest_text_of_a_processor_is_not_tried(device: Device) -> None:
    """It would take long there, and too little memory ends the process without an error."""
    model = FewTokens(fits=300, max_length=512, device="cpu")

    warm_up(model, device, make_policy(512, max_batch_tokens=256, edges=[8, 256, 512]))

    assert max(max(batch) for batch in model.batches) == 256


def test_the_measurement_stops_where_memory_ends(device: Device) -> None:
    """Budgets that fit are compared; the others are left to the halving of warm-up."""
    assert calibrate(FewTokens(fits=1024), device, 256, 60).max_batch_tokens <= 1024
    assert calibrate(FewTokens(fits=200), device, 256, 60).max_batch_tokens == SMALLEST_BUDGET


def test_a_measurement_of_a_text_that_does_not_fit_stops_the_start(device: Device) -> None:
    """Found while single rows are timed."""
    with pytest.raises(ConfigError, match="max_length: one text of 48 tokens"):
        calibrate(FewTokens(fits=20), device, 256, 60)
