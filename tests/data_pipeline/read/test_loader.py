"""Batches, compared with a slow reading of the same shards; any layout, restart or growth of the folder
gives the same samples.
"""

import itertools
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_folder import END, Document, MadeFolder, documents, flip
from steps import digest, flat, seen, steps_of
from token_stream import tokens_of

from moebius.data_pipeline.data_config import DataConfig, Stage
from moebius.data_pipeline.errors import DataError, PreparationFailedError, ShardError
from moebius.data_pipeline.manifest import give_up, read_manifest
from moebius.data_pipeline.read import loader as loader_module
from moebius.data_pipeline.read import token_store
from moebius.data_pipeline.read.corruption import BatchFetcher
from moebius.data_pipeline.read.loader import Batch, Loader, validation_batches
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.data_pipeline.read.token_store import TokenStore

S = 16
GLOBAL_BATCH = 8
STAGES = (Stage(at_tokens=300 * S, weights={"a": 1.0, "c": 3.0}),)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    """Three sources: one with three segments, one with prompts."""
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b", "c"), frozenset({"c"}))
    for segment in range(3):
        folder.seal("a", documents(segment, 25), documents(10 + segment, 5), shards=2)
    folder.seal("b", documents(3, 40), documents(13, 12))
    folder.seal("c", documents(4, 50, prompts=True), documents(14, 20, prompts=True))
    return folder.complete()


@pytest.fixture
def small(prepared: Path) -> DataConfig:
    """The only source of the small corpus."""
    return DataConfig(directory=str(prepared), seq_len=16, seed=3)


def opened(data: DataConfig, **options: Any) -> Loader:
    return Loader(data, **(dict[str, Any](global_batch=4, micro_batch=1) | options))


def test_passes_are_those_of_the_source_that_is_repeated_most(made):
    samples = OrderedSamples(made.config(weights={"a": 1.0, "b": 9.0, "c": 1.0}), BatchFetcher())
    rows, [tokens] = 10_000, [samples.prepared.manifest.segments("b")[0].num_tokens("train")]
    passes = samples.passes(11 * rows)
    assert passes is not None
    count, source, size = passes
    assert (source, size) == ("b", tokens)
    assert count == pytest.approx(9 * rows * S / tokens, rel=1e-3)
    object.__setattr__(samples.prepared.manifest, "completion", None)
    assert samples.passes(11 * rows) is None  # its sources still grow


def test_samples_are_the_rows_of_the_streams_in_the_given_order(made):
    data = made.config(weights={"a": 2.0}, stages=STAGES, document_attention=True)
    refs = OrderedSamples(data, BatchFetcher()).order.refs_at(0, 40 * GLOBAL_BATCH)
    found = steps_of(data, 40)
    tokens, masks, ids = (
        [row for step in found for row in flat(step, name)]
        for name in ("tokens", "loss_mask", "document_ids")
    )
    columns = (refs.sources, refs.segments, refs.rows)
    assert set(refs.sources.tolist()) == {0, 1, 2}
    for place, (source, segment, row) in enumerate(
        zip(*map(np.ndarray.tolist, columns), strict=True)
    ):
        name = made.sources[source]
        span = slice(S * row, S * row + S + 1)
        assert tokens[place] == made.stream(name, segment)[span]
        assert masks[place] == made.learned(name, segment)[span][1:]
        owner = made.document_of(name, segment)[span]
        assert ids[place] == [number - owner[0] for number in owner]


