"""Batches against a slow reading of the same shards; the same samples for any layout, restart or
cache.
"""

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from moebius.data_pipeline import loader as loader_module
from moebius.data_pipeline import shards
from moebius.data_pipeline.errors import DataError, ShardError
from moebius.data_pipeline.loader import Batch, Loader, RowReader, validation_batches
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.mixture import Mixture, WeightStage
from moebius.data_pipeline.order import SampleOrder, SourceRows
from moebius.data_pipeline.packing import WINDOW_BATCHES, concat_plan
from moebius.data_pipeline.shards import TokenStore, TokenStream

S = 16
GLOBAL_BATCH = 8


def _stream(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split, read by Arrow through the files' own footers."""
    tables = [
        pa.ipc.open_file(str(folder / entry.name)).read_all()
        for entry in read_manifest(folder).of(split)
    ]
    return np.array(
        [token for table in tables for tokens in table["tokens"].to_pylist() for token in tokens]
    )


def _rows_in_order(folder: Path, count: int) -> np.ndarray:
    store = TokenStream(folder, "train")
    chunks = concat_plan(store.batch_starts, S, store.manifest.batch_tokens).chunks
    rows = {"text": SourceRows((chunks.num_rows,), complete=True)}
    mixture = Mixture(("text",), [WeightStage(0, {"text": 1.0})], seed=3)
    return SampleOrder(mixture, rows, lambda *_: chunks, seed=3).refs_at(0, count).rows


def _row(stream: np.ndarray, row: int) -> list[int]:
    return stream[S * row : S * row + S + 1].tolist()


def _steps(
    folder: Path, count: int, *, num_ranks: int = 1, micro_batch: int = 2, **options: Any
) -> list[list[Batch]]:
    """`count` steps, each with the batches of all ranks."""
    loaders = [
        Loader(
            folder,
            seq_len=S,
            global_batch=GLOBAL_BATCH,
            micro_batch=micro_batch,
            rank=rank,
            num_ranks=num_ranks,
            **(dict[str, Any](seed=3) | options),
        )
        for rank in range(num_ranks)
    ]
    try:
        return [[next(loader) for loader in loaders] for _ in range(count)]
    finally:
        for loader in loaders:
            loader.close()


def _samples(step: list[Batch]) -> list[list[int]]:
    """The global batch in order: ranks one after the other, each with its micro-batches one after
    the other.
    """
    return np.concatenate([batch.tokens.reshape(-1, S + 1) for batch in step]).tolist()


def _digest(step: list[Batch]) -> int:
    return sum(batch.digest for batch in step) % 2**31


@pytest.mark.parametrize("order_samples", [1, 20, 4096])
def test_samples_are_the_rows_of_the_stream_in_the_given_order(
    prepared, monkeypatch, order_samples
):
    monkeypatch.setattr(loader_module, "_ORDER_SAMPLES", order_samples)
    stream = _stream(prepared, "train")
    rows = _rows_in_order(prepared, 40 * GLOBAL_BATCH)
    found = [sample for step in _steps(prepared, 40) for sample in _samples(step)]
    assert found == [_row(stream, row) for row in rows.tolist()]


def test_an_epoch_has_every_row_once(prepared):
    stream = _stream(prepared, "train")
    num_rows = (len(stream) - 1) // S
    steps = _steps(prepared, num_rows // GLOBAL_BATCH + 2)
    epoch = [sample for step in steps for sample in _samples(step)][:num_rows]
    assert sorted(epoch) == sorted(_row(stream, row) for row in range(num_rows))


def test_the_shape_and_the_type(prepared):
    ((batch,),) = _steps(prepared, 1, micro_batch=2)
    assert batch.tokens.shape == (4, 2, S + 1)
    assert batch.tokens.dtype == np.int64
    assert batch.first_sample == 0


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_any_number_of_ranks_sees_the_same_samples(prepared, num_ranks, micro_batch):
    alone = _steps(prepared, 5)
    together = _steps(prepared, 5, num_ranks=num_ranks, micro_batch=micro_batch)
    assert [_samples(step) for step in together] == [_samples(step) for step in alone]
    assert [_digest(step) for step in together] == [_digest(step) for step in alone]
    assert {batch.first_sample for batch in together[3]} == {3 * GLOBAL_BATCH}


@pytest.mark.parametrize("start_step", [1, 7, 120])
def test_resuming_is_continuing(prepared, start_step):
    whole = _steps(prepared, start_step + 3)[start_step:]
    resumed = _steps(prepared, 3, num_ranks=2, start_sample=start_step * GLOBAL_BATCH)
    assert [_samples(step) for step in resumed] == [_samples(step) for step in whole]
    assert [_digest(step) for step in resumed] == [_digest(step) for step in whole]
    assert resumed[0][0].first_sample == start_step * GLOBAL_BATCH


def test_the_digest_tells_samples_apart(prepared):
    digests = [_digest(step) for step in _steps(prepared, 20)]
    assert len(set(digests)) == 20
    assert digests != [_digest(step) for step in _steps(prepared, 20, seed=4)]
    first, second = _steps(prepared, 1)[0][0], _steps(prepared, 1, start_sample=1)[0][0]
    assert (
        _samples([first])[1:] == _samples([second])[:-1]
    )  # shifted by one sample: seven of eight rows in common
    assert first.digest != second.digest


def test_the_digest_sees_the_tokens(prepared, monkeypatch):
    honest = _steps(prepared, 1)[0][0]
    read_tokens = TokenStore.read_tokens

    def with_other_tokens(store, batch):
        return read_tokens(store, batch) ^ 1

    monkeypatch.setattr(TokenStore, "read_tokens", with_other_tokens)
    assert _steps(prepared, 1)[0][0].digest != honest.digest


def test_what_is_kept_decoded_changes_nothing_but_the_number_of_reads(prepared, monkeypatch):
    reads = []
    read_tokens = TokenStore.read_tokens
    monkeypatch.setattr(
        TokenStore,
        "read_tokens",
        lambda store, batch: reads.append(batch) or read_tokens(store, batch),
    )
    store = TokenStream(prepared, "train")
    reader = RowReader(store, S)
    rows = _rows_in_order(prepared, reader.num_rows)
    expected = reader.read(rows)
    assert (
        len(reads) == store.num_batches < 3 * WINDOW_BATCHES
    )  # all of it fits: each is decoded once
    forgetful = RowReader(store, S)
    forgetful._keep_bytes = 1
    assert np.array_equal(forgetful.read(rows), expected)
    assert len(forgetful._decoded) == 1
    assert len(reads) > 5 * store.num_batches


def test_the_position_does_not_depend_on_where_the_data_is(prepared, tmp_path):
    moved = shutil.copytree(prepared, tmp_path / "moved")
    assert _spec_hash(moved) == _spec_hash(prepared)


def _open(folder, **options: Any) -> Loader:
    defaults: dict[str, Any] = {
        "seq_len": S,
        "global_batch": 4,
        "micro_batch": 1,
        "rank": 0,
        "num_ranks": 1,
        "seed": 3,
    }
    return Loader(folder, **(defaults | options))


def _spec_hash(folder, **options) -> str:
    with _open(folder, **options) as loader:
        return loader.spec_hash


def test_a_position_of_the_same_order_is_accepted_whatever_the_layout(prepared):
    with _open(prepared) as loader:
        loader.check_position(
            _spec_hash(prepared, global_batch=8, micro_batch=2, rank=1, num_ranks=2, start_sample=9)
        )


@pytest.mark.parametrize("change", [{"seed": 4}, {"seq_len": 17}, {"split": "validation"}])
def test_a_position_of_another_order_is_refused_with_the_difference(prepared, change):
    with _open(prepared, **change) as other, _open(prepared) as loader:
        name, value = next(iter(change.items()))
        with pytest.raises(
            DataError,
            match=rf"{name}: saved {value!r}, now {loader.spec[name]!r}.*Resume with the same",
        ):
            loader.check_position(other.spec_hash, other.spec)
        with pytest.raises(DataError, match=rf"this run has .*{name}={loader.spec[name]}"):
            loader.check_position(other.spec_hash)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch": 6, "micro_batch": 4},
            "global_batch=6 is not a multiple of num_ranks=1 x micro_batch=4 = 4",
        ),
        ({"num_ranks": 3}, "global_batch=4 is not a multiple of num_ranks=3"),
        ({"rank": 2, "num_ranks": 2}, "rank=2 < num_ranks=2"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"start_sample": -1}, "start_sample=-1"),
        ({"prefetch": 0}, "prefetch=0"),
        (
            {"seq_len": 10**6},
            r"split 'train' of .* has \d+ tokens, fewer than the 1000001 of one row",
        ),
        ({"split": "test"}, "split 'test' of .* has 0 tokens"),
    ],
)
def test_what_cannot_be_loaded_is_refused(prepared, options, message):
    with pytest.raises(DataError, match=message):
        _open(prepared, **options)
    assert not _loader_threads()


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_closing_ends_the_thread_whether_it_waits_or_not(prepared):
    loader = _open(prepared, prefetch=1)
    next(loader)
    loader.close()
    loader.close()
    assert not _loader_threads()
    with pytest.raises(ValueError, match="this loader was closed"):
        next(loader)


