"""Measures a checkpoint's loss on a split, over windows as in training or overlapping windows, or on
the documents of any files.

Without overlap, as in training, a token has half a window of context on average. Windows that move
by less than their length give every token but the first ones at least length − stride tokens of
context. Bits per byte divide by the text's UTF-8 bytes instead of tokens, so that runs with
different tokenizers compare.

A document of a file is scored as lm-evaluation-harness does (`loglikelihood_rolling`): after an end of
document, without its own end, in windows that do not overlap, of which the last reaches back to be as long.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np

from ..data_pipeline.data_config import DataConfig
from ..data_pipeline.errors import DataError, InputError
from ..data_pipeline.make.tasks import in_batches, normalised
from ..data_pipeline.prepare_config import PrepareConfig
from ..data_pipeline.read.rows import SplitReader
from ..data_pipeline.sources.documents import InputSplit
from ..data_pipeline.sources.formats import plan_splits, read_documents
from ..data_pipeline.tokenizers.interface import Tokenizer
from ..data_pipeline.words import some_of
from ..distributed.checkpoint.format import StartProgress, Weights
from ..distributed.process.process import start_process
from ..model.loops.exits import ExitRule
from ..train.config.resolve import resolve_prepare
from ..train.evaluate import Evaluation, evaluate
from .batches import rolling_rows
from .restore import ModelChoice, Restored, refuse_pairs, require_data, restore, tokenizer_of_run
from .scoring import Scorer, open_scorer

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 1024  # rows of the split in memory
_TOKENS_AT_A_TIME = 2**16  # of files
_READING = ("prepare.text_field=", "prepare.id_field=", "prepare.format=")


@dataclass(frozen=True)
class Measurement:
    """Holds the loss of one checkpoint on one split."""

    step: int
    split: str
    result: Evaluation
    weights: Weights = "trained"

    def __str__(self) -> str:
        loops = self.result.loops
        return (
            f"step {self.step}, {self.split}: loss {self.result.loss:.4f} nats per token, "
            f"perplexity {self.result.perplexity:.2f}, over {self.result.tokens:,} tokens"
            f"{'' if loops is None else f', with {loops:.2f} loops on average'}"
            f"{', averaged weights' if self.weights == 'average' else ''}"
        )


def measure(
    run_dir: Path | Restored,
    *,
    split: str = "validation",
    max_rows: int = 0,
    exit_rule: ExitRule | None = None,
    **which: Unpack[ModelChoice],
) -> Measurement:
    """Returns the mean cross-entropy of a checkpoint over non-overlapping rows of a split.

    Args:
        run_dir: the run folder, or a model.
        split: train or validation.
        max_rows: upper limit of rows; 0: all.
        exit_rule: when a sequence leaves before; None: never.
        which: as for `restore`.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, or the model cannot follow
            the exit rule.
    """
    with start_process("auto") as process:
        restored = restore(run_dir, process, **which)
        require_data(run_dir, restored)
        if exit_rule is not None:
            exit_rule.check(restored.config.model)
        train = restored.config.train.model_copy(update={"eval_rows": max_rows})
        config = restored.config.model_copy(update={"train": train})
        result = evaluate(restored.model, config, process, split=split, exit_rule=exit_rule)
        restored.model.eval()
    return Measurement(restored.step, split, result, restored.weights)


@dataclass(frozen=True)
class SlidingMeasurement:
    """Holds a checkpoint's loss on a split, with windows of `context` tokens that move by `stride`."""

    step: int
    split: str  # or files, or a document's id or place
    context: int
    stride: int
    log_probability: float  # nats, of all tokens together
    tokens: int
    text_bytes: int
    documents: tuple["SlidingMeasurement", ...] = field(default=(), repr=False)  # of files

    @property
    def loss(self) -> float:
        """Returns the loss in nats per token."""
        return -self.log_probability / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Returns bits per UTF-8 byte of the text; ends of documents cost bits but have no bytes."""
        return -self.log_probability / math.log(2) / self.text_bytes

    def __str__(self) -> str:
        perplexity = math.exp(min(self.loss, 700.0))
        documents = f" in {len(self.documents):,} documents" if self.documents else ""
        return (
            f"step {self.step}, {self.split}: loss {self.loss:.4f} nats per token, perplexity "
            f"{perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte, over {self.tokens:,} tokens "
            f"({self.text_bytes:,} bytes){documents}, windows of {self.context} that move by {self.stride}"
        )


class _Passage(NamedTuple):
    """Holds consecutive tokens, each of which is scored after those before it."""

    name: str
    before: int  # the token before the first one
    tokens: list[int]
    text_bytes: int


def measure_sliding(
    run_dir: Path | Restored,
    *,
    stride: int | None = None,
    files: Sequence[str] | None = None,
    max_rows: int = 0,
    start_progress: StartProgress = lambda what, number: lambda more: None,
    **which: Unpack[ModelChoice],
) -> SlidingMeasurement | None:
    """Returns the loss of a checkpoint over its validation split or files, in windows; writes nothing.

    Every token but the first is scored once. In the split, a source's documents form one stream, as in
    training, and windows restart at each source and every 1,024 rows. Documents of files are read and
    normalised as `moebius prepare` does; empty ones do not count. Ranks started by torchrun share the
    windows.

    Args:
        run_dir: the run folder, or a model.
        stride: tokens by which windows move; None: as many as the run's seq_len, so no overlap.
        files: also folders, globs and URLs, and `prepare.key=value` of how to read them; None: the
            split is measured.
        max_rows: upper limit of rows of seq_len tokens, from the beginning; 0: all.
        start_progress: shows the tokens of the split, or the bytes of the files.
        which: as for `restore`.

    Returns:
        The loss on the first rank, with that of each document of files; None on others.

    Raises:
        ValueError: the run, its checkpoint, its data or a file cannot be read, the stride does not
            fit, there is no text, the model reads later positions, or the data has a loss mask.
    """
    source = None if files is None else _source_of(files)
    splits = () if source is None else plan_splits(source, logger.warning)
    with start_process("auto") as process:
        size = f"{len(splits):,} of {sum(each.num_bytes for each in splits):,} bytes"
        process.agree("text", {"files of --text": size})
        restored = restore(run_dir, process, **which)
        refuse_pairs(restored)
        name, tokenizer, data = "validation", tokenizer_of_run(restored), restored.config.data
        if source is None:
            require_data(run_dir, restored)
            streams = _of_split(tokenizer, data, max_rows, start_progress)
        else:
            name = some_of(source.input)
            streams = _of_files(tokenizer, source, splits, start_progress)
        found = _scored(streams, restored, open_scorer(restored, process), stride)
    if not any(one.text_bytes for one in found):
        raise InputError(f"{name}: there is no text in it to measure")
    if process.rank > 0:
        return None
    sums = ("log_probability", "tokens", "text_bytes")
    whole = {key: sum(getattr(one, key) for one in found) for key in sums}
    return replace(found[0], split=name, documents=found if splits else (), **whole)


def _scored(
    streams: Iterable[_Passage], restored: Restored, scorer: Scorer, stride: int | None
) -> tuple[SlidingMeasurement, ...]:
    """Returns the loss of each stream; collective with several ranks."""
    context, found = restored.config.data.seq_len, []
    if stride is not None and not 1 <= stride <= context:
        raise ValueError(f"--stride {stride} must be between 1 and data.seq_len={context}")
    batches = in_batches(streams, lambda one: len(one.tokens), _TOKENS_AT_A_TIME)
    for number, batch in enumerate(batches):
        families = [rolling_rows(one.tokens, one.before, context, stride=stride) for one in batch]
        for one, rows in zip(batch, scorer.score(families, draw=number), strict=True):
            total = sum(row.total() for row in rows)
            sizes = context, stride or context, total, len(one.tokens), one.text_bytes
            found.append(SlidingMeasurement(restored.step, one.name, *sizes))
    return tuple(found)


def _source_of(words: Sequence[str]) -> PrepareConfig:
    """Returns how to read files, from their names and the keys among them."""
    keys = [word for word in words if word.startswith(_READING)]
    files = [word for word in words if word not in keys]
    # documents are counted over a file, and token files name no tokenizer: they have the run's
    options = {"input": files, "split_bytes": 2**62, "tokenizer": "bytes"}
    return resolve_prepare(None, keys, {}, options=options)


def _of_files(
    tokenizer: Tokenizer,
    source: PrepareConfig,
    splits: Sequence[InputSplit],
    start_progress: StartProgress,
) -> Iterator[_Passage]:
    """Yields the documents with text, each under its id or place."""
    advance = start_progress("text", sum(split.num_bytes for split in splits))
    for split in splits:
        for read in read_documents(split, source.all_sources[0], tokenizer=tokenizer):
            text = normalised(read.text)
            ids = tokenizer.encode_batch([text])[0] if read.tokens is None else read.tokens
            name, num_bytes = read.record_id or f"{split.url}:{read.row + 1}", len(text.encode())
            if text and len(ids):
                yield _Passage(name, tokenizer.end_of_document_id, ids.tolist(), num_bytes)
            advance(num_bytes)


def _of_split(
    tokenizer: Tokenizer, data: DataConfig, max_rows: int, start_progress: StartProgress
) -> Iterator[_Passage]:
    """Yields stretches of consecutive rows of the validation split."""
    reader = SplitReader(data.directory, "validation", seq_len=data.seq_len)
    num_rows = min(reader.num_rows, max_rows or reader.num_rows)
    advance = start_progress("tokens", num_rows * data.seq_len)
    for first, end in _stretches(reader.streams, num_rows):
        before, *tokens = _stream(reader, first, end)
        yield _Passage("validation", before, tokens, len(tokenizer.decode(tokens).encode()))
        advance(len(tokens))


def _stretches(streams: Sequence[range], num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the first row and the end of each stretch of consecutive rows."""
    for stream in streams:
        for first in range(stream.start, min(stream.stop, num_rows), _ROWS_AT_A_TIME):
            yield first, min(first + _ROWS_AT_A_TIME, stream.stop, num_rows)


def _stream(reader: SplitReader, first: int, end: int) -> list[int]:
    """Returns the tokens of consecutive rows; each row begins with the last token of the previous
    one.
    """
    rows = reader.read(np.arange(first, end))
    if rows.loss_mask is not None:
        raise DataError(
            f"{reader.directory}: its loss mask excludes tokens, which overlapping windows would count; "
            "measure without --stride"
        )
    return [*rows.tokens[:, :-1].ravel().tolist(), int(rows.tokens[-1, -1])]
