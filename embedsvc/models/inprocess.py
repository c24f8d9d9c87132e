"""What models in the server's own process have in common: its memory and its life."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from embedsvc.models.buffers import HostBuffer


class InProcess:
    """Part of every model that runs where the engine runs."""

    dim: int
    pad_id: int
    warm = False
    load_s = 0.0

    @property
    def settings(self) -> Mapping[str, Any]:
        """What its vectors depend on: nothing besides weights and library versions."""
        return {}

    def allocate(self, capacity_tokens: int, max_rows: int) -> HostBuffer:
        """Return a host buffer in plain memory."""
        return HostBuffer(capacity_tokens, max_rows, self.dim, self.pad_id)

    def watch(self, limit_s: Callable[[int, int], float], on_death: Callable[[str], None]) -> None:
        """Do nothing: it lives as long as its server, and nobody can end its batches."""
