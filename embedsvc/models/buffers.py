"""Host buffers: the arrays a batch travels in, pooled so that none is allocated per batch.

Knows nothing of batches, queues or devices. A buffer belongs to whoever took it from the pool until
it is put back; the pool is safe to use from any thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Allocator = Callable[[tuple[int, ...], "npt.DTypeLike"], npt.NDArray[np.generic]]


class HostBuffer:
    """Flat arrays for one batch of any bucket, reshaped to `(rows, length)` without a copy.

    Attributes:
        ids: `(capacity_tokens,) int64`, rows padded on the right.
        lengths: `(max_rows,) int64`, tokens of each row, padding excluded.
        prompt_lengths: `(max_rows,) int64`, leading tokens that pooling leaves out.
        output: `(max_rows, dim) float32`, written by the model.
    """

    __slots__ = ("ids", "lengths", "output", "pad_id", "prompt_lengths")

    def __init__(
        self,
        capacity_tokens: int,
        max_rows: int,
        dim: int,
        pad_id: int,
        allocate: Allocator = np.zeros,
    ) -> None:
        self.ids: Ids = allocate((capacity_tokens,), np.int64)  # type: ignore[assignment]  # dtype is given
        self.lengths: Ids = allocate((max_rows,), np.int64)  # type: ignore[assignment]
        self.prompt_lengths: Ids = allocate((max_rows,), np.int64)  # type: ignore[assignment]
        self.output: Vectors = allocate((max_rows, dim), np.float32)  # type: ignore[assignment]
        self.pad_id = pad_id

    def grid(self, rows: int, length: int) -> Ids:
        """Return the ids as a `(rows, length) int64` view."""
        return self.ids[: rows * length].reshape(rows, length)

    def fill(self, sequences: Sequence[Ids], prompt_lengths: Sequence[int], length: int) -> None:
        """Write one row per sequence, padded on the right to `length` with the pad id.

        Args:
            sequences: token ids, none longer than `length`.
            prompt_lengths: leading tokens of each row that pooling leaves out.
            length: padded length in tokens.
        """
        rows = len(sequences)
        grid = self.grid(rows, length)
        for row, ids in enumerate(sequences):
            n = len(ids)
            grid[row, :n] = ids
            grid[row, n:] = self.pad_id
            self.lengths[row] = n
        self.prompt_lengths[:rows] = prompt_lengths


class BufferPool:
    """Hands out `HostBuffer`s; a taken buffer comes back by `put`."""

    def __init__(self, make: Callable[[], HostBuffer], n_buffers: int) -> None:
        self.n_buffers = n_buffers
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        for _ in range(n_buffers):
            self._free.put(make())

    def take(self, timeout_s: float = 60.0) -> HostBuffer:
        """Return a free buffer, waiting for one at most `timeout_s` seconds.

        Raises:
            queue.Empty: no buffer came back in time.
        """
        return self._free.get(timeout=timeout_s)

    def put(self, buffer: HostBuffer) -> None:
        """Give a buffer back once nothing reads or writes it any more."""
        self._free.put(buffer)

    @property
    def n_free(self) -> int:
        """Number of buffers not in use."""
        return self._free.qsize()
