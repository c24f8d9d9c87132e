"""`HashModel`: deterministic vectors without weights, for tests, demos and pipeline benchmarks.

A row's vector is a function of its own token ids and of nothing else: not of the padding, the
neighbours or the bucket. So one comparison, bit for bit, shows a pipeline's mix-up of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from embedsvc.models.buffers import HostBuffer, Vectors
from embedsvc.models.inprocess import InProcess

Words = npt.NDArray[np.uint64]

# Odd multiplier of the row hash and the constants of splitmix64.
# Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_MULTIPLIER = 0x5851F42D4C957F2D
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


class HashModel(InProcess):
    """Unit vectors drawn from a hash of the row's ids.

    Args:
        dim: components of a vector.
        max_length: longest sequence in tokens.
        cost: seconds a batch of `(rows, length)` takes; `forward` sleeps for them like a device
            that is busy with the batch. None costs nothing.
    """

    def __init__(
        self,
        dim: int = 384,
        max_length: int = 512,
        cost: Callable[[int, int], float] | None = None,
    ) -> None:
        self.dim = dim
        self.max_length = max_length
        self.pad_id = 0
        self.dtype = "hash"
        self.device = "cpu"
        self._cost = cost
        powers = [pow(_MULTIPLIER, i, 1 << 64) for i in range(1, max_length + 1)]
        self._powers: Words = np.array(powers, dtype=np.uint64)
        self._steps: Words = np.arange(1, dim + 1, dtype=np.uint64) * _GAMMA
        self._places = np.arange(max_length)

    def load(self) -> None:
        """Do nothing: there are no weights."""

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Write the unit vectors of `rows` rows to `buffer.output`."""
        if self._cost is not None:
            time.sleep(self._cost(rows, length))
        hashes = self._hashes(buffer, rows, length)
        self._expand(hashes, buffer.output[:rows])

    def close(self) -> None:
        """Do nothing."""

    def _hashes(self, buffer: HostBuffer, rows: int, length: int) -> Words:
        """Return one `(rows,) uint64` hash a row: a polynomial in the ids, modulo 2**64."""
        # Plus one, so that a token of id 0 counts; padding becomes exactly 0.
        terms: Words = (buffer.grid(rows, length) + 1).view(np.uint64)
        terms *= self._places[:length] < buffer.lengths[:rows, None]
        terms *= self._powers[:length]
        hashes: Words = terms.sum(axis=1, dtype=np.uint64)
        return hashes

    def _expand(self, hashes: Words, out: Vectors) -> None:
        """Fill `out (rows, dim) float32` with splitmix64 streams started at the hashes."""
        words: Words = hashes[:, None] + self._steps
        words ^= words >> np.uint64(30)
        words *= _MIX1
        words ^= words >> np.uint64(27)
        words *= _MIX2
        # The top 24 bits as a float32 in [-1, 1), exactly.
        words >>= np.uint64(40)
        np.multiply(words.view(np.int64), 2.0**-23, out=out, casting="unsafe")
        out -= 1.0
        out /= np.sqrt(np.square(out).sum(axis=1, keepdims=True))
