"""F17 and more: flipped bits, truncated and missing files, with and without a copy of the folder."""

import logging
from pathlib import Path
from typing import Any

import pytest
from made_folder import MadeFolder, documents, flip
from steps import seen, steps_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.read import corruption
from moebius.data_pipeline.read.loader import validation_batches
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


def run(data: DataConfig, **options: Any) -> list[tuple[list, int, int]]:
    """Returns samples and digest of every step."""
    return seen(steps_of(data, STEPS, **options))


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


@pytest.mark.fault("F17")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("num_copies", [0, 1])
def test_damage_without_a_whole_copy_ends_the_run_and_is_named(made, damage, num_copies):
    do_damage, message = DAMAGES[damage]
    do_damage(made)
    if num_copies or damage == "a bit":  # else the wrong size is noticed on opening
        message += f".*read 3 times and from {num_copies} replicas"
    with pytest.raises(ShardError, match=message):
        run(made.config(replicas=[str(made.folder)] * num_copies))


@pytest.mark.fault("F17")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_replica_heals_and_nobody_notices(made, intact, tmp_path, damage, packing, caplog):
    data = made.config(replicas=("/nowhere", str(intact.folder)), packing=packing)
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
    assert run(made.config()) == expected
    assert len(failed) > 10


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_index_that_is_lost_is_told(made, split):
    (made.folder / f"a.{split}-00000.idx.arrow").unlink()
    with pytest.raises(ShardError, match=rf"a.{split}-00000.idx.arrow is missing"):
        list(
            validation_batches(
                made.folder, split=split, seq_len=S, batch_size=4, rank=0, num_ranks=1
            )
        )
