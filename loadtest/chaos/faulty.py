"""A weightless model that takes time, and that some texts break."""

from __future__ import annotations

import ctypes

import numpy as np

from embedsvc.engine.cost import CostModel
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.hashing import HashModel
from loadtest.chaos.plan import Poison

# Seconds of a batch, so that something is in flight when a fault comes; large batches are hardly
# cheaper, so that the measurement at start is short.
COST = CostModel(c0=5e-4, c1=0.0, c2=5e-6, c3=0.0)
# The first word of a text that breaks the model, and its id in the vocabulary of BERT (uncased).
WORDS: dict[Poison, tuple[str, int]] = {
    "raise": ("explode", 15044),
    "nan": ("infinite", 10709),
    "crash": ("crash", 5823),
}


def poisoned_text(poison: Poison, rest: str) -> str:
    """Return a text that breaks the model in this way."""
    return f"{WORDS[poison][0]} {rest}"


class FaultyModel(HashModel):
    """`HashModel`, but some texts make it fail, give NaN, or take its process down."""

    def __init__(self, dim: int = 384, max_length: int = 512) -> None:
        super().__init__(dim, max_length, COST)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute, then break what asks for it."""
        super().forward(buffer, rows, length)
        # The first token is the tokenizer's own.
        words = buffer.grid(rows, length)[:, 1]
        if (words == WORDS["crash"][1]).any():
            # A signal sent to the process might find it in another thread, after the answer.
            ctypes.string_at(0)
        if (words == WORDS["raise"][1]).any():
            raise RuntimeError("broken on purpose")
        buffer.output[:rows][words == WORDS["nan"][1]] = np.nan
