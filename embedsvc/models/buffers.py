"""Host buffers: the arrays a batch travels in, pooled so that none is allocated per batch.

Knows nothing of batches, queues or devices. A buffer belongs to whoever took it from the pool until
it is put back; the pool is safe to use from any thread.
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Memory = bytearray | mmap.mmap
Allocator = Callable[[int], Memory]

# Arrays begin at multiples of this: no two of them share a cache line.
_ALIGNMENT_BYTES = 64


class HostBuffer:
    """Flat arrays for one batch of any bucket, reshaped to `(rows, length)` without a copy.

    All of them lie in one block of memory, each begun at a multiple of 64 bytes:

        ids | lengths | prompt_lengths | output

    Args:
        capacity_tokens: ids it holds.
        max_rows: rows it holds.
        dim: components of a vector.
        pad_id: token id that fills the tail of a row.
        allocate: returns zeroed memory of some bytes.

    Attributes:
        ids: `(capacity_tokens,) int64`, rows padded on the right.
        lengths: `(max_rows,) int64`, tokens of each row, padding excluded.
        prompt_lengths: `(max_rows,) int64`, leading tokens that pooling leaves out.
        output: `(max_rows, dim) float32`, written by the model.
    """

    __slots__ = ("__weakref__", "ids", "lengths", "output", "pad_id", "prompt_lengths")

    def __init__(
        self,
        capacity_tokens: int,
        max_rows: int,
        dim: int,
        pad_id: int,
        allocate: Allocator = bytearray,
    ) -> None:
        lengths = _aligned(8 * capacity_tokens)
        prompt_lengths = lengths + _aligned(8 * max_rows)
        output = prompt_lengths + _aligned(8 * max_rows)
        memory = allocate(output + 4 * max_rows * dim)
        self.ids: Ids = np.ndarray((capacity_tokens,), np.int64, memory)
        self.lengths: Ids = np.ndarray((max_rows,), np.int64, memory, lengths)
        self.prompt_lengths: Ids = np.ndarray((max_rows,), np.int64, memory, prompt_lengths)
        self.output: Vectors = np.ndarray((max_rows, dim), np.float32, memory, output)
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


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class SharedBuffer(HostBuffer):
    """A host buffer that other processes can map: give them `fd` and the same sizes.

    Args:
        capacity_tokens: as for `HostBuffer`.
        max_rows: as for `HostBuffer`.
        dim: as for `HostBuffer`.
        pad_id: as for `HostBuffer`.
        fd: memory of another process's buffer, to map instead of new memory.

    Attributes:
        fd: the memory's descriptor, closed when the buffer is freed.
        number: names this buffer in its process.
    """

    __slots__ = ("fd", "number")
    _numbers = itertools.count()

    def __init__(
        self, capacity_tokens: int, max_rows: int, dim: int, pad_id: int, fd: int | None = None
    ) -> None:
        self.fd = os.memfd_create("embedsvc-buffer") if fd is None else fd
        self.number = next(self._numbers)
        weakref.finalize(self, os.close, self.fd)
        super().__init__(capacity_tokens, max_rows, dim, pad_id, self._map)

    def _map(self, n_bytes: int) -> mmap.mmap:
        if os.fstat(self.fd).st_size < n_bytes:
            os.ftruncate(self.fd, n_bytes)
        return mmap.mmap(self.fd, n_bytes)


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

    @contextmanager
    def alone(self) -> Iterator[HostBuffer]:
        """Wait until nobody has a buffer, hand out one, and end when that was put back."""
        taken = [self._free.get() for _ in range(self.n_buffers)]
        try:
            yield taken.pop()
            taken.append(self._free.get())
        finally:
            for buffer in taken:
                self._free.put(buffer)

    def put(self, buffer: HostBuffer) -> None:
        """Give a buffer back once nothing reads or writes it any more."""
        self._free.put(buffer)

    @property
    def n_free(self) -> int:
        """Number of buffers not in use."""
        return self._free.qsize()
