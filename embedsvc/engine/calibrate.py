"""Measurements at start: batch cost, its held-out error, token budget, slots and threads of a CPU.

Runs before requests are accepted. All slots run the same shape at once, because that is how a
loaded server runs. Knows the model only through `forward`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np

from embedsvc.engine.cost import CostModel, Observation, fit
from embedsvc.engine.device import Device
from embedsvc.errors import ConfigError, DeviceOutOfMemory
from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer

log = logging.getLogger(__name__)

Shape = tuple[int, int]

# A budget is large enough when it reaches this share of the best measured rate.
GOOD_RATE = 0.97
# The smallest budget holds some rows of every measured length: a busy machine at the first start
# must not leave a budget that no later start corrects.
LENGTHS = (16, 48, 128, 256)
# Light traffic makes batches of few rows, which no budget measures.
FEW_ROWS = (1, 4)
# Shapes (rows, length) that the fit is judged by, between those it is made from.
HELD_OUT = ((1, 24), (2, 80), (3, 32), (2, 200), (6, 40), (12, 24))
HELD_OUT_SHARE = 0.25
# Shapes of lone batches on a device at rest, as light traffic makes them, and the rest before each.
COLD = ((1, 16), (1, 64))
COLD_REST_S = 0.02
# Calls of a shape that count, after the first.
ROUNDS = 3
SMALLEST_BUDGET, LARGEST_BUDGET = 512, 65_536
# Another division into slots and threads must be this much faster, in two rounds.
BETTER_DIVISION = 1.10
# Twice the budget must be this much faster, or larger ones are not tried.
GROWTH = 1.02
# Batches slower than this are measured once, the first call included.
SLOW_BATCH_S = 1.0


class Errors(NamedTuple):
    """Quantiles of |predicted / measured - 1|."""

    median: float
    p90: float


@dataclass(slots=True, frozen=True)
class Calibration:
    """What the measurement found.

    Attributes:
        cost: predicted seconds of a batch while all slots are busy.
        max_batch_tokens: smallest budget close to the best rate, in padded tokens.
        held_out_error: of shapes that were not fitted; None where the model is too short to have
            any.
    """

    cost: CostModel
    max_batch_tokens: int
    held_out_error: Errors | None


def calibrate(
    model: Model,
    device: Device,
    max_rows: int,
    time_limit_s: float,
    clock: Callable[[], float] = perf_counter,
    rest: Callable[[float], object] = sleep,
) -> Calibration:
    """Measure batches of growing size until the rate stops growing, memory or time is up.

    Args:
        model: loaded.
        device: idle.
        max_rows: row limit of a batch.
        time_limit_s: no new budget is started after it.
        clock: seconds.
        rest: lets so many seconds pass.

    Raises:
        ConfigError: not even one row fits; names max_length.
    """
    until = clock() + time_limit_s
    lengths = sorted({min(length, model.max_length) for length in LENGTHS})
    few = [(min(rows, max_rows), length) for rows in FEW_ROWS for length in lengths]
    observations = _observe(model, device, few, clock, until)
    rate_by_budget: dict[int, float] = {}
    for budget, seen in _growing(model, device, lengths, max_rows, clock, until):
        observations += seen
        rate_by_budget[budget] = fmean(o.rows * o.length / o.seconds for o in seen)
        if _stopped_growing(list(rate_by_budget.values())):
            break
    fitted = fit(observations, floor=model.device != "cpu")
    cost = replace(fitted, cold=_cold_s(model, device, clock, rest))
    held_out = [(min(r, max_rows), length) for r, length in HELD_OUT if length < model.max_length]
    judged = _observe(model, device, held_out, clock, clock() + HELD_OUT_SHARE * time_limit_s)
    return Calibration(cost, _smallest_good(rate_by_budget), _errors(cost, judged))


def _growing(
    model: Model,
    device: Device,
    lengths: list[int],
    max_rows: int,
    clock: Callable[[], float],
    until: float,
) -> Iterator[tuple[int, list[Observation]]]:
    """Yield budgets, each twice the one before, with their batches; up to what memory holds."""
    budget = SMALLEST_BUDGET
    while budget <= LARGEST_BUDGET and clock() < until:
        shapes = {(min(budget // length, max_rows), length) for length in lengths}
        seen = _observe(model, device, sorted(shapes), clock)
        if len(seen) < len(shapes):
            break
        yield budget, seen
        budget *= 2


def _stopped_growing(rates: list[float]) -> bool:
    return rates[-1] < GROWTH * max(rates[:-1], default=0.0)


def _cold_s(
    model: Model, device: Device, clock: Callable[[], float], rest: Callable[[float], object]
) -> float:
    """Return how many seconds more a lone batch takes on a device at rest than on a busy one."""
    longer = []
    for rows, length in COLD:
        if length > model.max_length:
            continue
        buffers = slot_buffers(model, device, rows, length)
        for _ in range(ROUNDS):
            busy = fmean(run_on_slots(model, device, buffers, rows, length, clock))
            if busy > SLOW_BATCH_S:
                break
            rest(COLD_REST_S)
            alone = device.submit(run_once, model, buffers[0], rows, length, clock).result()
            longer.append(alone - busy)
    return max(0.0, median(longer)) if longer else 0.0


def _errors(cost: CostModel, observations: list[Observation]) -> Errors | None:
    errors = [abs(cost(o.rows, o.length) / o.seconds - 1) for o in observations]
    return Errors(*(float(np.quantile(errors, q)) for q in (0.5, 0.9))) if errors else None


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
    model: Model,
    device: Device,
    shapes: Iterable[Shape],
    clock: Callable[[], float],
    until: float = inf,
) -> list[Observation]:
    """Time shapes on all slots at once; leave out those that do not fit into the device's memory.

    In turns, so that a machine that changes its speed does so for all of them. The first call of a
    shape is not counted unless it is so slow that it stays the only one.

    Args:
        model: loaded.
        device: idle.
        shapes: rows and length of each.
        clock: seconds.
        until: no shape is begun after it but the first.

    Raises:
        ConfigError: not even one row fits; names max_length.
    """
    buffers: dict[Shape, list[HostBuffer]] = {}
    seconds: dict[Shape, list[float]] = {}
    for shape in dict.fromkeys(shapes):
        if seconds and clock() >= until:
            break
        buffers[shape] = slot_buffers(model, device, *shape)
        with suppress(DeviceOutOfMemory):
            first = run_on_slots(model, device, buffers[shape], *shape, clock)
            seconds[shape] = first if fmean(first) > SLOW_BATCH_S else []
    for _ in range(ROUNDS):
        for shape, counted in seconds.items():
            if not counted or fmean(counted) <= SLOW_BATCH_S:
                counted += run_on_slots(model, device, buffers[shape], *shape, clock)
    return [Observation(*shape, max(median(counted), 1e-7)) for shape, counted in seconds.items()]


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
