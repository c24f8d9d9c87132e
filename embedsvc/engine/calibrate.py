"""Measurements at start: batch cost, token budget, slots and threads of a CPU.

Runs before requests are accepted. All slots run the same shape at once, because that is how a
loaded server runs. Knows the model only through `forward`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

import numpy as np

from embedsvc.engine.cost import CostModel, Observation, fit
from embedsvc.engine.device import Device
from embedsvc.errors import ConfigError, DeviceOutOfMemory
from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer

log = logging.getLogger(__name__)

# A budget is large enough when it reaches this share of the best measured rate.
GOOD_RATE = 0.97
# The smallest budget holds some rows of every measured length: a busy machine at the first start
# must not leave a budget that no later start corrects.
LENGTHS = (16, 64, 128)
SMALLEST_BUDGET, LARGEST_BUDGET = 512, 65_536
# Another division into slots and threads must be this much faster, in two rounds.
BETTER_DIVISION = 1.10
# Twice the budget must be this much faster, or larger ones are not tried.
GROWTH = 1.02
# Batches slower than this are measured once, the first call included.
SLOW_BATCH_S = 1.0


@dataclass(slots=True, frozen=True)
class Calibration:
    """What the measurement found.

    Attributes:
        cost: predicted seconds of a batch while all slots are busy.
        max_batch_tokens: smallest budget close to the best rate, in padded tokens.
    """

    cost: CostModel
    max_batch_tokens: int


def calibrate(
    model: Model,
    device: Device,
    max_rows: int,
    time_limit_s: float,
    clock: Callable[[], float] = perf_counter,
) -> Calibration:
    """Measure batches of growing size until the rate stops growing, memory or time is up.

    Args:
        model: loaded.
        device: idle.
        max_rows: row limit of a batch.
        time_limit_s: no new budget is started after it.
        clock: seconds.

    Raises:
        ConfigError: not even one row fits; names max_length.
    """
    began = clock()
    lengths = sorted({min(length, model.max_length) for length in LENGTHS})
    observations = [_observe(model, device, 1, length, clock) for length in lengths]
    rate_by_budget: dict[int, float] = {}
    best, budget = 0.0, SMALLEST_BUDGET
    while budget <= LARGEST_BUDGET and clock() - began < time_limit_s:
        shapes = [(min(budget // length, max_rows), length) for length in lengths]
        try:
            seen = [_observe(model, device, rows, length, clock) for rows, length in shapes]
        except DeviceOutOfMemory:
            break
        observations += seen
        rate = fmean(o.rows * o.length / o.seconds for o in seen)
        rate_by_budget[budget] = rate
        if rate < GROWTH * best:
            break
        best, budget = max(best, rate), budget * 2
    return Calibration(fit(observations), _smallest_good(rate_by_budget))


def _smallest_good(rate_by_budget: dict[int, float]) -> int:
    if not rate_by_budget:
        return SMALLEST_BUDGET
    enough = GOOD_RATE * max(rate_by_budget.values())
    return min(budget for budget, rate in rate_by_budget.items() if rate >= enough)


def full_buffer(model: Model, rows: int, length: int) -> HostBuffer:
    """Return a buffer of `rows` unpadded rows of `length` tokens."""
    buffer = model.allocate(rows * length, rows)
    buffer.fill([np.ones(length, np.int64)] * rows, [0] * rows, length)
    return buffer


def run_once(
    model: Model,
    buffer: HostBuffer,
    rows: int,
    length: int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Run a batch on this thread and return its seconds."""
    began = clock()
    model.forward(buffer, rows, length)
    return clock() - began


def slot_buffers(model: Model, device: Device, rows: int, length: int) -> list[HostBuffer]:
    """Return a full buffer for each slot."""
    return [full_buffer(model, rows, length) for _ in range(device.slots)]


def run_on_slots(
    model: Model,
    device: Device,
    buffers: Sequence[HostBuffer],
    rows: int,
    length: int,
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Run one shape on all slots at once and return the seconds of each.

    Raises:
        DeviceOutOfMemory: fewer rows may fit.
        ConfigError: not even one row fits; names max_length.
    """
    runs = [device.submit(run_once, model, b, rows, length, clock) for b in buffers]
    wait(runs)
    try:
        return [run.result() for run in runs]
    except DeviceOutOfMemory as error:
        if rows > 1:
            raise
        raise ConfigError(
            f"max_length: one text of {length} tokens on each of the {device.slots} slots of "
            f"{device.name} does not fit into its memory ({error}). Set max_length below {length}, "
            "or fewer slots in [[devices]]."
        ) from error


def _observe(
    model: Model, device: Device, rows: int, length: int, clock: Callable[[], float]
) -> Observation:
    """Time one shape on all slots at once; the first call of a shape is not counted."""
    buffers = slot_buffers(model, device, rows, length)
    seconds: list[float] = []
    for attempt in range(4):
        took = run_on_slots(model, device, buffers, rows, length, clock)
        slow = fmean(took) > SLOW_BATCH_S
        if attempt or slow:
            seconds += took
        if slow:
            break
    return Observation(rows, length, max(median(seconds), 1e-7))


def divisions(cores: int) -> list[tuple[int, int]]:
    """Return the (slots, threads per slot) worth trying, the default (one core a slot) first."""
    return [(cores >> k, 1 << k) for k in range(cores.bit_length())]


def best_division(
    cores: int, measure: Callable[[int, int, float], float], time_limit_s: float
) -> tuple[int, int]:
    """Return the fastest (slots, threads per slot) in two short rounds.

    The default stays unless another is a tenth faster in both rounds.

    Args:
        cores: usable cores.
        measure: returns tokens per second of (slots, threads per slot) within some seconds.
        time_limit_s: seconds for all measurements together.
    """
    candidates = divisions(cores)
    share_s = time_limit_s / (2 * len(candidates))
    rounds = [{c: measure(*c, share_s) for c in candidates} for _ in range(2)]
    default = candidates[0]
    better = [c for c in candidates if all(r[c] > BETTER_DIVISION * r[default] for r in rounds)]
    chosen = max(better, key=lambda c: sum(r[c] for r in rounds), default=default)
    rates = {f"{s}x{t}": round(fmean(r[s, t] for r in rounds)) for s, t in candidates}
    log.info("device divided slots=%d threads_per_slot=%d tokens_per_s=%s", *chosen, rates)
    return chosen


def batch_rate(model: Model, device: Device, seconds: float) -> float:
    """Return tokens per second over batches of a mid-sized shape on all slots."""
    length = min(64, model.max_length)
    rows = max(1, 512 // length)
    buffers = slot_buffers(model, device, rows, length)
    run_on_slots(model, device, buffers, rows, length)

    def repeat(buffer: HostBuffer) -> int:
        n = 0
        while n == 0 or perf_counter() - began < seconds:
            run_once(model, buffer, rows, length)
            n += 1
        return n

    began = perf_counter()
    runs = [device.submit(repeat, buffer) for buffer in buffers]
    batches = sum(run.result() for run in runs)
    return batches * rows * length / (perf_counter() - began)
