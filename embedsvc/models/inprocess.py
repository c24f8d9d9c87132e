"""What models in the server's own process have in common: its memory and its life."""

from __future__ import annotations

from embedsvc.models.buffers import HostBuffer


class InProcess:
    """Part of every model that runs where the engine runs."""

    dim: int
    pad_id: int

    def allocate(self, capacity_tokens: int, max_rows: int) -> HostBuffer:
        """Return a host buffer in plain memory."""
        return HostBuffer(capacity_tokens, max_rows, self.dim, self.pad_id)
