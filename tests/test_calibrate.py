"""Measurements at start, on a model that moves a clock instead of taking time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from embedsvc.engine.calibrate import best_division, calibrate, divisions
from embedsvc.engine.cost import CostModel
from embedsvc.engine.device import Device
from embedsvc.engine.measured import calibration
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.cache import Cache
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
        super().forward(buffer, rows, length)
        slower = 1.3 if rows * length > self.spill_tokens else 1.0
        self.now += slower * self.true(rows, length)

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now


@dataclass
class FirstSlowModel(ClockModel):
    """The first batch of a shape takes half a second longer."""

    seen: set[tuple[int, int]] = field(default_factory=set)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Take virtual time."""
        super().forward(buffer, rows, length)
        self.now += 0.0 if (rows, length) in self.seen else 0.5
        self.seen.add((rows, length))


@dataclass
class SlowSpellModel(ClockModel):
    """Some batches, one after the other, take ten times as long."""

    SPELL = range(20, 24)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Take virtual time."""
        slow = len(self.batches) in self.SPELL
        began = self.now
        super().forward(buffer, rows, length)
        self.now += 9 * (self.now - began) if slow else 0.0


@dataclass
class SleepyModel(ClockModel):
    """A batch after a rest takes two milliseconds longer."""

    rested: bool = False

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Take virtual time."""
        super().forward(buffer, rows, length)
        self.now += 2e-3 if self.rested else 0.0
        self.rested = False

    def rest(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.now += seconds
        self.rested = True


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


def test_the_fit_is_judged_by_shapes_it_has_not_seen(device: Device) -> None:
    """A device as the model says has no held-out error; one that is not has some."""
    like, unlike = ClockModel(), ClockModel(spill_tokens=100)

    right, wrong = (
        calibrate(model, device, 256, time_limit_s=60, clock=model.clock)
        for model in (like, unlike)
    )

    assert right.held_out_error == pytest.approx((0, 0), abs=1e-6)
    assert wrong.held_out_error is not None
    assert 0.01 < wrong.held_out_error.median < wrong.held_out_error.p90


def test_a_model_of_short_texts_has_nothing_to_be_judged_by(device: Device) -> None:
    """Every shape that is held out must be one the model takes."""
    model = ClockModel(max_length=16)

    found = calibrate(model, device, 256, time_limit_s=60, clock=model.clock)

    assert found.held_out_error is None


def test_what_a_rest_costs_is_a_term_of_its_own(device: Device) -> None:
    """It is measured beside the others and does not change them."""
    model, awake = SleepyModel(), ClockModel()

    found = calibrate(model, device, 256, 60, clock=model.clock, rest=model.rest).cost
    without = calibrate(awake, device, 256, 60, clock=awake.clock, rest=lambda _: None).cost

    assert found.cold == pytest.approx(2e-3)
    assert without.cold == pytest.approx(0.0, abs=1e-9)
    assert found(3, 24) == pytest.approx(without(3, 24))


def test_first_calls_do_not_count(device: Device) -> None:
    """What a shape's first batch takes longer, to compile its kernels, is not its cost."""
    model = FirstSlowModel()

    cost = calibrate(model, device, 256, time_limit_s=600, clock=model.clock).cost

    assert cost(3, 24) == pytest.approx(TRUE(3, 24), rel=0.05)


def test_a_machine_that_changes_its_speed_does_so_for_all_shapes(device: Device) -> None:
    """Shapes are timed in turns, so that one slow spell makes no shape look dear."""
    model = SlowSpellModel()

    cost = calibrate(model, device, 256, time_limit_s=60, clock=model.clock).cost

    assert cost(3, 24) == pytest.approx(TRUE(3, 24), rel=1e-6)


def test_the_measurement_is_kept(device: Device, tmp_path: Path) -> None:
    """A second start with the same key measures nothing and finds the same."""
    model = SumModel()
    first = calibration(model, device, 16, Cache(tmp_path), {"weights": "a"})
    n_batches = len(model.batches)

    second = calibration(model, device, 16, Cache(tmp_path), {"weights": "a"})

    assert (second, len(model.batches)) == (first, n_batches)
    calibration(model, device, 16, Cache(tmp_path), {"weights": "b"})
    assert len(model.batches) > n_batches


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
