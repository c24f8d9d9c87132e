"""TorchModel against sentence-transformers, architecture by architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize

from tests import tiny

LENGTHS = (1, 3, 9, 20, 44)


def _encode(reference: SentenceTransformer, rows: list[str], batch_size: int) -> np.ndarray:
    return np.asarray(reference.encode(rows, batch_size=batch_size, convert_to_numpy=True))


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_vectors_equal_sentence_transformers(architecture: str, tmp_path: Path) -> None:
    """Alone and padded together, every architecture gives the vectors of the reference."""
    pooling = "lasttoken" if architecture in tiny.DECODERS else "mean"
    reference = tiny.save_folder(tmp_path, architecture, pooling, Normalize())
    model, folder = tiny.load(tmp_path / "folder", tmp_path)
    rows = tiny.texts(LENGTHS)
    expected = _encode(reference, rows, batch_size=1)
    alone = np.concatenate([tiny.embed(model, folder, [row]) for row in rows])
    together = tiny.embed(model, folder, rows)

    assert np.abs(alone - expected).max() < 1e-5
    assert np.abs(together - expected).max() < 1e-5
