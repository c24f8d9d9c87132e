"""One batch on a device thread: fill, forward, copy rows out, and find whoever breaks it.

A batch that fails is split in half and tried again, down to single rows, so that only the request
that holds a guilty row gets an error. A row that is not finite is computed once more alone. With n
rows that is less than 2·n forwards, whatever fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from embedsvc.engine.sequence import Sequence
from embedsvc.errors import DeviceOutOfMemory, InferenceFailed, RequestError
from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer

log = logging.getLogger(__name__)

Failures = dict[Sequence, RequestError]


def run_batch(
    model: Model,
    sequences: list[Sequence],
    length: int,
    buffer: HostBuffer,
    on_out_of_memory: Callable[[int, int], None],
) -> Failures:
    """Compute the vectors of all rows whose requests still wait.

    Args:
        model: loaded.
        sequences: rows of the batch; vectors go to their requests.
        length: padded length in tokens.
        buffer: owned by the caller until this returns.
        on_out_of_memory: told rows and length of what did not fit.

    Returns:
        An error for each guilty row; other rows of its request may not have been computed.
    """
    failures: Failures = {}
    waiting = [sequences]
    while waiting:
        guilty = {row.request for row in failures}
        rows = [r for r in waiting.pop() if not r.request.abandoned and r.request not in guilty]
        if rows:
            waiting += _step(model, rows, length, buffer, failures, on_out_of_memory)
    return failures


def _step(
    model: Model,
    rows: list[Sequence],
    length: int,
    buffer: HostBuffer,
    failures: Failures,
    on_out_of_memory: Callable[[int, int], None],
) -> list[list[Sequence]]:
    """Run some rows once; note the guilty one, or return the groups to run next."""
    try:
        broken = _attempt(model, rows, length, buffer)
    except Exception as error:  # whatever fails must answer its request, and only that
        log.warning("forward failed rows=%d length=%d", len(rows), length, exc_info=error)
        if isinstance(error, DeviceOutOfMemory):
            on_out_of_memory(len(rows), length)
        if len(rows) == 1:
            failures[rows[0]] = _failed(rows[0].row, error)
            return []
        half = len(rows) // 2
        return [rows[half:], rows[:half]]
    if len(rows) == 1 and broken:
        failures[rows[0]] = _not_finite(rows[0].row)
        return []
    return [[row] for row in broken]


def _attempt(model: Model, rows: list[Sequence], length: int, buffer: HostBuffer) -> list[Sequence]:
    """Run some rows and copy the finite vectors out; return the rows of the others."""
    buffer.fill([r.input_ids for r in rows], [r.prompt_length for r in rows], length)
    model.forward(buffer, len(rows), length)
    output = buffer.output[: len(rows)]
    for row, vector in zip(rows, output, strict=True):
        row.request.vectors[row.row] = vector
    # A sum is finite only if every component is, save for overflow, which the second look settles.
    if np.isfinite(output.sum()):
        return []
    finite = np.isfinite(output).all(axis=1)
    return [rows[i] for i in np.flatnonzero(~finite)]


def _failed(row: int, error: Exception) -> InferenceFailed:
    if isinstance(error, DeviceOutOfMemory):
        what = "The device has not enough memory"
    else:
        what = f"The model failed ({type(error).__name__})"
    return InferenceFailed(
        f"{what} on input[{row}]. Leave this text out or shorten it; the server's log says why.",
        param="input",
    )


def _not_finite(row: int) -> InferenceFailed:
    return InferenceFailed(
        f"The model gave a vector that is not finite for input[{row}]. "
        "Use dtype float32, or leave this text out.",
        param="input",
    )
