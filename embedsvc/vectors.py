"""What is done to a request's vectors after the model: dimensions and length. Pure."""

from __future__ import annotations

import math

import numpy as np

from embedsvc.errors import InferenceFailed
from embedsvc.models.buffers import Vectors


def finish(vectors: Vectors, dim: int, *, normalize: bool) -> Vectors:
    """Keep the first `dim` components and, where asked, give every row unit length.

    Args:
        vectors: `(n, >= dim) float32`, changed in place where nothing is cut.
        dim: components to keep.
        normalize: whether rows get unit length, in float32.

    Raises:
        InferenceFailed: a row is all zeros, which has no direction.
    """
    if dim < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, :dim])
    if not normalize:
        return vectors
    # Row by row, so that a vector has the same bits whatever else is in its request.
    for index, row in enumerate(vectors):
        # Not `dot`: BLAS lets go of the interpreter's lock, which costs more than the sum.
        norm = math.sqrt(np.add.reduce(row * row))
        if norm == 0.0:
            raise InferenceFailed(
                f"The model gave a zero vector for input[{index}].", param="input"
            )
        row /= norm
    return vectors
