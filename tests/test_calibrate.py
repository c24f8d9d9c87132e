"""Measurements at start, on a model that moves a clock instead of taking time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from embedsvc.engine.calibrate import best_division, calibrate, divisions
from embedsvc.engine.cost import CostModel
from embedsvc.engine.device import Device
from embedsvc.models.buffers import HostBuffer
from tests.fakes import SumModel

TRUE = CostModel(5e-3, 1e-4, 1e-4, 1e-7)


@dataclass
class ClockModel(SumModel):
    """Each batch advances `now` by its true cost; small caches spill above a number of tokens."""

    true: CostModel = TRUE
    spill_tokens: int = 10**9
    now: float = 0.0

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Take virtual time."""
        slower = 1.3 if rows * length > self.spill_tokens else 1.0
        self.now += slower * self.true(rows, length)

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now


@pytest.fixture
def device() -> Iterator[Device]:
    """One slot, so that virtual time has one owner."""
    device = Device("cpu", slots=1)
    yield device
    device.close()


def test_the_true_cost_is_found(device: Device) -> None:
    """The fit predicts shapes it has not seen."""
    model = ClockModel()

    cost = calibrate(model, device, 256, time_limit_s=60, clock=model.clock).cost

    for rows, length in [(3, 24), (50, 8), (7, 100)]:
        assert cost(rows, length) == pytest.approx(model.true(rows, length), rel=0.05)


def test_the_budget_is_the_smallest_close_to_the_best(device: Device) -> None:
    """Larger batches that are slower per token are not taken."""
    model = ClockModel(true=CostModel(5e-3, 0, 1e-4, 0), spill_tokens=512)

    found = calibrate(model, device, 256, time_limit_s=60, clock=model.clock)

    assert found.max_batch_tokens == 512


def test_the_measurement_ends_in_time(device: Device) -> None:
    """A slow model costs at most one budget over the limit."""
    model = ClockModel(true=CostModel(1.0, 0, 1e-2, 0))

    calibrate(model, device, 256, time_limit_s=5, clock=model.clock)

    assert model.now < 20


def test_divisions_start_with_a_core_a_slot() -> None:
    """Every division uses all cores that a power of two allows."""
    assert divisions(8) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert divisions(1) == [(1, 1)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({(2, 1): [100, 100], (1, 2): [105, 105]}, (2, 1)),
        ({(2, 1): [100, 100], (1, 2): [150, 105]}, (2, 1)),
        ({(2, 1): [100, 100], (1, 2): [150, 120]}, (1, 2)),
    ],
)
def test_the_default_stays_unless_clearly_beaten_twice(
    rates: dict[tuple[int, int], list[float]], expected: tuple[int, int]
) -> None:
    """Another division must be a tenth faster in both rounds."""

    def measure(slots: int, threads: int, seconds: float) -> float:
        return rates[slots, threads].pop(0)

    assert best_division(2, measure, 2.0) == expected
