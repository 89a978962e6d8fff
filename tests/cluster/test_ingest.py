"""Batches from a Ray Dataset: every row once, in order, the same again; and no wait without an end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import sentences

from moebius.cluster import ingest
from moebius.cluster.ingest import RankBatches, split_batches, token_rows
from moebius.cluster.job import JobError
from moebius.cluster.places.simulated import simulated_cluster
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.read.loader import Batch
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer

S = 16


class _Split:
    """What Ray Data gives to a rank, without Ray Data."""

    def __init__(self, rows: np.ndarray):
        self._rows = rows

    def iter_batches(self, *, batch_size: int, batch_format: str, drop_last: bool) -> Any:
        assert batch_format == "numpy"
        assert drop_last
        for first in range(0, len(self._rows) - batch_size + 1, batch_size):
            yield {"tokens": self._rows[first : first + batch_size]}


def test_a_rank_gets_micro_batches_whose_digests_add_up_to_the_rows():
    rows = np.arange(12 * 5, dtype=np.int32).reshape(12, 5)
    as_objects = np.empty(12, dtype=object)
    as_objects[:] = list(rows)
    whole = list(RankBatches(_Split(rows), 0, 8, 8, 2))
    assert len(whole) == 1
    assert whole[0].tokens.shape == (4, 2, 5)
    assert whole[0].tokens.dtype == np.int64
    assert whole[0].tokens.reshape(8, 5).tolist() == rows[:8].tolist()
    parts = [
        batch
        for rank in range(2)
        for batch in RankBatches(_Split(as_objects[4 * rank : 4 * rank + 4]), rank, 8, 4, 2)
    ]
    assert sum(batch.digest for batch in parts) % 2**31 == whole[0].digest
    steps = list(RankBatches(_Split(rows), 0, 4, 4, 2))
    assert [batch.first_sample for batch in steps] == [0, 4, 8]
    assert len({batch.digest for batch in steps}) == 3


@pytest.mark.parametrize("sizes", [(3, 8, 2), (2, 8, 3), (0, 8, 1), (2, 8, 0)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    num_ranks, global_batch, micro_batch = sizes
    with pytest.raises(DataError, match="is not a multiple of"):
        split_batches(None, num_ranks=num_ranks, global_batch=global_batch, micro_batch=micro_batch)


def test_without_ray_data_it_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pandas'")

    monkeypatch.setattr(ingest.importlib, "import_module", missing)
    with pytest.raises(JobError, match=r"'pandas'.*pip install 'moebius\[ingest\]'"):
        split_batches(None, num_ranks=1, global_batch=1, micro_batch=1)


@pytest.mark.slow
def test_ranks_on_a_cluster_of_two_cpus_see_every_row_once_and_the_same_again(tmp_path):
    data = pytest.importorskip("ray.data")
    texts = sentences(0, 120)
    tokenizer = _tokenizer(tmp_path)
    with simulated_cluster(1, cpus_per_node=2) as _:
        import ray

        class Rank:
            def epochs(self, batches: RankBatches, count: int) -> list[list[Batch]]:
                return [list(batches) for _ in range(count)]

        remote_rank: Any = ray.remote(num_cpus=0.5)(Rank)

        def read(num_ranks: int, epochs: int) -> list[list[list[Batch]]]:
            blocks = data.from_items([{"text": text} for text in texts], override_num_blocks=6)
            rows = token_rows(blocks, tokenizer, seq_len=S)
            batches = split_batches(
                rows, num_ranks=num_ranks, global_batch=8, micro_batch=2, rank_cpus=1.0
            )
            ranks = [remote_rank.remote() for _ in range(num_ranks)]
            found = [
                rank.epochs.remote(one, epochs) for rank, one in zip(ranks, batches, strict=True)
            ]
            return ray.get(found, timeout=120)

        ((alone,),) = read(1, 1)
        expected = _rows(tokenizer, [texts[first : first + 20] for first in range(0, 120, 20)])
        assert _flat(alone) == expected[: len(expected) // 8 * 8]
        first, second = read(2, 2)
        assert {len(first[0]), len(second[0])} == {len(first[0])}
        assert [_flat(epoch) for epoch in (first[0], second[0])] == [
            _flat(epoch) for epoch in (first[1], second[1])
        ]
        both = _flat(first[0]) + _flat(second[0])
        left = list(expected)
        for row in both:
            left.remove(row)  # of those that there are, each once
        assert len(left) < 2 * 8
        blocks = data.from_items([{"text": "a"}])
        with pytest.raises(JobError, match=r"has 2 CPUs and the ranks hold 2 of them"):
            split_batches(blocks, num_ranks=2, global_batch=2, micro_batch=1, rank_cpus=2.0)


def _tokenizer(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("\n".join(sentences(1, 40)))
    data = DataConfig(input=(str(text),), tokenizer="bytes", validation_fraction=0.0)
    prepare(data, folder / "prepared")
    return folder / "prepared"


def _rows(tokenizer: Path, blocks: list[list[str]]) -> list[list[int]]:
    encoder = load_tokenizer(tokenizer)
    rows = []
    for block in blocks:
        stream = []
        for document in encoder.encode_batch(block):
            stream += [*document.tolist(), encoder.end_of_document_id]
        rows += [stream[S * n : S * n + S + 1] for n in range((len(stream) - 1) // S)]
    return rows


def _flat(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.reshape(-1, S + 1).tolist()]
