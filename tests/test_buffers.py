"""Host buffers: padded on the right, reshaped without a copy, never shared by two owners."""

from __future__ import annotations

import os
import queue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.models.buffers import BufferPool, HostBuffer, SharedBuffer

PAD = 9


def make() -> HostBuffer:
    return HostBuffer(capacity_tokens=256, max_rows=16, dim=4, pad_id=PAD)


@given(st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=16), min_size=1, max_size=16))
def test_a_used_buffer_shows_only_the_new_batch(rows: list[list[int]]) -> None:
    """Law: after filling, each row is its ids and then padding, whatever was there before."""
    buffer = make()
    buffer.ids[:] = 77
    length = max(map(len, rows))

    buffer.fill([np.array(row, np.int64) for row in rows], [0] * len(rows), length)

    expected = [row + [PAD] * (length - len(row)) for row in rows]
    assert buffer.grid(len(rows), length).tolist() == expected
    assert buffer.lengths[: len(rows)].tolist() == [len(row) for row in rows]


def test_the_grid_is_a_view() -> None:
    """Reshaping for a bucket copies nothing."""
    buffer = make()

    assert np.shares_memory(buffer.grid(4, 8), buffer.ids)


@pytest.mark.parametrize("max_rows", [1, 7, 16])
def test_no_two_arrays_overlap(max_rows: int) -> None:
    """Law: what is written to one array of a buffer changes no other."""
    buffer = HostBuffer(capacity_tokens=13, max_rows=max_rows, dim=3, pad_id=PAD)
    arrays: list[np.ndarray] = [
        buffer.ids, buffer.lengths, buffer.prompt_lengths, buffer.output,
    ]  # fmt: skip
    for value, array in enumerate(arrays, 1):
        array[:] = value

    assert [set(array.ravel().tolist()) for array in arrays] == [{1}, {2}, {3}, {4}]


def test_a_shared_buffer_is_seen_through_its_descriptor() -> None:
    """Two mappings of the same memory are one buffer."""
    one = SharedBuffer(256, 16, 4, PAD)
    other = SharedBuffer(256, 16, 4, PAD, fd=os.dup(one.fd))
    one.fill([np.array([5, 6, 7])], [1], 8)
    other.output[:] = 2.5

    assert other.grid(1, 8).tolist() == [[5, 6, 7, *[PAD] * 5]]
    assert (other.lengths[0], other.prompt_lengths[0]) == (3, 1)
    assert (one.output == 2.5).all()


def test_a_shared_buffer_gives_its_descriptor_back() -> None:
    """Descriptors last as long as their buffers."""
    buffer = SharedBuffer(256, 16, 4, PAD)
    fd = buffer.fd
    os.fstat(fd)
    del buffer

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_taken_buffer_is_nobody_elses() -> None:
    """The pool hands each buffer to one owner at a time and says so when none is left."""
    pool = BufferPool(make, n_buffers=2)
    one, two = pool.take(), pool.take()

    assert one is not two
    with pytest.raises(queue.Empty):
        pool.take(timeout_s=0.0)
    pool.put(one)
    assert pool.take() is one
