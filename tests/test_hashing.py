"""HashModel: a vector is a function of its own row's ids, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.models import Model
from embedsvc.models.buffers import HostBuffer, Vectors
from embedsvc.models.hashing import HashModel

Rows = list[list[int]]
rows_of_ids = st.lists(
    st.lists(st.integers(0, 250_000), min_size=1, max_size=30), min_size=1, max_size=12
)


def _vectors(
    model: Model, rows: Sequence[Sequence[int]], length: int, *, pad_id: int = 0
) -> Vectors:
    buffer = HostBuffer(len(rows) * length, len(rows), model.dim, pad_id)
    buffer.fill([np.array(row, dtype=np.int64) for row in rows], [0] * len(rows), length)
    model.forward(buffer, len(rows), length)
    return buffer.output


@settings(deadline=None)
@given(rows=rows_of_ids, extra=st.integers(0, 20), pad_id=st.integers(0, 250_000))
def test_neighbours_and_padding_change_no_bit(rows: Rows, extra: int, pad_id: int) -> None:
    """Law: a text's vector does not depend on its neighbours, its bucket or the pad id."""
    model = HashModel(dim=48, max_length=64)
    together = _vectors(model, rows, max(map(len, rows)) + extra, pad_id=pad_id)
    alone = np.concatenate([_vectors(model, [row], len(row)) for row in rows])

    assert np.array_equal(together, alone)


@settings(deadline=None)
@given(rows=st.lists(rows_of_ids.map(lambda rows: tuple(rows[0])), unique=True, min_size=2))
def test_different_ids_give_different_vectors(rows: list[tuple[int, ...]]) -> None:
    """Different ids, orders or lengths give vectors that are far apart, all of length 1."""
    vectors = _vectors(HashModel(max_length=64), rows, 30)
    cosines = vectors @ vectors.T

    np.testing.assert_allclose(np.diag(cosines), 1.0, atol=1e-6)
    assert np.abs(cosines - np.diag(np.diag(cosines))).max() < 0.5


def test_vectors_stay_the_same_for_ever() -> None:
    """The values are part of the contract: other processes and machines give the same."""
    (vector,) = _vectors(HashModel(dim=4, max_length=8), [[101, 7592, 102]], 3)

    np.testing.assert_allclose(vector, [0.049930, 0.952087, 0.048796, -0.297751], atol=1e-6)


def test_only_the_rows_in_use_are_written() -> None:
    """Rows of the output beyond the batch are left alone."""
    model = HashModel(dim=4, max_length=8)
    buffer = HostBuffer(32, 4, 4, 0)
    buffer.output[:] = 7.0
    buffer.fill([np.array([1, 2, 3])], [0], 4)
    model.forward(buffer, 1, 4)

    assert (buffer.output[1:] == 7.0).all()


def test_cost_is_asked_once_a_batch() -> None:
    """A cost model is asked for the padded shape of each batch."""
    asked = []

    def cost(rows: int, length: int) -> float:
        asked.append((rows, length))
        return 0.0

    _vectors(HashModel(dim=4, max_length=8, cost=cost), [[1], [2, 3]], 8)

    assert asked == [(2, 8)]
