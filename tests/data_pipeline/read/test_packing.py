"""Rows of both packings, compared with slow references; plans on disk."""

import os
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.atomic import write_record
from moebius.data_pipeline.read import packing
from moebius.data_pipeline.read.packing import (
    PlanKey,
    SegmentPlan,
    concat_plan,
    fit,
    fit_chunk,
    open_plan,
)

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=80)


def realistic_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Returns log-normal lengths (median 810, mean 1,900 tokens), as of text and code."""
    drawn = np.random.default_rng(seed).normal(np.log(810), 1.3, count)
    return np.exp(drawn).astype(np.int64) + 2


# ---- best fit


def _fit_slowly(lengths: list[int], capacity: int) -> list[int]:
    """The textbook's best-fit-decreasing: the fullest row with room, the latest of equal ones."""
    left: list[int] = []
    touched: list[int] = []
    row_of = [0] * len(lengths)
    for clock, item in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        rows = [row for row, room in enumerate(left) if room >= lengths[item]]
        row = min(rows, key=lambda row: (left[row], -touched[row]), default=len(left))
        if row == len(left):
            left.append(capacity)
            touched.append(0)
        left[row] -= lengths[item]
        touched[row] = clock
        row_of[item] = row
    return row_of


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, spare=st.integers(0, 60))
def test_fit_equals_the_textbook(lengths, spare):
    capacity = max(lengths) + spare
    row_of, rows = fit(np.array(lengths), capacity)
    assert row_of.tolist() == _fit_slowly(lengths, capacity)
    assert rows == max(row_of) + 1
    assert np.bincount(row_of, weights=lengths).max() <= capacity


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 40))
def test_every_token_but_a_documents_first_is_a_target_once(lengths, seq_len):
    ends = np.cumsum(lengths)
    pieces = fit_chunk(ends, seq_len)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    targets, firsts = [], []
    for row in range(pieces.num_rows):
        mine = slice(pieces.row_starts[row], pieces.row_starts[row + 1])
        assert pieces.lengths[mine].sum() <= seq_len + 1
        assert np.all(np.diff(pieces.starts[mine]) > 0)
        spans = zip(pieces.starts[mine].tolist(), pieces.lengths[mine].tolist(), strict=True)
        for start, length in spans:
            assert len(set(document_of[start : start + length].tolist())) == 1
            firsts.append(start)
            targets += range(start + 1, start + length)
    starts = set((ends - lengths).tolist())
    assert sorted(targets) == [token for token in range(ends[-1]) if token not in starts]
    assert starts <= set(firsts)