@pytest.mark.fault("F23")
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("num_ranks", [2, 3, 12])
def test_any_number_of_ranks_sees_the_same_samples(made, num_ranks, packing):
    data = made.config(weights={"b": 0.3}, stages=STAGES, packing=packing)
    alone = steps_of(data, 12, global_batch=24)
    sizes = {"num_ranks": num_ranks, "micro_batch": 24 // num_ranks, "prefetch": num_ranks}
    together = steps_of(data, 12, global_batch=24, **sizes)
    assert seen(together) == seen(alone)
    assert {batch.first_sample for batch in together[3]} == {3 * 24}
    masks = [[flat(step, "loss_mask") for step in steps] for steps in (together, alone)]
    assert masks[0] == masks[1]
    assert together[0][0].equal_shapes
    assert together[0][0].tokens.shape == (1, 24 // num_ranks, S + 1)
    assert alone[0][0].tokens.shape == (24, 1, S + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resuming_at_every_step_is_continuing(made, packing):
    """Crosses the ends of an epoch, of segments and of a stage, with changing numbers of ranks."""
    stages = (Stage(at_tokens=200 * S, weights={"a": 2.0, "b": 3.0, "c": 1.0}),)
    data = made.config(weights={"a": 2.0}, stages=stages, packing=packing)
    whole = seen(steps_of(data, 38))
    for start in range(36):
        place = {"num_ranks": (1, 2, 4)[start % 3], "start_sample": start * GLOBAL_BATCH}
        assert seen(steps_of(data, 2, prefetch=1, **place)) == whole[start : start + 2]


def test_another_batch_goes_on_with_the_very_next_sample(made):
    data = made.config()
    every = [row for step in steps_of(data, 30) for row in flat(step)]
    ramp, sample = [], 0
    for global_batch in (2, 6, 10, 14):
        step = steps_of(data, 1, global_batch=global_batch, start_sample=sample)[0]
        ramp += flat(step)
        sample += global_batch
    assert ramp == every[:sample]


def test_the_digest_tells_samples_apart(small):
    assert len({digest(step) for step in steps_of(small, 20)}) == 20
    first, second = steps_of(small, 1)[0][0], steps_of(small, 1, start_sample=1)[0][0]
    # shifted by one sample: seven of eight rows in common
    assert flat([first])[1:] == flat([second])[:-1]
    assert first.digest != second.digest


def test_a_digest_tells_other_tokens_under_the_same_row_numbers(tmp_path):
    """Changes one token far from the first rows: the whole segment's content counts."""
    found = []
    for last in (1, 2):
        folder = MadeFolder(tmp_path / str(last))
        folder.seal("text", [*documents(0, 60), Document((last, END))]).complete()
        found.append(seen(steps_of(folder.config(), 5)))
    assert all(one[1] != other[1] for one, other in zip(*found, strict=True))
    assert any(one[0] == other[0] for one, other in zip(*found, strict=True))


# ---- a folder that grows


def test_every_source_learns_that_a_folder_is_complete(tmp_path):
    """Also without a new segment: a source that asks later would otherwise wait forever."""
    folder = MadeFolder(tmp_path / "d", ("a", "b"))
    folder.seal("a", documents(0, 20)).seal("b", documents(1, 60))
    config = folder.config(packing="best_fit")
    samples = OrderedSamples(config, BatchFetcher())
    assert not samples.prepare(0, 8)
    assert samples.prepare(0, 2000) == "segment 1 of source 'a' is not sealed yet"
    folder.complete()
    assert not samples.prepare(0, 2000)


@pytest.mark.fault("F13")
def test_all_ranks_wait_at_the_same_step_and_say_what_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(loader_module, "_SAY_EVERY_S", 0.1)
    folder = MadeFolder(tmp_path / "d").seal("text", documents(0, 20))
    rows = (len(folder.stream("text", 0)) - 1) // S
    options: dict[str, Any] = {"global_batch": 8, "poll_s": 0.01, "prefetch": 100, "num_ranks": 4}
    loaders = [opened(folder.config(), rank=rank, **options) for rank in range(4)]
    try:
        for loader in loaders:
            for _ in range(rows // 8):
                next(loader)
            assert not loader.wait_until_ready(0.1)
            assert loader.wait_reason == "segment 1 of source 'text' is not sealed yet"
        later = threading.Timer(0.3, lambda: folder.seal("text", documents(1, 20)))
        later.start()
        with caplog.at_level(logging.WARNING):
            batches = [next(loader) for loader in loaders]
        later.join()
        assert {batch.first_sample for batch in batches} == {rows // 8 * 8}
        assert loaders[0].wait_s > 0.1
        assert "still waiting for data: segment 1 of source 'text' is not sealed yet" in caplog.text
    finally:
        for loader in loaders:
            loader.close()


def test_a_source_that_may_not_be_repeated_ends_all_ranks_at_the_same_step(made):
    data = made.config(max_epochs={"b": 1}, weights={"b": 5.0})
    rows = (len(made.stream("b", 0)) - 1) // S
    errors = []
    for rank in range(4):
        with opened(data, global_batch=8, rank=rank, num_ranks=4) as loader:
            steps: list[Batch] = []
            with pytest.raises(DataError) as caught:
                steps.extend(loader)
            errors.append((len(steps), str(caught.value)))
    assert len(set(errors)) == 1
    assert 0 <= rows - errors[0][0] * 8 * 5 / 7 < 12
    assert f"source 'b' has {rows} rows and max_epochs=1: they are used up before" in errors[0][1]
    with opened(data) as loader:
        loader.samples.check_enough(rows)
        with pytest.raises(DataError, match=r"used up before sample 5000"):
            loader.samples.check_enough(5000)


# ---- positions


def test_the_position_does_not_depend_on_where_the_data_is_or_on_the_layout(made, tmp_path):
    moved = shutil.copytree(made.folder, tmp_path / "moved")
    data = made.config()
    with opened(data) as loader, opened(data, num_ranks=2, rank=1, start_sample=9) as other:
        assert other.samples.position(500) == loader.samples.position(500)
        with opened(data.model_copy(update={"directory": str(moved)})) as elsewhere:
            elsewhere.check_position(loader.samples.position(500))


@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 4}, r"seed: saved 3, now 4"),
        ({"seq_len": 17}, r"seq_len: saved 16, now 17"),
        ({"packing": "best_fit"}, r"packing: saved 'concat', now 'best_fit 1'"),
        ({"stages": STAGES}, r"stages: saved \[\], now \[\{'at_tokens': 4800"),
        ({"weights": {"a": 2.0}}, r"weights\.a: saved 1\.0, now 2\.0"),
        ({"max_epochs": {"b": 7}}, r"max_epochs\.b: saved 0, now 7"),
    ],
)
def test_a_position_of_another_order_is_refused_with_the_difference(made, change, difference):
    said = rf"\(.*{difference}.*\).*or set data.override_position=true"
    with opened(made.config()) as saving, opened(made.config(**change)) as loader:
        position = saving.samples.position(100)
        with pytest.raises(DataError, match=said):
            loader.check_position(position)
        assert len(loader.samples.differences(position)) == 1
        assert not saving.samples.differences(position)


def _of_segments(folder: Path, *seeds: int) -> MadeFolder:
    """Returns a folder that grows, with a segment for each seed."""
    made = MadeFolder(folder)
    for seed in seeds:
        made.seal("text", documents(seed, 30))
    return made


def _num_rows(made: MadeFolder, segment: int) -> int:
    return (len(made.stream("text", segment)) - 1) // S


def test_a_position_knows_only_the_segments_it_has_reached(tmp_path):
    first = _of_segments(tmp_path / "first", 0, 1)
    other = _of_segments(tmp_path / "other", 0, 2).complete()
    in_segment_0, in_both = _num_rows(first, 0), _num_rows(first, 0) + _num_rows(first, 1)
    with opened(first.config()) as saving, opened(other.config()) as loader:
        loader.check_position(saving.samples.position(in_segment_0))  # later ones are not read
        with pytest.raises(DataError, match=r"segments.text.sha256: saved"):
            loader.check_position(saving.samples.position(in_segment_0 + 1))
        later = saving.samples.position(in_both)
    grown = first.seal("text", documents(3, 30)).complete()
    with opened(grown.config()) as loader:
        loader.check_position(later)  # the beginning is the same
        again = loader.samples.position(10 * in_both)  # a second epoch fixes the end of the first
    fewer = _of_segments(tmp_path / "fewer", 0, 1).complete()
    with opened(fewer.config()) as loader:
        with pytest.raises(DataError, match=r"segments.text.number: saved 3, now 2"):
            loader.check_position(again)


def test_a_folder_that_is_made_again_is_awaited_up_to_where_the_checkpoint_had_read(tmp_path):
    """A folder deleted and prepared again during a run may have fewer sealed segments than were read."""
    before = _of_segments(tmp_path / "before", 0, 1)
    start = (_num_rows(before, 0) + _num_rows(before, 1)) // 8 * 8
    with opened(before.config()) as saving:
        position = saving.samples.position(start)
    resumed: dict[str, Any] = {"start_sample": start, "continues": position, "poll_s": 0.01}
    again = _of_segments(tmp_path / "again", 0)
    with opened(again.config(), **resumed) as loader:
        assert not loader.wait_until_ready(0.1)
        assert loader.wait_reason == (
            "segment 1 of source 'text', which the checkpoint has read, is not sealed yet"
        )
        again.seal("text", documents(1, 30)).seal("text", documents(2, 30)).complete()
        there = next(loader)
    with opened(again.config(), start_sample=start) as loader:
        assert next(loader).digest == there.digest

    other = _of_segments(tmp_path / "other", 0)
    with opened(other.config(), **resumed) as loader:
        other.seal("text", documents(2, 30))
        with pytest.raises(DataError, match=r"order differ \(segments.text.sha256: saved"):
            next(loader)
    fewer = _of_segments(tmp_path / "fewer", 0)
    give_up(fewer.folder, "the disk is full")
    with pytest.raises(PreparationFailedError, match=r"segment 1 of source 'text' .*disk is full"):
        opened(fewer.config(), **resumed)
    fewer.complete()
    with pytest.raises(DataError, match=r"segments.text.number: saved 2, now 1"):
        opened(fewer.config(), **resumed)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"global_batch": 6, "micro_batch": 4},
            "global_batch=6 .* micro_batch=4 = 4 sequences",
        ),
        ({}, {"num_ranks": 3}, "global_batch=4 is not a multiple of num_ranks=3"),
        ({"seq_len": 10**6}, {}, r"'text' of .* has \d+ tokens, fewer than the 1000001 of one row"),
        ({"directory": "/nowhere"}, {}, "holds no prepared data; run `moebius prepare`"),
        ({"weights": {"a": 1}}, {}, "name a: the folder's sources are text"),
        ({"max_epochs": {"a": 1}}, {}, "name a: the folder's sources are text"),
    ],
)
def test_what_cannot_be_loaded_is_refused(small, change, options, message):
    with pytest.raises(DataError, match=message):
        opened(small.model_copy(update=change), **options)
    assert not _loader_threads()


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_closing_ends_the_thread_whether_it_waits_or_not(small):
    loader = opened(small, prefetch=1)
    next(loader)
    loader.close()
    loader.close()
    assert not _loader_threads()
    with pytest.raises(ValueError, match="this loader is closed"):
        next(loader)


