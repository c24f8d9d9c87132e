"""The texts that are sent, and the vectors they must come back as."""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from embedsvc.bench.texts import words
from embedsvc.config import DEFAULT_SOURCE
from embedsvc.models.buffers import HostBuffer, Vectors
from embedsvc.models.hashing import HashModel
from embedsvc.models.source import resolve
from embedsvc.tokenization import Tokenizer
from embedsvc.vectors import finish

MAX_WORDS = 400
# What a served model in bfloat16 may differ by in other company.
LEAST_COSINE = 0.9999
_ROWS = 64


def random_texts(n_texts: int, rng: random.Random) -> list[str]:
    """Return texts of 1 to `MAX_WORDS` words, every order of magnitude as likely."""
    lengths = (round(math.exp(rng.uniform(0, math.log(MAX_WORDS)))) for _ in range(n_texts))
    return [words(rng, length) for length in lengths]


@dataclass(slots=True)
class Pool:
    """Texts with their vectors.

    Attributes:
        texts: any.
        vectors: `(n, dim) float32`, of unit length.
        exact: whether answers must have the same bits, or only nearly the same direction.
    """

    texts: list[str]
    vectors: Vectors
    exact: bool
    _written: list[str] = field(init=False)

    def __post_init__(self) -> None:
        little_endian = self.vectors.astype("<f4", copy=False)
        self._written = [base64.b64encode(vector.tobytes()).decode() for vector in little_endian]

    def first_wrong(
        self, picks: Sequence[int], embeddings: Sequence[list[float] | str]
    ) -> int | None:
        """Return the first row whose vector is not that of its text; None where all are."""
        for row, (pick, embedding) in enumerate(zip(picks, embeddings, strict=True)):
            if embedding != self._written[pick] and not self._same(pick, embedding):
                return row
        return None

    def _same(self, pick: int, embedding: list[float] | str) -> bool:
        if isinstance(embedding, str):
            vector = np.frombuffer(base64.b64decode(embedding), "<f4")
        else:
            vector = np.array(embedding, np.float32)
        if self.exact:
            return np.array_equal(vector, self.vectors[pick])
        return float(vector @ self.vectors[pick]) >= LEAST_COSINE * float(np.linalg.norm(vector))


def hashed(texts: list[str]) -> Vectors:
    """Return the vectors that a server of `HashModel` gives for texts, computed here."""
    folder = resolve(DEFAULT_SOURCE)
    tokenizer = Tokenizer(folder, folder.max_length)
    model = HashModel(max_length=tokenizer.max_length)
    buffer = HostBuffer(_ROWS * model.max_length, _ROWS, model.dim, model.pad_id)
    vectors = np.empty((len(texts), model.dim), np.float32)
    for start in range(0, len(texts), _ROWS):
        ids = [e.ids for e in tokenizer.encode(texts[start : start + _ROWS], truncate="END")]
        buffer.fill(ids, [0] * len(ids), model.max_length)
        model.forward(buffer, len(ids), model.max_length)
        vectors[start : start + len(ids)] = buffer.output[: len(ids)]
    return finish(vectors, model.dim, normalize=True)
