"""F17 and more: flipped bits, truncated and missing files, for each policy; replacements are repeated
by any number of ranks and after any restart.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from made_folder import MadeFolder, documents, flip
from steps import seen, steps_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import DataError, ShardError
from moebius.data_pipeline.read import corruption
from moebius.data_pipeline.read.corruption import (
    BatchFetcher,
    SkipList,
    SkippedBatch,
    SkippedRow,
    WhenCorrupt,
)
from moebius.data_pipeline.read.loader import validation_batches
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.data_pipeline.read.token_store import TokenStore

S = 16
STEPS = 40


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(corruption, "_PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> MadeFolder:
    made = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b"), frozenset({"b"}))
    made.seal("a", documents(0, 80), documents(8, 30), shards=2).seal("a", documents(1, 40))
    return made.seal("b", documents(2, 70, prompts=True)).complete()


@pytest.fixture
def made(intact, tmp_path) -> MadeFolder:
    """Returns a copy to damage."""
    return intact.copied(tmp_path / "data")


def run(
    data: DataConfig, *, steps: int = STEPS, folder: Path | None = None, **options: Any
) -> list[tuple[list, int, int]]:
    """Returns samples and digest of every step; `folder` keeps the skipped rows."""
    return seen(steps_of(data, steps, skip_folder=folder, **options))


def lost_rows(made: MadeFolder, source: str, segment: int, batch: int) -> set[int]:
    store = TokenStore(made.folder, source, segment, "train", check_sizes=False)
    begin, end = store.batch_starts[batch : batch + 2].tolist()
    rows = (store.num_tokens - 1) // S
    return {row for row in range(rows) if S * row < end and S * row + S + 1 > begin}


# ---- fail and refetch


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


DAMAGES: dict[str, tuple[Any, str]] = {
    "a bit": (lambda made: flip(made.folder, "a", 0, 2), r"record batch 2 .*CRC32"),
    "cut off": (
        lambda made: _cut_off(made.folder / "a.train-00001.tok.arrow"),
        r"a.train-00001.tok.arrow( has|, record batch)",
    ),
    "gone": (
        lambda made: (made.folder / "a.train-00000.tok.arrow").unlink(),
        r"a.train-00000.tok.arrow.*(missing|No such file)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_by_default_damage_ends_the_run_and_is_named(made, damage):
    do_damage, message = DAMAGES[damage]
    do_damage(made)
    with pytest.raises(ShardError, match=message):
        run(made.config())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_replica_heals_and_nobody_notices(made, intact, tmp_path, damage, packing, caplog):
    data = made.config(
        when_corrupt="refetch", replicas=("/nowhere", str(intact.folder)), packing=packing
    )
    expected = run(data)  # also makes the plans
    assert "data.replicas: /nowhere holds no prepared data" in caplog.text
    DAMAGES[damage][0](made)
    with caplog.at_level(logging.WARNING):
        assert run(data, num_ranks=2) == expected
    assert "record batch" in caplog.text


def test_damage_that_goes_away_is_read_again(made, monkeypatch, caplog):
    expected = run(made.config())
    read, failed = TokenStore._fetch, set()

    def once_damaged(store, batch):
        if (store.segment, batch) not in failed:
            failed.add((store.segment, batch))
            raise ShardError(f"batch {batch} was torn on the way")
        return read(store, batch)

    monkeypatch.setattr(TokenStore, "_fetch", once_damaged)
    assert run(made.config(when_corrupt="refetch")) == expected
    assert len(failed) > 10


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_whole_replica_refetching_fails(made, damage):
    do_damage, message = DAMAGES[damage]
    do_damage(made)
    data = made.config(when_corrupt="refetch", replicas=(str(made.folder),))
    with pytest.raises(ShardError, match=message + r".*read 3 times and from 1 replicas"):
        run(data)


# ---- skip


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_lost_rows_are_replaced_by_others_of_their_window(made, tmp_path, packing):
    data = made.config(when_corrupt="skip", packing=packing)
    whole = run(data, folder=tmp_path / "skipped")
    assert not (tmp_path / "skipped").exists(), "nothing was lost"
    samples = OrderedSamples(data, BatchFetcher())
    samples.prepare(0, 8 * STEPS)
    refs = samples.order.refs_at(0, 8 * STEPS)
    flip(made.folder, "a", 0, 2)
    found = run(data, folder=tmp_path / "skipped")
    rows = SkipList(tmp_path / "skipped").rows
    assert rows
    changed = [
        place
        for place in range(8 * STEPS)
        if found[place // 8][0][place % 8] != whole[place // 8][0][place % 8]
    ]
    assert {row.sample for row in rows.values()} >= set(changed)
    for row in rows.values():
        if row.sample < 8 * STEPS:
            mine = refs[slice(row.sample, row.sample + 1)]
            assert (int(mine.sources[0]), int(mine.segments[0])) == (0, 0)
            assert int(mine.rows[0]) == row.row != row.replaced_by
    if packing == "concat":
        assert {row.row for row in rows.values()} == lost_rows(made, "a", 0, 2)
        stream = made.stream("a", 0)
        for row in (row for row in rows.values() if row.sample < 8 * STEPS):
            by = row.replaced_by
            assert found[row.sample // 8][0][row.sample % 8] == stream[S * by : S * by + S + 1]
            assert by not in lost_rows(made, "a", 0, 2)
    different = [one[1] != other[1] for one, other in zip(found, whole, strict=True)]
    assert different == [
        any(row.sample // 8 == step for row in rows.values()) for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("damage", "packing"),
    [
        *(("a bit", packing) for packing in ("concat", "best_fit")),
        ("cut off", "concat"),
        ("gone", "concat"),
    ],
)
def test_all_ranks_and_every_restart_decide_alike(made, tmp_path, damage, packing):
    data = made.config(when_corrupt="skip", packing=packing, max_skipped_batches=99)
    run(data, steps=1)  # makes the plans
    flip(made.folder, "a", 0, 7)
    flip(made.folder, "b", 0, 4)
    DAMAGES[damage][0](made)
    expected = run(data, folder=tmp_path / "1")
    for num_ranks in (2, 4, 8):
        folder = tmp_path / str(num_ranks)
        assert run(data, num_ranks=num_ranks, folder=folder) == expected
        resumed = run(data, start_sample=8 * 11, steps=STEPS - 11, folder=folder)
        assert resumed == expected[11:]
    one, four = SkipList(tmp_path / "1").rows, SkipList(tmp_path / "4").rows
    common = one.keys() & four.keys()
    assert len(common) > 10
    assert all(one[key] == four[key] for key in common)


def test_a_decision_is_repeated_though_the_file_is_whole_again(made, intact, tmp_path):
    data = made.config(when_corrupt="skip")
    flip(made.folder, "a", 0, 2)
    flip(made.folder, "a", 0, 5)
    expected = run(data, folder=tmp_path / "skipped", num_ranks=2)
    whole = intact.config(when_corrupt="skip")
    assert run(whole, folder=tmp_path / "skipped", num_ranks=4) == expected
    assert run(whole) != expected


def test_a_shard_that_is_gone_is_too_much(made, tmp_path):
    (made.folder / "a.train-00000.tok.arrow").unlink()
    with pytest.raises(
        DataError, match=r"4 record batches are damaged, more than .*max_skipped_batches=3"
    ):
        run(made.config(when_corrupt="skip", max_skipped_batches=3), folder=tmp_path / "skipped")
    batches = SkipList(tmp_path / "skipped").batches
    assert len(batches) == 3
    assert "No such file" in next(iter(batches.values())).error
    assert len(run(made.config(when_corrupt="skip", max_skipped_batches=30))) == STEPS


def test_damaged_validation_rows_do_not_count(made):
    def count(when: WhenCorrupt) -> list[list]:
        fetch = BatchFetcher(when)
        found = validation_batches(
            made.folder, seq_len=S, batch_size=4, rank=0, num_ranks=1, fetch=fetch
        )
        return [row for batch in found for row in batch.tokens[batch.valid].tolist()]

    every = count("skip")
    flip(made.folder, "a", 0, 1, split="validation")
    remaining = count("skip")
    assert 0 < len(remaining) < len(every)
    assert [row for row in every if row in remaining] == remaining
    with pytest.raises(ShardError, match="CRC32"):
        count("fail")


def test_every_row_lost_is_told(tmp_path):
    made = MadeFolder(tmp_path / "d").seal("text", documents(0, 20)).complete()
    for batch in range(TokenStore(made.folder, "text", 0, "train").num_batches):
        flip(made.folder, "text", 0, batch)
    with pytest.raises(
        DataError, match=r"all rows of a window of segment 0 of source 'text' are lost"
    ):
        run(made.config(when_corrupt="skip", max_skipped_batches=99))


def test_an_index_that_is_lost_cannot_be_passed_over(made):
    (made.folder / "a.train-00000.idx.arrow").unlink()
    with pytest.raises(ShardError, match=r"a.train-00000.idx.arrow is missing"):
        run(made.config(when_corrupt="skip"))


# ---- the list itself


ROW = SkippedRow("a", 0, 1, 2, 33, 4)
BATCH = SkippedBatch("a", 1, 7, "its CRC32 differs")


def test_the_list_survives_a_torn_line_and_is_read_by_all_ranks(tmp_path, caplog):
    SkipList(tmp_path, rank=0).add_row(ROW)
    SkipList(tmp_path, rank=3).add_batch(BATCH)
    torn = tmp_path / "rank-00000.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"row": {"source": "b", "ep')
    again = SkipList(tmp_path, rank=0)
    assert again.rows == {ROW.key: ROW}
    assert again.batches == {("a", 1, 7): BATCH}
    assert "torn line" in caplog.text
    second = SkippedRow("b", 2, 0, 9, 70, 1)
    again.add_row(second)
    again.add_row(ROW)  # already recorded
    assert SkipList(tmp_path, rank=5).rows == {ROW.key: ROW, second.key: second}
    assert len(torn.read_text().splitlines()) == 3
    assert json.loads(torn.read_text().splitlines()[0])["row"]["replaced_by"] == 4


def test_a_list_that_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written .*could not repeat"):
        SkipList(tmp_path / "file" / "skipped", rank=0).add_row(ROW)