def test_waiting_is_measured(prepared, monkeypatch):
    import time

    read_tokens = TokenStore.read_tokens
    monkeypatch.setattr(
        TokenStore,
        "read_tokens",
        lambda store, batch: time.sleep(0.02) or read_tokens(store, batch),
    )
    with _open(prepared) as loader:
        next(loader)
        assert loader.wait_s >= 0.015


def test_an_error_of_the_thread_is_raised_by_next_every_time(prepared, tmp_path):
    folder = Path(shutil.copytree(prepared, tmp_path / "d"))
    store = TokenStore(folder, "text", 0, "train")
    path = folder / store.entries[0].name
    damaged = bytearray(path.read_bytes())
    damaged[int(store._index["offset"][3]) + 64] ^= 16
    path.write_bytes(damaged)
    with _open(folder, global_batch=1) as loader:
        with pytest.raises(ShardError, match=r"text.train-00000.tok.arrow, record batch 3 .*CRC32"):
            list(itertools.islice(loader, loader.num_rows))
        with pytest.raises(ShardError, match="record batch 3"):
            next(loader)
    assert not _loader_threads()


# ---- validation


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_validation_has_every_row_once_and_as_many_batches_on_every_rank(
    prepared, num_ranks, batch_size
):
    stream = _stream(prepared, "validation")
    num_rows = (len(stream) - 1) // S
    options = {"seq_len": S, "batch_size": batch_size, "num_ranks": num_ranks}
    per_rank = [
        list(validation_batches(prepared, rank=rank, **options)) for rank in range(num_ranks)
    ]
    assert {len(batches) for batches in per_rank} == {-(-num_rows // (num_ranks * batch_size))}
    assert {batch.tokens.shape for batches in per_rank for batch in batches} == {
        (batch_size, S + 1)
    }
    rows = [
        row.tolist()
        for batches in per_rank
        for batch in batches
        for row in batch.tokens[batch.valid]
    ]
    assert sorted(rows) == sorted(_row(stream, row) for row in range(num_rows))
    padding = [
        row.tolist()
        for batches in per_rank
        for batch in batches
        for row in batch.tokens[~batch.valid]
    ]
    assert all(row == _row(stream, num_rows - 1) for row in padding)


@pytest.mark.parametrize("max_rows", [1, 5, 10**6])
def test_validation_on_some_rows_spread_over_the_split(prepared, max_rows):
    stream = _stream(prepared, "validation")
    num_rows = (len(stream) - 1) // S
    batches = validation_batches(
        prepared, seq_len=S, batch_size=3, rank=0, num_ranks=1, max_rows=max_rows
    )
    rows = [row.tolist() for batch in batches for row in batch.tokens[batch.valid]]
    count = min(max_rows, num_rows)
    assert rows == [_row(stream, n * num_rows // count) for n in range(count)]


def _groups(
    folder: Path, group: int, num_ranks: int, batch_size: int, **given: Any
) -> list[tuple[list, list[bool]]]:
    """Members and their validity of every group that has a valid member, in the order of the pass."""
    options: dict[str, Any] = {
        "seq_len": S,
        "batch_size": batch_size,
        "num_ranks": num_ranks,
        "sequences_per_group": group,
    } | given
    per_rank = [validation_batches(folder, rank=rank, **options) for rank in range(num_ranks)]
    found = []
    for batches in zip(*per_rank, strict=True):
        for batch in batches:
            for first in range(0, batch_size, group):
                members = slice(first, first + group)
                found.append((batch.tokens[members].tolist(), batch.valid[members].tolist()))
    return [(rows, valid) for rows, valid in found if any(valid)]


@pytest.mark.parametrize("max_rows", [None, 13, 3])
def test_members_of_a_validation_group_are_far_apart_and_the_same_on_every_layout(
    prepared, max_rows
):
    stream = _stream(prepared, "validation")
    num_rows = (len(stream) - 1) // S
    count = min(max_rows or num_rows, num_rows)
    num_groups = -(-count // 8)
    assert num_rows % 8  # the last group is not full
    expected = []
    for j in range(num_groups):
        places = [j + member * num_groups for member in range(8)]
        rows = [_row(stream, place % count * num_rows // count) for place in places]
        expected.append((rows, [place < count for place in places]))
    assert sum(sum(valid) for _, valid in expected) == count
    for num_ranks, batch_size in ((1, 8), (1, 24), (2, 16), (3, 8)):
        assert _groups(prepared, 8, num_ranks, batch_size, max_rows=max_rows) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 1}, "rank=1 < num_ranks=1"),
        ({"max_rows": 0}, "max_rows=0"),
        (
            {"batch_size": 6, "sequences_per_group": 4},
            "batch_size=6 must be a multiple of sequences_per_group=4",
        ),
        ({"seq_len": 10**6}, "raise validation_fraction"),
    ],
)
def test_validation_that_cannot_be_is_refused_at_once(prepared, options, message):
    with pytest.raises(DataError, match=message):
        validation_batches(
            prepared, **({"seq_len": S, "batch_size": 2, "rank": 0, "num_ranks": 1} | options)
        )


def test_a_shard_is_checked_before_it_is_decoded(prepared, monkeypatch):
    """Not after: a decoder that is fed damaged bytes may do anything."""

    decode_batch = shards.decode_batch

    def decoded(message, schema, **limits):
        if "tokens" in schema.names:  # an index was checked by its own hash
            raise AssertionError("decoded before the CRC was compared")
        return decode_batch(message, schema, **limits)

    monkeypatch.setattr(shards, "crc32", lambda message: 0)
    monkeypatch.setattr(shards, "decode_batch", decoded)
    with _open(prepared) as loader, pytest.raises(ShardError, match="CRC32 is 00000000"):
        next(loader)
