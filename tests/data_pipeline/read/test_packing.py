"""Rows of both packings, compared with slow references; plans on disk."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.read import packing
from moebius.data_pipeline.read.packing import (
    BestFitPlan,
    PlanKey,
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
    plan = _plan(tmp_path, realistic_lengths(12_000), seq_len)
    places = plan.plan.chunks.num_rows * (seq_len + 1)
    (head,) = tmp_path.glob("*.json")
    assert least <= json.loads(head.read_text())["content"]["num_filled"] / places <= 1


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
) -> BestFitPlan:
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
    firsts = plan.plan.chunk_batches
    assert firsts[-1] == len(batches)
    per_chunk = np.add.reduceat(documents, firsts[:-1])
    tokens = np.add.reduceat([int(ends[-1]) for ends in batches], firsts[:-1])
    closed = (per_chunk >= 1000) | (tokens >= 16 * 2**17)
    assert closed[:-1].all()
    assert (tokens[:-1] >= 256 * 2049).all()
    assert tokens.max() < 20 * 2**17


# ---- files


def test_a_plan_is_read_as_it_was_fitted(tmp_path):
    lengths = realistic_lengths(4000)
    plan = _plan(tmp_path, lengths)
    batches = _batches(lengths, 2**17)
    for chunk, (first, end) in enumerate(
        zip(plan.plan.chunk_batches[:-1], plan.plan.chunk_batches[1:], strict=True)
    ):
        ends = np.cumsum(np.concatenate([np.diff(b, prepend=0) for b in batches[first:end]]))
        expected, found = fit_chunk(ends, 2048), plan.read(chunk)
        assert np.array_equal(found.starts, expected.starts)
        assert np.array_equal(found.lengths, expected.lengths)
        assert np.array_equal(found.row_starts, expected.row_starts)
        assert found.num_rows == np.diff(plan.plan.chunks.row_starts)[chunk]


def test_a_plan_is_made_once_and_always_the_same(tmp_path):
    lengths = realistic_lengths(3000)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _plan(tmp_path / name, lengths)
    files = sorted(os.listdir(tmp_path / "one"))
    assert files == ["pack-text-000003-s2048.arrow", "pack-text-000003-s2048.json"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    again = open_plan(tmp_path / "one", KEY, batch_tokens=2**17, batches=_not_asked)
    assert again.plan.chunks.num_rows > 0


def _not_asked():
    raise AssertionError("the documents were read again")


def test_a_plan_of_other_documents_is_made_again(tmp_path):
    old = _plan(tmp_path, realistic_lengths(2000))
    other = _plan(tmp_path, realistic_lengths(3000), key=PlanKey("text", 3, 2048, "d" * 64))
    assert other.plan.chunks.num_rows > old.plan.chunks.num_rows


@pytest.mark.parametrize("place", [0.02, 0.2, 0.5, 0.9])
def test_every_damage_to_a_plan_is_told_or_mended(tmp_path, place):
    lengths = realistic_lengths(4000)
    _plan(tmp_path, lengths)
    for name in ("arrow", "json"):
        path = tmp_path / f"{KEY.stem}.{name}"
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[int(place * len(intact))] ^= 1
        path.write_bytes(damaged)
        if name == "json":
            _plan(tmp_path, lengths)
            assert path.read_bytes() == intact, "it is made again"
        elif place > 0.1:  # Arrow's header before it is not read
            plan = _plan(tmp_path, lengths)
            with pytest.raises(ShardError, match=r"chunk \d+ .*CRC32.*they are made again"):
                _read_all(plan)
        path.write_bytes(intact)


def _read_all(plan: BestFitPlan) -> None:
    for chunk in range(len(plan.plan.chunk_batches) - 1):
        plan.read(chunk)


def test_a_plan_that_is_cut_off_or_gone_is_told(tmp_path):
    plan = _plan(tmp_path, realistic_lengths(2000))
    path = tmp_path / f"{KEY.stem}.arrow"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ShardError, match="the file is shorter"):
        plan.read(0)
    path.unlink()
    with pytest.raises(ShardError, match="No such file"):
        plan.read(0)


def test_a_plan_of_an_older_version_is_made_again(tmp_path, monkeypatch):
    _plan(tmp_path, realistic_lengths(1500))
    monkeypatch.setattr(packing, "PLAN_VERSION", 0)
    made = []
    open_plan(
        tmp_path, KEY, batch_tokens=2**17, batches=lambda: made.append(1) or iter([np.array([9])])
    )
    assert made
