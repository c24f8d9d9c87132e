"""Models: what turns a filled host buffer into vectors.

Nothing here knows of requests, queues or HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from embedsvc.config import VersionConfig
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.host import set_native_memory

if TYPE_CHECKING:
    from embedsvc.models.source import ModelFolder

# Torch reads these settings when it is loaded, by whichever module comes first.
set_native_memory()


class Model(Protocol):
    """One loaded model on one device.

    `load` and `close` run once, each on any thread; `forward` runs on the device threads, several
    at once, each with a buffer of its own.
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

    def allocate(self, capacity_tokens: int, max_rows: int) -> HostBuffer:
        """Return a new host buffer in memory that this model reads without a copy."""

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute `buffer.output[:rows]` from `buffer.grid(rows, length)` and its lengths.

        Args:
            buffer: made by `allocate` and filled; only `output` is written.
            rows: rows in use.
            length: padded length in tokens.
        """

    def close(self) -> None:
        """Free what `load` took."""


def load_model(version: VersionConfig, folder: ModelFolder, pad_id: int, cache_dir: Path) -> Model:
    """Return the loaded model of a version; its backend is imported only here.

    Raises:
        ModelError: the model cannot be loaded or its vectors cannot be trusted.
    """
    max_length = folder.max_length if version.max_length == "auto" else version.max_length
    model: Model
    if version.backend == "hash":
        from embedsvc.models.hashing import HashModel

        model = HashModel(max_length=max_length, pad_id=pad_id)
    else:
        from embedsvc.models.torch import TorchModel

        model = TorchModel(
            folder,
            device=version.device,
            dtype=version.dtype,
            pooling=version.pooling,
            max_length=max_length,
            cache_dir=cache_dir,
        )
    model.load()
    return model