def test_short_documents_are_never_cut_and_long_ones_only_into_full_rows():
    lengths = realistic_lengths(1000)
    pieces = fit_chunk(np.cumsum(lengths), 2048)
    whole = dict(zip((np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), strict=True))
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        if whole.get(start, 2050) <= 2049:
            assert length == whole[start]
    full = (pieces.lengths == 2049).sum()
    assert full >= (np.maximum(lengths - 2, 0) // 2048).sum()


@pytest.mark.parametrize(("seq_len", "least"), [(256, 0.998), (2048, 0.998), (4096, 0.997)])
def test_rows_of_realistic_documents_are_full(tmp_path, seq_len, least):
    lengths = realistic_lengths(12_000)
    rows, filled = _fit_all(lengths, seq_len)
    assert _plan(tmp_path, lengths, seq_len).chunks.num_rows == rows
    assert least <= filled / (rows * (seq_len + 1)) <= 1


def _fit_all(lengths: np.ndarray, seq_len: int) -> tuple[int, int]:
    """Returns the rows of all chunks, and the places in them that hold a token."""
    chunks = packing._chunks_of(iter(_batches(lengths, 2**17)), seq_len, 2**17)
    pieces = [fit_chunk(ends, seq_len) for _, ends in chunks]
    return sum(one.num_rows for one in pieces), sum(int(one.lengths.sum()) for one in pieces)


# ---- chunks


def _batches(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Returns the document ends per record batch, each of at least batch_tokens tokens."""
    batches, current = [], []
    for length in lengths.tolist():
        current.append(length)
        if sum(current) >= batch_tokens:
            batches.append(np.cumsum(current))
            current = []
    return [*batches, np.cumsum(current)] if current else batches


KEY = PlanKey("text", 3, 2048, "c" * 64)


def _plan(
    folder: Path, lengths: np.ndarray, seq_len: int = 2048, *, batch_tokens: int = 2**17, key=None
) -> SegmentPlan:
    key = key or PlanKey("text", 3, seq_len, "c" * 64)
    return open_plan(
        folder,
        key,
        batch_tokens=batch_tokens,
        batches=lambda: iter(_batches(lengths, batch_tokens)),
    )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    seq_len=st.integers(1, 90),
    batch_tokens=st.integers(1, 60),
)
def test_a_concat_row_belongs_to_the_chunk_of_its_first_token(sizes, seq_len, batch_tokens):
    batch_starts = np.concatenate([[0], np.cumsum(sizes)])
    plan = concat_plan(batch_starts, seq_len, batch_tokens)
    rows = max(0, (batch_starts[-1] - 1) // seq_len)
    assert plan.chunks.num_rows == rows
    assert plan.chunk_batches[0] == 0
    assert plan.chunk_batches[-1] == len(sizes)
    for chunk, (first, end) in enumerate(
        zip(plan.chunk_batches[:-1], plan.chunk_batches[1:], strict=True)
    ):
        tokens = range(batch_starts[first], batch_starts[end])
        for row in range(*plan.chunks.row_starts[chunk : chunk + 2].tolist()):
            assert row * seq_len in tokens
        assert chunk == len(plan.chunk_batches) - 2 or len(tokens) >= 8 * batch_tokens


def test_a_window_holds_about_64_batches_whatever_the_chunks():
    batch_starts = np.arange(1001) * 1000
    plan = concat_plan(batch_starts, 100, 1000)
    assert np.diff(plan.chunk_batches).tolist() == [8] * 125
    assert plan.chunks.chunks_per_window == 8
    assert concat_plan(batch_starts[:9], 100, 1000).chunks.chunks_per_window == 8
    long = concat_plan(np.arange(101) * 100_000, 100, 1000)  # documents of 100 batches
    assert long.chunks.chunks_per_window == 2


def test_plan_chunks_are_whole_batches_of_about_a_thousand_documents(tmp_path):
    lengths = realistic_lengths(20_000)
    plan = _plan(tmp_path, lengths)
    batches = _batches(lengths, 2**17)
    documents = [len(ends) for ends in batches]
    firsts = plan.chunk_batches
    assert firsts[-1] == len(batches)
    per_chunk = np.add.reduceat(documents, firsts[:-1])
    tokens = np.add.reduceat([int(ends[-1]) for ends in batches], firsts[:-1])
    closed = (per_chunk >= 1000) | (tokens >= 16 * 2**17)
    assert closed[:-1].all()
    assert (tokens[:-1] >= 256 * 2049).all()
    assert tokens.max() < 20 * 2**17


# ---- files


def test_a_plan_is_made_once_and_again_if_it_cannot_be_used(tmp_path):
    lengths, path = realistic_lengths(3000), tmp_path / KEY.file_name
    plan, intact = _plan(tmp_path, lengths), path.read_bytes()
    assert os.listdir(tmp_path) == [KEY.file_name] == ["pack-text-000003-s2048.json"]
    again = open_plan(tmp_path, KEY, batch_tokens=2**17, batches=lambda: pytest.fail("read again"))
    assert again.chunks.num_rows == plan.chunks.num_rows == _fit_all(lengths, 2048)[0]
    other = _plan(tmp_path, realistic_lengths(4000), key=PlanKey("text", 3, 2048, "d" * 64))
    assert other.chunks.num_rows > plan.chunks.num_rows
    _plan(tmp_path, lengths)
    assert path.read_bytes() == intact
    for place in (0.02, 0.2, 0.5, 0.9):
        flip(path, int(place * len(intact)))
        _plan(tmp_path, lengths)
        assert path.read_bytes() == intact
    for content in ({"plan_version": 1, "chunks": []}, [], "text"):
        write_record(path, content)
        _plan(tmp_path, lengths)
        assert path.read_bytes() == intact
