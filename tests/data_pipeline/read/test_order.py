"""The order is a bijection per epoch, depends only on (seed, g), stays near the chunks it reads, and
does not change when segments are added.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.read.mixture import SourceMixture, WeightStage
from moebius.data_pipeline.read.order import (
    ChunkTable,
    EndOfSourceError,
    RowRefs,
    SampleOrder,
    SegmentOrder,
    SourceRows,
)


def chunk_table(sizes, per_window=3) -> ChunkTable:
    return ChunkTable(np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))]), per_window)


CHUNKS = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(any)


@settings(max_examples=150, deadline=None)
@given(sizes=CHUNKS, per_window=st.integers(1, 9), key=st.integers(0, 2**64 - 1))
def test_a_segment_gives_every_row_once(sizes, per_window, key):
    order = SegmentOrder(chunk_table(sizes, per_window), key)
    rows = order.rows_at(np.arange(sum(sizes)))
    assert np.array_equal(np.sort(rows), np.arange(sum(sizes)))


def test_a_window_of_positions_touches_a_window_of_chunks():
    order = SegmentOrder(chunk_table([100] * 64, per_window=8), 1)
    for window in range(8):
        positions = np.arange(window * 800, window * 800 + 800)
        assert set(order.windows_of(positions).tolist()) == {window}
        chunks = np.unique(order.rows_at(positions) // 100)
        assert np.array_equal(chunks, np.sort(order.chunks_of_window(window)))
        assert chunks.max() - chunks.min() > 2 * 8  # spread over the segment


# ---- several sources, segments and epochs


SEGMENT_SIZES = {"a": [[20, 31, 7], [40, 3]], "b": [[9] * 5], "c": [[1], [60], [0], [25, 25]]}


def make(
    weights=None, stages=(), sizes=None, *, complete=True, max_epochs=0, seed=3
) -> SampleOrder:
    sizes = sizes or SEGMENT_SIZES
    weights = weights or dict.fromkeys(sizes, 1.0)
    mixture = SourceMixture(tuple(sizes), [WeightStage(0, weights), *stages], seed=seed)
    return SampleOrder(
        mixture,
        source_rows(sizes, complete=complete, max_epochs=max_epochs),
        lambda source, segment: chunk_table(sizes[source][segment]),
        seed=seed,
    )


def source_rows(sizes, *, complete=True, max_epochs=0) -> dict[str, SourceRows]:
    return {
        name: SourceRows(tuple(map(sum, segments)), complete, max_epochs)
        for name, segments in sizes.items()
    }


def as_list(refs: RowRefs) -> list[tuple[int, ...]]:
    columns = (refs.sources, refs.epochs, refs.segments, refs.rows)
    return list(zip(*map(np.ndarray.tolist, columns), strict=True))


SIZES = st.lists(st.lists(CHUNKS, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda sources: dict(zip("abcd", sources, strict=False))
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**40), weight=st.floats(0.1, 5))
def test_no_row_comes_twice_in_an_epoch_and_none_is_left_out(sizes, seed, weight):
    order = make(dict.fromkeys(sizes, 1.0) | {"a": weight}, sizes=sizes, seed=seed)
    refs = as_list(order.refs_at(0, 6000))
    for number, segments in enumerate(sizes.values()):
        every = {
            (segment, row) for segment, size in enumerate(map(sum, segments)) for row in range(size)
        }
        mine = [one[1:] for one in refs if one[0] == number]
        epochs = [epoch for epoch, *_ in mine]
        assert epochs == sorted(epochs)
        for epoch in set(epochs):
            had = [pair for found, *pair in mine if found == epoch]
            assert len({*map(tuple, had)}) == len(had)
            assert epoch == epochs[-1] or {*map(tuple, had)} == every


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, known=st.integers(1, 4))
def test_segments_that_come_later_change_nothing_before_them(sizes, known):
    whole = make(sizes=sizes)
    partly = {name: segments[:known] for name, segments in sizes.items()}
    growing = make(sizes=partly, complete=False)
    growing._chunks_of = lambda source, segment: chunk_table(sizes[source][segment])
    sample = 0
    while sample < 300:
        missing = _missing(growing, sample, 7)
        if missing is None:
            assert as_list(growing.refs_at(sample, 7)) == as_list(whole.refs_at(sample, 7))
            sample += 7
            continue
        assert missing.growing
        assert missing.num_known <= missing.index
        complete = all(len(partly[name]) == len(sizes[name]) for name in sizes)
        partly = {name: sizes[name][: len(partly[name]) + 1] for name in sizes}
        growing.extend(source_rows(partly, complete=complete))


def _missing(order: SampleOrder, start: int, count: int) -> EndOfSourceError | None:
    try:
        order.check(start, count)
    except EndOfSourceError as error:
        return error
    return None


def test_seeds_sources_segments_and_epochs_shuffle_differently():
    sizes = {"a": [[20] * 10, [20] * 10], "b": [[20] * 10]}
    rows = []
    for seed in (0, 1):
        refs = make(sizes=sizes, seed=seed).refs_at(0, 2000)
        for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)]:
            columns = np.stack([refs.sources, refs.epochs, refs.segments], axis=1)
            rows.append(refs.rows[(columns == key).all(axis=1)])
    assert {len(one) for one in rows} == {200}
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert (one == other).mean() < 0.08


def test_later_epochs_have_their_own_order_of_segments():
    sizes = {"a": [[4]] * 12}
    refs = make(sizes=sizes).refs_at(0, 48 * 3)
    orders = [list(dict.fromkeys(refs.segments[refs.epochs == e].tolist())) for e in range(3)]
    assert orders[0] == list(range(12))
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == orders[0] for order in orders)


def test_the_end_of_a_source_is_known_in_advance():
    order = make(sizes={"a": [[10], [5]]}, max_epochs=2)
    order.check(0, 30)
    assert len(order.refs_at(0, 30)) == 30
    with pytest.raises(EndOfSourceError) as caught:
        order.check(0, 31)
    error = caught.value
    assert (error.source, error.index, error.num_known, error.growing) == ("a", 30, 30, False)
    with pytest.raises(EndOfSourceError):
        make(sizes={"a": [[0]]}).check(0, 1)


def test_the_order_of_version_2_is_this_one():
    """Runs are resumed by it. If this fails on purpose, raise ORDER_VERSION."""
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    order = make(weights, [WeightStage(900, {"a": 1.0, "c": 2.0})], seed=7)
    assert order.mixture.starts == (0, 1040)
    assert as_list(order.refs_at(1036, 8)) == [
        *((1, 6, 0, 5), (0, 5, 1, 18), (0, 5, 1, 4), (0, 5, 1, 29)),
        *((2, 1, 1, 32), (2, 1, 1, 41), (2, 1, 1, 42), (2, 1, 1, 19)),
    ]
