"""Models: what turns a filled host buffer into vectors.

Nothing here knows of requests, queues or HTTP.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from embedsvc.config import VersionConfig
from embedsvc.errors import ModelError
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.host import set_native_memory

if TYPE_CHECKING:
    from embedsvc.models.owner import Owner
    from embedsvc.models.source import ModelFolder

# Torch reads these settings when it is loaded, by whichever module comes first.
set_native_memory()


class Model(Protocol):
    """One loaded model on one device.

    `load` runs once, and again after each `ModelDied`; `forward` runs on the device threads,
    several at once, each with a buffer of its own; `close` runs once, on any thread and whatever
    the others do.
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
    warm: bool
    """Whether others have run their batches on it before."""
    load_s: float
    """Seconds that the latest load took, whoever waited for it; 0 where none comes again."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What vectors depend on besides weights and library versions: JSON types, for caches."""

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

        Raises:
            ModelDied: the model must be loaded again.
            DeviceOutOfMemory: a smaller batch may fit.
            DeviceLost: the device does nothing more for this process.
        """

    def watch(self, limit_s: Callable[[int, int], float], on_death: Callable[[str], None]) -> None:
        """Follow a model that may die on its own; others do nothing.

        Args:
            limit_s: longest seconds of a batch of some rows of some padded length; a model that
                takes longer is taken for dead.
            on_death: told the reason once a death, on any thread, before any `forward` raises
                `ModelDied` for it; at once where the model is dead already.
        """

    def close(self) -> None:
        """Free what `load` took; batches in flight may fail."""


def load_model(
    version: VersionConfig,
    folder: ModelFolder,
    cache_dir: Path,
    owner: Owner | None = None,
) -> Model:
    """Return the loaded model of a version, in a process of its own where it is to be isolated.

    Args:
        version: its configuration.
        folder: its files.
        cache_dir: where the outcome of the self-check is kept.
        owner: of such processes, where several workers use one.

    Raises:
        ModelError: the model cannot be loaded or its vectors cannot be trusted.
    """
    if not isolated(version):
        return load_in_process(version, folder, cache_dir)
    if sys.platform != "linux":
        raise ModelError(f"{folder.source}: `isolate = true` needs Linux; leave it out")
    from embedsvc.models.process import ProcessModel
    from embedsvc.models.wire import Spec

    level = logging.getLogger(__name__).getEffectiveLevel()
    model = ProcessModel(Spec(version, folder, cache_dir, level), owner=owner)
    model.load()
    return model


def isolated(version: VersionConfig) -> bool:
    """Say whether a version's model gets a process of its own; `auto` does so where it can die."""
    if version.isolate != "auto":
        return version.isolate
    return sys.platform == "linux" and version.backend != "hash"


def load_in_process(version: VersionConfig, folder: ModelFolder, cache_dir: Path) -> Model:
    """Return the loaded model of a version, in this process; its backend is imported only here.

    Raises:
        ModelError: the model cannot be loaded or its vectors cannot be trusted.
    """
    max_length = folder.max_length if version.max_length == "auto" else version.max_length
    model: Model
    if version.backend == "hash":
        from embedsvc.models.hashing import HashModel

        model = HashModel(max_length=max_length)
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
