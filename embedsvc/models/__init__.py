"""Models: what turns a filled host buffer into vectors.

Nothing here knows of requests, queues or HTTP.
"""

from __future__ import annotations

from typing import Protocol

from embedsvc.models.buffers import HostBuffer


class Model(Protocol):
    """One loaded model on one device.

    `load` and `close` run once, each on any thread; `forward` runs on the device threads, several at
    once, each with a buffer of its own.
    """

    dim: int
    """Components of a vector."""
    max_length: int
    """Longest sequence in tokens, special tokens included."""
    pad_id: int
    """Token id that fills the tail of a row."""
    dtype: str
    """Precision of the matrix products as shown to users, e.g. `bfloat16`."""
    device: str
    """Device as shown to users, e.g. `cpu`, `cuda:0`."""

    def load(self) -> None:
        """Bring the weights onto the device; sets the attributes above.

        Raises:
            ModelError: the model cannot be loaded or its vectors cannot be trusted.
        """

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute `buffer.output[:rows]` from `buffer.grid(rows, length)` and its lengths.

        Args:
            buffer: filled input arrays; only `output` is written.
            rows: rows in use.
            length: padded length in tokens.
        """

    def close(self) -> None:
        """Free what `load` took."""
