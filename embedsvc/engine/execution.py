"""One batch on a device thread: fill, forward, copy rows out, and find whoever breaks it.

A batch that fails is split in half and tried again, down to single rows, so that only the request
that holds a guilty row gets an error. A row that is not finite is computed once more alone. With n
rows that is less than 2·n forwards, whatever fails.

Source: halves as in F. K. Hwang, "A method for detecting all defective members in a population by
group testing", Journal of the American Statistical Association 67, 1972.

A batch that ends the model's process is handed back: tried once more as it is in the next process,
and after a second death row by row while nothing else runs there, so that nobody is blamed for a
neighbour. A row that ends the process alone is guilty, and in quarantine; where the process was
killed from outside, only when that happens twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from embedsvc.engine.quarantine import Quarantine
from embedsvc.engine.sequence import Batch, Sequence
from embedsvc.errors import DeviceOutOfMemory, InferenceFailed, ModelDied, RequestError
from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer

log = logging.getLogger(__name__)

# After so many deaths a row that was alone is guilty, also where the process was killed.
MOST_DEATHS = 4

Failures = dict[Sequence, RequestError]
Group = list[Sequence]


class Outcome(NamedTuple):
    """What came of a batch.

    Attributes:
        failures: an error for each guilty row; other rows of its request may not have been
            computed.
        undone: rows to be tried again once the model is loaded again.
    """

    failures: Failures
    undone: list[Batch]


def run_batch(
    model: Model,
    batch: Batch,
    buffer: HostBuffer,
    quarantine: Quarantine,
    on_out_of_memory: Callable[[int, int], None],
) -> Outcome:
    """Compute the vectors of all rows whose requests still wait.

    Rows that were in a death are computed even where nobody waits any more: one of them may be
    guilty, and would end the next process when it is sent again.

    Args:
        model: loaded.
        batch: its vectors go to their requests.
        buffer: owned by the caller until this returns.
        quarantine: of this model.
        on_out_of_memory: told rows and length of what did not fit.
    """
    failures: Failures = {}
    waiting = [[row] for row in reversed(batch.sequences)] if batch.alone else [batch.sequences]
    while waiting:
        rows = _wanted(waiting.pop(), batch, failures)
        if refused := quarantine.refusal(rows):
            failures[refused[0]] = refused[1]
            waiting.append(rows)
        elif rows:
            try:
                waiting += _step(model, rows, batch.length, buffer, failures, on_out_of_memory)
            except ModelDied as death:
                guilty = not death.killed or batch.deaths + 1 >= MOST_DEATHS
                if batch.alone and death.in_flight and guilty:
                    quarantine.add(rows[0])
                    failures[rows[0]] = _ended_process(rows[0].row)
                undone = _undone(batch, rows, waiting, failures, in_flight=death.in_flight)
                return Outcome(failures, undone)
    return Outcome(failures, [])


def _wanted(rows: Group, batch: Batch, failures: Failures) -> Group:
    """Return the rows that are worth computing."""
    guilty = {row.request for row in failures}
    return [
        row
        for row in rows
        if row.request not in guilty and (batch.deaths or not row.request.abandoned)
    ]


def _undone(
    batch: Batch, rows: Group, waiting: list[Group], failures: Failures, *, in_flight: bool
) -> list[Batch]:
    """Return what is to be tried again after a death: the rows it may be due to, and the others."""
    others = [row for group in reversed(waiting) for row in group]
    tries = ((rows, batch.deaths + in_flight), (others, batch.deaths))
    wanted = [(_wanted(group, batch, failures), deaths) for group, deaths in tries]
    return [Batch(group, batch.length, 0.0, deaths) for group, deaths in wanted if group]


def _step(
    model: Model,
    rows: Group,
    length: int,
    buffer: HostBuffer,
    failures: Failures,
    on_out_of_memory: Callable[[int, int], None],
) -> list[Group]:
    """Run some rows once; note the guilty one, or return the groups to run next.

    Raises:
        ModelDied: the model must be loaded again before anything else is run.
    """
    try:
        broken = _attempt(model, rows, length, buffer)
    except ModelDied:
        raise
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


def _attempt(model: Model, rows: Group, length: int, buffer: HostBuffer) -> Group:
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


def _ended_process(row: int) -> InferenceFailed:
    return InferenceFailed(
        f"The model's process ended on input[{row}], each time it was tried. Leave this text out; "
        "the server's log says why.",
        param="input",
    )
