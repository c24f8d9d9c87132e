"""Isolated models for tests: real processes that do what the first id of a row says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from embedsvc.config import VersionConfig
from embedsvc.models import Model
from embedsvc.models.buffers import Vectors
from embedsvc.models.hashing import HashModel
from embedsvc.models.process import ProcessModel
from embedsvc.models.source import ModelFolder
from embedsvc.models.wire import Spec
from tests import poisoned_worker
from tests.poisoned_worker import DIM

# How long a batch may take where a test is about hanging, and where it is not.
SHORT_S, LONG_S = 0.3, 20.0


def spec_of(cache_dir: Path) -> Spec:
    """Return what a poisoned process loads: nothing."""
    folder = ModelFolder(
        path=cache_dir, source="poisoned", revision="", modules=(), max_length=64,
        position_limit=float("inf"), lower_case=False, prompts={}, default_prompt_name="",
        weights=(), weights_id="none",
    )  # fmt: skip
    version = VersionConfig(backend="hash", isolate=True)
    return Spec(version, folder, cache_dir, log_level=0)


class PoisonedModel(ProcessModel):
    """A model whose rows can do harm."""

    worker = poisoned_worker.MODULE


def poisoned(cache_dir: Path) -> ProcessModel:
    """Return such a model, not loaded yet."""
    return PoisonedModel(spec_of(cache_dir), first_limit_s=LONG_S)


def processes() -> list[psutil.Process]:
    """Return the processes of models that run below this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        # One that ends meanwhile is none.
        with suppress(psutil.Error):
            if "worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def embed(model: Model, rows: Sequence[Sequence[int]]) -> Vectors:
    """Return the vectors of one batch."""
    length = max(map(len, rows))
    buffer = model.allocate(len(rows) * length, len(rows))
    buffer.fill([np.array(row, np.int64) for row in rows], [0] * len(rows), length)
    model.forward(buffer, len(rows), length)
    return buffer.output.copy()


def expected(rows: Sequence[Sequence[int]]) -> Vectors:
    """Return what the vectors of rows must be."""
    return embed(HashModel(dim=DIM, max_length=64), rows)