@pytest.mark.fault("F13")
def test_a_store_that_blocks_is_waited_for_and_named(small, monkeypatch, caplog):
    """Nothing fails, and `wait_reason` tells what is being read."""
    monkeypatch.setattr(loader_module, "_SAY_EVERY_S", 0.1)
    blocked = threading.Event()
    read = TokenStore.read
    monkeypatch.setattr(
        TokenStore, "read", lambda store, *of, **how: blocked.wait(30) and read(store, *of, **how)
    )
    with opened(small) as loader:
        threading.Timer(0.5, blocked.set).start()
        with caplog.at_level(logging.WARNING):
            batch = next(loader)
    assert batch.tokens.shape == (4, 1, S + 1)
    assert loader.wait_s >= 0.4
    told = [record for record in caplog.records if "still waiting for data" in record.message]
    assert len(told) >= 3
    assert all("reading record batch" in record.message for record in told[:3])


def test_a_thread_that_is_stuck_is_left_behind(small, monkeypatch, caplog):
    monkeypatch.setattr(loader_module, "_CLOSE_S", 0.1)
    stuck = threading.Event()
    monkeypatch.setattr(TokenStore, "read", lambda store, *of, **how: stuck.wait(30))
    loader = opened(small)
    assert not loader.wait_until_ready(0.05)
    loader.close()
    assert "is still reading record batch" in caplog.text
    stuck.set()
    loader._thread.join()


