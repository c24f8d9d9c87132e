"""Warm-up: the shapes that traffic will have, before there is any.

Runs on the thread that starts a model. Finds the largest batches that the device has room for.
"""

from __future__ import annotations

import logging

from embedsvc.engine.buckets import WIDTH_STEP, padded_width
from embedsvc.engine.calibrate import run_on_slots, slot_buffers
from embedsvc.engine.device import Device
from embedsvc.engine.policy import Policy
from embedsvc.errors import DeviceOutOfMemory
from embedsvc.models import Model

log = logging.getLogger(__name__)

# On a CPU texts up to this length are warmed up whatever the token budget.
WARM_UP_TOKENS = 256


def warm_up(model: Model, device: Device, policy: Policy) -> None:
    """Run the shapes that traffic will have on every slot, so that no request pays for the first.

    Each bucket's fullest batch, and batches of every size up to it: libraries keep kernels by the
    number of tokens, and memory is steady once they are there. A batch that does not fit is halved
    until it does, and so is what may go into its bucket and all wider ones; full batches grow it
    again, one row at a time, to what really fits. A CPU's memory mostly ends without an error that
    could be caught, and its longest texts take long, so only other devices run all of them. Where
    other workers have warmed up the same model, nothing is run: they serve by now.

    Args:
        model: loaded.
        device: idle.
        policy: without rows; its buckets shrink.

    Raises:
        ConfigError: not even one row fits; names max_length.
    """
    if model.warm:
        return
    limits = policy.limits
    longest = limits.max_length
    if model.device == "cpu":
        longest = min(longest, max(WARM_UP_TOKENS, limits.max_batch_tokens))
    for edge in policy.buckets.edges:
        width = padded_width(edge, limits.max_length)
        if width <= longest:
            _run(model, device, policy, limits.rows(width), width)
    for n_tokens in _sizes(limits.max_batch_tokens):
        _run(model, device, policy, n_tokens // WIDTH_STEP, min(WIDTH_STEP, limits.max_length))


def _run(model: Model, device: Device, policy: Policy, rows: int, length: int) -> None:
    """Run a batch of at most `rows` rows, as many as fit."""
    while True:
        buckets = policy.buckets
        rows = min(rows, buckets.rows[buckets.index(length)])
        try:
            run_on_slots(model, device, slot_buffers(model, device, rows, length), rows, length)
        except DeviceOutOfMemory:
            log.warning("batch does not fit device=%s rows=%d length=%d", device.name, rows, length)
            policy.shrink(rows, length)
        else:
            return


def _sizes(most: int) -> list[int]:
    """Return numbers of tokens, eight an octave, from 8 to `most`."""
    steps = (round(WIDTH_STEP * 2 ** (k / 8)) for k in range(8 * 8))
    return sorted({n for step in steps if (n := step // WIDTH_STEP * WIDTH_STEP) <= most})
