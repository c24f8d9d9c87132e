"""Vectors of texts that were asked for before: an LRU cache bounded in bytes.

One for each served version, so that its keys need no name of weights, dtype or pooling. It holds
what the model gave, before dimensions and length are seen to. Event loop only.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np

from embedsvc.engine.sequence import Sequence
from embedsvc.metrics import VersionMetrics

# Bytes of an entry besides key and vector: its places in a table that may just have grown and in
# the order of use, and what the allocator rounds up. A test measures it.
ENTRY_BYTES = 256


class VectorCache:
    """The last used vectors by everything they depend on: token ids and the prompt's length.

    Args:
        max_bytes: of keys, vectors and overhead together; 0 keeps nothing.
        metrics: counts hits and misses; shows the bytes.

    Attributes:
        n_bytes: held now.
    """

    def __init__(self, max_bytes: int, metrics: VersionMetrics) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._vectors: OrderedDict[bytes, bytes] = OrderedDict()
        metrics.cache_bytes_from(lambda: self.n_bytes)

    def fill(self, sequences: list[Sequence]) -> list[Sequence]:
        """Write the vectors that are known to their requests; return the rows of the others."""
        if self._max_bytes == 0:
            return sequences
        missing = [sequence for sequence in sequences if not self._fill(sequence)]
        self._metrics.cache["hit"].inc(len(sequences) - len(missing))
        self._metrics.cache["miss"].inc(len(missing))
        return missing

    def store(self, sequences: list[Sequence]) -> None:
        """Keep the vectors of rows that were computed without an error."""
        if self._max_bytes == 0:
            return
        for sequence in sequences:
            key = _key(sequence)
            if key not in self._vectors:
                self._vectors[key] = vector = sequence.request.vectors[sequence.row].tobytes()
                self.n_bytes += _size(key, vector)
            while self.n_bytes > self._max_bytes:
                self.n_bytes -= _size(*self._vectors.popitem(last=False))

    def _fill(self, sequence: Sequence) -> bool:
        key = _key(sequence)
        vector = self._vectors.get(key)
        if vector is None:
            return False
        self._vectors.move_to_end(key)
        sequence.request.vectors[sequence.row] = np.frombuffer(vector, np.float32)
        return True


def _key(sequence: Sequence) -> bytes:
    return sequence.input_ids.astype(np.int32).tobytes() + sequence.prompt_length.to_bytes(4)


def _size(key: bytes, vector: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(vector) + ENTRY_BYTES
