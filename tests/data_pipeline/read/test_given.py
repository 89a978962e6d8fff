"""Rows of a dataset that Python gives: their order and position, and what is no row."""

from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import flat, seen, steps_of
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.read.given import given_rows, given_split, giving
from moebius.data_pipeline.read.loader import Loader

S, VOCAB = 4, 50
DATA = DataConfig(seq_len=S, seed=3)


def numbered(count: int) -> np.ndarray:
    """Returns rows that differ."""
    return (np.arange(count)[:, None] // VOCAB ** np.arange(S + 1) % VOCAB).astype(np.uint16)


class Stream(IterableDataset[list[int]]):
    def __iter__(self) -> Any:
        return iter([[1] * (S + 1)])


class Failing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("no such page")


def test_a_pass_has_every_row_once_in_an_order_that_ranks_and_restarts_do_not_change() -> None:
    rows = numbered(3000)  # several chunks
    with giving(DATA, list(rows), vocab_size=VOCAB) as data:
        sizes = {"global_batch": 100, "micro_batch": 25}
        whole = steps_of(data, 60, **sizes)
        found = [row for step in whole for row in flat(step)]
        for epoch in (found[:3000], found[3000:]):
            assert sorted(epoch) == sorted(rows.tolist())
        assert found[:3000] != found[3000:] != rows.tolist()
        resumed = steps_of(data, 10, num_ranks=4, start_sample=2500, **sizes)
        assert seen(resumed) == seen(whole)[25:35]


def test_a_position_is_of_one_dataset_and_one_seed() -> None:
    def differences(rows: np.ndarray, other: DataConfig = DATA) -> list[str]:
        with giving(other, rows, vocab_size=VOCAB) as data:
            with Loader(data, global_batch=2, micro_batch=1) as loader:
                return loader.samples.differences(position)

    with giving(DATA, numbered(9), vocab_size=VOCAB) as data:
        with Loader(data, global_batch=2, micro_batch=1) as loader:
            position = loader.samples.position(18)
            assert loader.samples.passes(18) == (2.0, "dataset", 9 * S)
    assert differences(numbered(9)) == []
    assert [line[:20] for line in differences(numbered(10))] == ["dataset: saved 'trai"]
    assert differences(numbered(9), DATA.model_copy(update={"seed": 4})) == ["seed: saved 3, now 4"]
    with pytest.raises(DataError, match=r"Python program gives.*fit\(moebius.load_config"):
        given_rows(data)  # no longer


def test_a_memory_mapped_file_and_tensors_give_the_rows_of_a_list(tmp_path: Path) -> None:
    rows = numbered(200)
    rows.tofile(tmp_path / "rows.bin")
    mapped = np.memmap(tmp_path / "rows.bin", np.uint16, "r").reshape(-1, S + 1)
    names = set()
    for dataset in (rows.tolist(), mapped, torch.from_numpy(rows.astype(np.int32))):
        with giving(DATA, (dataset, dataset), vocab_size=VOCAB) as data:
            names.add(data.dataset)
            split = given_split(data, "validation")
            assert split is not None
            assert split.read(np.array([7, 3])).tokens.tolist() == rows[[7, 3]].tolist()
    assert len(names) == 1


GOOD = numbered(100).tolist()


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Stream(), "data is a Stream, which has no position to resume from.*`moebius prepare`"),
        (iter(GOOD), "data is a list_iterator, which has no position"),
        (DataLoader(TensorDataset(torch.tensor(GOOD))), "data is a DataLoader, which has no position"),
        ([], "data has no rows"),
        ((GOOD, []), "validation has no rows"),
        ((GOOD,) * 3, r"a tuple of 3: give a dataset, or \(train, validation\)"),
        ([*GOOD[:-1], [1] * S], r"data\[99\] has 4 token ids, not 5 .*data.seq_len=3"),
        ([[1, 2, 3, VOCAB, 0]], r"data\[0\] has the token id 50: .* between 0 and 49"),
        ((GOOD, [[1, 2, -7, 3, 4]]), r"validation\[0\] has the token id -7"),
        (np.zeros((3, S + 1)), r"data\[0\] is a ndarray of shape \(5,\) and dtype float64"),
        (np.zeros((3, S + 1), bool), "dtype bool"),
        (np.zeros((3, 1, S + 1), int), r"shape \(1, 5\)"),
        (TensorDataset(torch.tensor(GOOD)), r"data\[0\] is a tuple of shape \(1, 5\)"),
        ([{"input_ids": GOOD[0]}], r"data\[0\] is a dict of shape \(\)"),
        ({"train": GOOD}, r"data\[0\] raises KeyError: 0"),
        (Failing(GOOD), r"data\[0\] raises OSError: no such page"),
        ([[[1], [1, 2]]], r"data\[0\] raises ValueError"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_is_no_dataset_of_rows_is_told(dataset: object, told: str) -> None:
    with pytest.raises(DataError, match=told):
        with giving(DATA, dataset, vocab_size=VOCAB):
            pass


def test_a_bad_row_between_the_sampled_ones_is_told_when_it_is_read() -> None:
    rows = numbered(1000)
    rows[500] = VOCAB
    with giving(DATA, rows, vocab_size=VOCAB) as data:
        with pytest.raises(DataError, match=r"data\[500\] has the token id 50"):
            steps_of(data, 10, global_batch=100)


def test_a_second_fit_at_once_and_a_long_temporary_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbered(9)
    with giving(DATA, rows, vocab_size=VOCAB), pytest.raises(DataError, match="rows to a run al"):
        with giving(DATA, rows, vocab_size=VOCAB):
            pass
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr(util, "get_temp_dir", lambda: str(folder))
    with pytest.raises(DataError, match="set TMPDIR to a shorter path"):
        with giving(DATA, rows, vocab_size=VOCAB):
            pass
