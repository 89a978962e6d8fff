"""The order is a bijection per epoch, depends on nothing but (seed, g), and stays near the chunks
it reads.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.order import WINDOW_CHUNKS, RowOrder, num_rows, permuted


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permuted_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, key)), np.arange(size))


def _permuted_slowly(index: int, size: int, key: int) -> int:
    """The same network, one index at a time, with Python's own integers."""
    half_bits = 1
    while 4**half_bits < size:
        half_bits += 1
    word, mask = 2**64 - 1, 2**half_bits - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(6):
            mixed = right ^ ((key + round_number * 0x9E3779B97F4A7C15) & word)
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & word
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & word
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        index = (left << half_bits) | right
        if index < size:
            return index


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), part=st.floats(0, 1))
def test_permuted_equals_the_slow_loop(size, key, part):
    index = min(int(part * size), size - 1)
    assert permuted(np.array([index]), size, key).tolist() == [_permuted_slowly(index, size, key)]


def test_permuted_works_far_beyond_what_fits_in_memory():
    size = 3 * 10**12 + 1
    images = permuted(np.arange(1000) * (size // 1000), size, 5)
    assert len(set(images.tolist())) == 1000
    assert images.min() >= 0
    assert images.max() < size


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 2500),
    rows_per_chunk=st.integers(1, 700),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
)
def test_every_epoch_visits_every_row_once(rows, rows_per_chunk, seed, epoch):
    epochs, found = RowOrder(rows, rows_per_chunk, seed).rows_at(epoch * rows, rows)
    assert set(epochs.tolist()) == {epoch}
    assert np.array_equal(np.sort(found), np.arange(rows))


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 5000), count=st.integers(0, 300), cut=st.floats(0, 1))
def test_any_way_of_asking_gives_the_same_rows(start, count, cut):
    order = RowOrder(977, 20, seed=3)
    whole = np.stack(order.rows_at(start, count))
    middle = int(count * cut)
    parts = [
        np.stack(order.rows_at(start, middle)),
        np.stack(order.rows_at(start + middle, count - middle)),
    ]
    assert np.array_equal(whole, np.concatenate(parts, axis=1))


def test_seeds_and_epochs_shuffle_differently():
    orders = [
        RowOrder(500, 10, seed).rows_at(epoch * 500, 500)[1] for seed in (0, 1) for epoch in (0, 1)
    ]
    orders.append(np.arange(500))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.05


def test_a_window_of_samples_touches_a_window_of_chunks():
    order = RowOrder(num_rows=100 * WINDOW_CHUNKS * 4, rows_per_chunk=100, seed=1)
    _, rows = order.rows_at(100 * WINDOW_CHUNKS, 100 * WINDOW_CHUNKS)
    chunks = np.unique(rows // 100)
    assert len(chunks) == WINDOW_CHUNKS
    assert chunks.max() - chunks.min() > 2 * WINDOW_CHUNKS  # and those lie all over the stream


def test_rows_of_a_window_are_well_mixed():
    _, rows = RowOrder(num_rows=16 * WINDOW_CHUNKS, rows_per_chunk=16, seed=1).rows_at(
        0, 16 * WINDOW_CHUNKS
    )
    assert abs(np.corrcoef(np.arange(len(rows)), rows)[0, 1]) < 0.15
    assert np.mean(np.abs(np.diff(rows)) == 1) < 0.02


def test_the_order_of_version_1_is_this_one():
    """Runs are resumed by it. If this fails on purpose, raise ORDER_VERSION."""
    epochs, rows = RowOrder(num_rows=1000, rows_per_chunk=16, seed=7).rows_at(996, 8)
    assert epochs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rows.tolist() == [748, 137, 979, 244, 587, 130, 86, 345]


@pytest.mark.parametrize(
    ("tokens", "seq_len", "rows"), [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)]
)
def test_rows_share_their_border_token(tokens, seq_len, rows):
    assert num_rows(tokens, seq_len) == rows
