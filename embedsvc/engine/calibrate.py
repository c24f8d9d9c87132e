"""Measurements at start: batch cost, token budget, slots and threads of a CPU.

Runs before requests are accepted. All slots run the same shape at once, because that is how a
loaded server runs. Knows the model only through `forward`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from embedsvc.engine.cost import CostModel, Observation, fit
from embedsvc.engine.device import Device
from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer

log = logging.getLogger(__name__)

# A budget is large enough when it reaches this share of the best measured rate.
GOOD_RATE = 0.97
# The smallest budget holds a row of every measured length.
LENGTHS = (16, 64, 128)
SMALLEST_BUDGET, LARGEST_BUDGET = 128, 65_536
# Another division into slots and threads must be this much faster, in two rounds.
BETTER_DIVISION = 1.10


@dataclass(slots=True, frozen=True)
class Calibration:
    """What the measurement found.

    Attributes:
        cost: predicted seconds of a batch while all slots are busy.
        max_batch_tokens: smallest budget close to the best rate, in padded tokens.
    """

    cost: CostModel
    max_batch_tokens: int


def calibrate(model: Model, device: Device, max_rows: int, time_limit_s: float) -> Calibration:
    """Measure batches of growing size until the rate stops growing or the time is up.

    Args:
        model: loaded.
        device: idle.
        max_rows: row limit of a batch.
        time_limit_s: no new shape is started after it.
    """
    began = perf_counter()
    lengths = sorted({min(length, model.max_length) for length in LENGTHS})
    observations = [_observe(model, device, 1, length) for length in lengths]
    best_rate, budget, rate_by_budget = 0.0, SMALLEST_BUDGET, {}
    while budget <= LARGEST_BUDGET and perf_counter() - began < time_limit_s:
        rates = []
        for length in lengths:
            rows = min(budget // length, max_rows)
            seen = _observe(model, device, rows, length)
            observations.append(seen)
            rates.append(rows * length / seen.seconds)
        rate_by_budget[budget] = rate = float(np.mean(rates))
        if rate < 1.02 * best_rate:
            break
        best_rate, budget = max(best_rate, rate), budget * 2
    smallest = _smallest_good(rate_by_budget)
    return Calibration(fit(observations), smallest)


def _smallest_good(rate_by_budget: dict[int, float]) -> int:
    if not rate_by_budget:
        return SMALLEST_BUDGET
    enough = GOOD_RATE * max(rate_by_budget.values())
    return min(budget for budget, rate in rate_by_budget.items() if rate >= enough)


def full_buffer(model: Model, rows: int, length: int) -> HostBuffer:
    """Return a buffer of `rows` unpadded rows of `length` tokens."""
    buffer = HostBuffer(rows * length, rows, model.dim, model.pad_id)
    buffer.fill([np.ones(length, np.int64)] * rows, [0] * rows, length)
    return buffer


def run_once(model: Model, buffer: HostBuffer, rows: int, length: int) -> float:
    """Run a batch on this thread and return its seconds."""
    began = perf_counter()
    model.forward(buffer, rows, length)
    return perf_counter() - began


def _observe(model: Model, device: Device, rows: int, length: int) -> Observation:
    """Time one shape on all slots at once; the first call of a shape is not counted."""
    buffers = [full_buffer(model, rows, length) for _ in range(device.slots)]
    seconds: list[float] = []
    for attempt in range(4):
        runs = [device.submit(run_once, model, buffer, rows, length) for buffer in buffers]
        took = [run.result() for run in runs]
        if attempt:
            seconds += took
        if sum(took) > len(took):  # slow models are measured once
            seconds += took
            break
    return Observation(rows, length, max(median(seconds), 1e-7))


def divide(cores: int) -> Iterator[tuple[int, int]]:
    """Yield (slots, threads per slot) worth trying, the default (one core a slot) first."""
    slots = cores
    while slots >= 1:
        yield slots, cores // slots
        slots //= 2


def best_division(
    cores: int, open_device: Callable[[int, int], Device], model: Model, time_limit_s: float
) -> tuple[int, int]:
    """Return the fastest (slots, threads per slot) by two short rounds of real batches.

    The default stays unless another is a tenth faster in both rounds.
    """
    candidates = list(divide(cores))
    default, share_s = candidates[0], time_limit_s / (2 * len(candidates))
    wins: dict[tuple[int, int], int] = dict.fromkeys(candidates, 0)
    rates: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for candidate in candidates:
            device = open_device(*candidate)
            rates[candidate] = _rate(model, device, share_s)
            device.close()
        for candidate in candidates[1:]:
            wins[candidate] += rates[candidate] > BETTER_DIVISION * rates[default]
    won = [candidate for candidate in candidates if wins[candidate] == 2]
    chosen = max(won, key=lambda c: rates[c], default=default)
    log.info(
        "device divided slots=%d threads_per_slot=%d rates=%s",
        *chosen,
        {f"{s}x{t}": round(rate) for (s, t), rate in rates.items()},
    )
    return chosen


def _rate(model: Model, device: Device, seconds: float) -> float:
    """Return tokens per second over batches of a mid-sized shape."""
    length = min(64, model.max_length)
    rows = max(1, 512 // length)

    def run(until: float) -> int:
        buffer = full_buffer(model, rows, length)
        run_once(model, buffer, rows, length)
        n = 0
        while n == 0 or perf_counter() < until:
            run_once(model, buffer, rows, length)
            n += 1
        return n

    began = perf_counter()
    runs = [device.submit(run, began + seconds) for _ in range(device.slots)]
    batches = sum(r.result() for r in runs)
    return batches * rows * length / (perf_counter() - began)