def test_an_error_of_the_thread_is_raised_by_next_every_time(small, prepared, tmp_path):
    """It names a damaged batch by its number in its file."""
    folder = Path(shutil.copytree(prepared, tmp_path / "d"))
    flip(folder, "text", 0, read_manifest(folder).of("train")[0].num_batches + 1)
    data = small.model_copy(update={"directory": str(folder)})
    with opened(data, global_batch=1) as loader:
        with pytest.raises(ShardError, match=r"text.train-00001.tok.arrow, record batch 1 .*CRC32"):
            list(itertools.islice(loader, 10_000))
        assert loader.ready()
        with pytest.raises(ShardError, match="record batch 1"):
            next(loader)
    assert not _loader_threads()


# ---- validation


def _row(stream: np.ndarray, row: int) -> list[int]:
    return stream[S * row : S * row + S + 1].tolist()


@pytest.mark.parametrize(("group", "max_rows"), [(8, None), (8, 13), (8, 3), (1, 5), (1, 10**6)])
def test_members_of_a_validation_group_are_far_apart_and_the_same_on_every_layout(
    prepared, group, max_rows
):
    """Groups of one are rows that are spread evenly over the split; every rank has as many batches."""
    stream = tokens_of(prepared, "validation")
    num_rows = (len(stream) - 1) // S
    count = min(max_rows or num_rows, num_rows)
    num_groups = -(-count // group)
    assert num_rows % 8  # the last group of eight is not full
    expected = []
    for j in range(num_groups):
        places = [j + member * num_groups for member in range(group)]
        rows = [_row(stream, place % count * num_rows // count) for place in places]
        expected.append((rows, [place < count for place in places]))
    assert sum(sum(valid) for _, valid in expected) == count
    for num_ranks, size in ((1, 8), (1, 24), (2, 16), (3, 8), (5, 7 if group == 1 else 8)):
        options: dict[str, Any] = {"batch_size": size, "max_rows": max_rows, "num_ranks": num_ranks}
        options |= {"seq_len": S, "sequences_per_group": group}
        per_rank = [validation_batches(prepared, rank=rank, **options) for rank in range(num_ranks)]
        found = []
        for batch in itertools.chain(*zip(*per_rank, strict=True)):
            assert batch.tokens.shape == (size, S + 1)
            for first in range(0, size, group):
                members = slice(first, first + group)
                found.append((batch.tokens[members].tolist(), batch.valid[members].tolist()))
        assert [(rows, valid) for rows, valid in found if any(valid)] == expected


def test_validation_on_less_than_a_row_is_refused_at_once(prepared):
    with pytest.raises(DataError, match=r"raise prepare.validation_fraction"):
        validation_batches(prepared, seq_len=10**6, batch_size=2, rank=0, num_ranks=1)


def test_a_loader_names_a_missing_manifest_instead_of_waiting(tmp_path):
    made = MadeFolder(tmp_path / "made").seal("text", documents(0, 3))
    with opened(made.config(), poll_s=0.01) as loader:
        (made.folder / "manifest-000003.json").write_text("{}")
        with pytest.raises(ShardError, match=r"manifest-000002.json is missing"):
            [next(loader) for _ in iter(lambda: loader.wait_until_ready(5), False)]


def test_a_shard_is_checked_before_it_is_decoded(small, monkeypatch):
    """A decoder may do anything with damaged bytes."""

    def decoded(*arguments):
        raise AssertionError("decoded before the CRC was compared")

    monkeypatch.setattr(token_store, "crc32", lambda message: 0)
    monkeypatch.setattr(token_store, "decode_batch", decoded)
    with opened(small) as loader, pytest.raises(ShardError, match="CRC32 is 00000000"):
        next(loader)
