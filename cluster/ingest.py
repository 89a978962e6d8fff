"""Batches straight from a Ray Dataset, for sources that cannot be made into shards first.

    rows = token_rows(ray.data.read_parquet(…), tokenizer_folder, seq_len=2048)
    for rank, batches in enumerate(split_batches(rows, num_ranks=2, global_batch=64, micro_batch=8)):
        actors[rank].train.remote(batches)        # in the actor: for batch in batches: …

Prepared shards and `Loader` are the usual way, and a run of the command takes no other. This one
gives up most of what they promise (docs/data.md, "From a Ray Dataset"):

* It has no position. A run that is resumed begins the data set again.
* The order is the data set's, kept because `preserve_order` is set here; another number of ranks
  sees other samples per step. There is no mixture, no shuffle across an epoch, no checksum.
* An epoch begins when *all* ranks have asked for it, and a rank that has ended holds up the others
  (ray#41973). Ranks must be Ray processes: actors or tasks of the cluster.
* Operators take CPUs of the cluster. Where the ranks hold all of them Ray Data waits for ever
  without a word (ray#44687), so that is refused here before anything starts.
"""

import functools
import importlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data_pipeline.errors import DataError
from ..data_pipeline.read.loader import Batch
from ..data_pipeline.tokenizers.interface import Tokenizer
from ..data_pipeline.tokenizers.tokenizer import load_tokenizer
from .job import JobError

_ROW = "tokens"  # the one column of rows: S+1 tokens


def token_rows(texts: Any, tokenizer: str | Path, *, seq_len: int, text_field: str = "text") -> Any:
    """Returns a Ray Dataset of rows of tokens, cut from a Dataset of texts as it is read.

    Each block's documents are joined, each with its end, and cut into rows that share their border
    token, as `data.packing=concat` does; what remains of a block is dropped. Plain tasks of one CPU
    do it, no actor pool.

    Args:
        texts: a `ray.data.Dataset`.
        tokenizer: a folder with a tokenizer, such as one of prepared data, that every node sees.
        seq_len: S, the tokens predicted per row.
        text_field: the column of the text.
    """
    cut = functools.partial(
        _cut_rows, tokenizer=str(tokenizer), seq_len=seq_len, text_field=text_field
    )
    return texts.map_batches(cut, batch_size=None, batch_format="numpy", num_cpus=1)


def split_batches(
    rows: Any, *, num_ranks: int, global_batch: int, micro_batch: int, rank_cpus: float = 0.0
) -> list["RankBatches"]:
    """Splits a Ray Dataset of rows over ranks, which then iterate over `Batch`es, an epoch each time.

    Every rank gets as many batches; rows that do not fill a step are dropped.

    Args:
        rows: a `ray.data.Dataset` with the column "tokens", S+1 of them in each row.
        num_ranks: over how many ranks it is split.
        global_batch: samples of a step, over all ranks.
        micro_batch: sequences of a forward pass of one rank.
        rank_cpus: CPUs that the ranks hold while they read, all together; Ray Data leaves them be.

    Raises:
        DataError: sizes that do not fit.
        JobError: Ray Data is missing, or the cluster has no CPU left for it.
    """
    if min(num_ranks, global_batch, micro_batch) < 1 or global_batch % (num_ranks * micro_batch):
        raise DataError(
            f"{global_batch=} is not a multiple of {num_ranks=} x {micro_batch=}: each rank must "
            "get the same number of whole micro-batches"
        )
    data = _ray_data()
    options = rows.context.execution_options
    options.preserve_order = True
    options.resource_limits = data.ExecutionResources(cpu=_free_cpus(rank_cpus))
    splits = rows.streaming_split(num_ranks, equal=True)
    return [
        RankBatches(split, rank, global_batch, global_batch // num_ranks, micro_batch)
        for rank, split in enumerate(splits)
    ]


@dataclass(frozen=True)
class RankBatches:
    """Iterates over one rank's batches; each iteration is an epoch, which all ranks begin together.

    It can be sent to a Ray actor or task, and iterated over there alone.
    """

    split: Any  # a `ray.data.DataIterator`
    rank: int
    global_batch: int
    local_batch: int
    micro_batch: int

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of an epoch; `first_sample` begins at 0 with each."""
        found = self.split.iter_batches(
            batch_size=self.local_batch, batch_format="numpy", drop_last=True
        )
        for step, rows in enumerate(found):
            tokens = _matrix(rows[_ROW])
            yield Batch(
                tokens=tokens.reshape(-1, self.micro_batch, tokens.shape[1]),
                first_sample=step * self.global_batch,
                digest=_digest(tokens),
            )


def _cut_rows(
    texts: dict[str, np.ndarray], *, tokenizer: str, seq_len: int, text_field: str
) -> dict[str, np.ndarray]:
    """Runs in Ray's workers: a block of texts to rows of tokens."""
    if text_field not in texts:
        raise DataError(
            f"the data set has the columns {sorted(texts)}, none named {text_field!r}: say which "
            "one is the text with text_field="
        )
    encoder = _tokenizer(tokenizer)
    end = np.array([encoder.end_of_document_id])
    documents = encoder.encode_batch([str(text) for text in texts[text_field].tolist()])
    pieces = [piece for document in documents for piece in (document, end)]
    stream = np.concatenate([np.zeros(0, dtype=np.int64), *pieces]).astype(np.int32)
    num_rows = max(0, (len(stream) - 1) // seq_len)
    starts = np.arange(num_rows)[:, None] * seq_len
    return {_ROW: stream[starts + np.arange(seq_len + 1)]}


@functools.cache
def _tokenizer(folder: str) -> Tokenizer:
    return load_tokenizer(folder)


def _matrix(rows: np.ndarray) -> np.ndarray:
    """Returns tokens [B, S+1], int64; Ray Data gives rows of unknown length as objects."""
    if rows.dtype == object:
        rows = np.stack(list(rows))
    return rows.astype(np.int64)


def _digest(tokens: np.ndarray) -> int:
    """Returns a number of the rows' content that adds up over ranks and does not see their order."""
    return sum(zlib.crc32(row.tobytes()) for row in tokens) % 2**31


def _ray_data() -> Any:
    try:
        return importlib.import_module("ray.data")
    except ImportError as error:
        raise JobError(
            f"this needs Ray Data, which cannot be imported ({error}): pip install 'moebius[ingest]'"
        ) from error


def _free_cpus(rank_cpus: float) -> float:
    import ray

    there = ray.cluster_resources().get("CPU", 0.0)
    if there - rank_cpus < 1:
        raise JobError(
            f"the cluster has {there:g} CPUs and the ranks hold {rank_cpus:g} of them: Ray Data needs "
            "at least one, and would wait for it for ever"
        )
    return there - rank_cpus
