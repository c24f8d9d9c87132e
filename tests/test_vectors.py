"""Dimensions and length of vectors after the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.errors import InferenceFailed
from embedsvc.vectors import finish


def random_vectors(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 384)).astype(np.float32)


@given(st.integers(1, 40), st.sampled_from([1, 64, 384]))
def test_rows_have_unit_length_at_every_size(n: int, dim: int) -> None:
    """Law: unit length, also after cutting, in the direction of the leading components."""
    vectors = random_vectors(n)

    out = finish(vectors.copy(), dim, normalize=True)

    expected = vectors[:, :dim] / np.linalg.norm(vectors[:, :dim], axis=1, keepdims=True)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert out.flags.c_contiguous
    assert out.shape == (n, dim)


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    """Law: a vector does not depend on what shares the request."""
    together = finish(random_vectors(33), 384, normalize=True)

    for row in range(33):
        alone = finish(random_vectors(33)[row : row + 1].copy(), 384, normalize=True)
        np.testing.assert_array_equal(alone[0], together[row])


def test_without_normalising_the_values_stay() -> None:
    """normalize false gives what the model computed."""
    vectors = random_vectors(3)

    np.testing.assert_array_equal(finish(vectors.copy(), 64, normalize=False), vectors[:, :64])


def test_a_zero_vector_is_an_error_that_names_its_input() -> None:
    """A vector without direction never leaves with 200."""
    vectors = random_vectors(4)
    vectors[2] = 0

    with pytest.raises(InferenceFailed, match=r"input\[2\]"):
        finish(vectors, 384, normalize=True)
