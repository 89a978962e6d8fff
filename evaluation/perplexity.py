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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from ..data_pipeline.errors import DataError, InputError
from ..data_pipeline.make.tasks import encoded, in_batches, normalised_document
from ..data_pipeline.prepare_config import PrepareConfig
from ..data_pipeline.read.rows import SplitReader
from ..data_pipeline.sources.documents import Document, InputSplit
from ..data_pipeline.sources.formats import plan_splits, read_documents
from ..data_pipeline.tokenizers.interface import Tokenizer
from ..data_pipeline.words import some_of
from ..distributed.checkpoint.format import OnBytes, StartProgress, Weights
from ..distributed.process.process import start_process
from ..model.loops.exits import ExitRule
from ..train.config.resolve import resolve_prepare
from ..train.config.run_config import ConfigError
from ..train.evaluate import Evaluation, evaluate
from .batches import rolling_rows
from .restore import ModelChoice, Restored, refuse_pairs, require_data, restore, tokenizer_of_run
from .scoring import Scorer, open_scorer

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 1024  # rows of the split in memory
_CHARS_AT_A_TIME = 2**18  # of files
_READING = [f"prepare.{key}" for key in ("text_field", "id_field", "format", "encoding_faults")]


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

    @property
    def perplexity(self) -> float:
        """Returns the perplexity, exp(loss), with the loss capped at 700."""
        return math.exp(min(self.loss, 700.0))

    def __str__(self) -> str:
        documents = f" in {len(self.documents):,} documents" if self.documents else ""
        return (
            f"step {self.step}, {self.split}: loss {self.loss:.4f} nats per token, perplexity "
            f"{self.perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte, over {self.tokens:,} tokens "
            f"({self.text_bytes:,} bytes){documents}, windows of {self.context} that move by {self.stride}"
        )


def measure_sliding(
    run_dir: Path,
    *,
    stride: int,
    split: str = "validation",
    max_rows: int = 0,
    start_progress: StartProgress = lambda what, number: lambda more: None,
    **which: Unpack[ModelChoice],
) -> SlidingMeasurement:
    """Returns the loss of a checkpoint over a split, with overlapping windows; one process.

    Every token but the first is scored once. A source's documents form one stream, as in training;
    windows restart at each source and every 1,024 rows.

    Args:
        run_dir: the run folder.
        stride: tokens by which windows move; the run's seq_len means no overlap.
        split: train or validation.
        max_rows: upper limit of rows of seq_len tokens, from the beginning; 0: all.
        start_progress: shows the tokens.
        which: as for `restore`.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, the stride does not fit, the
            model reads later positions, or the data has a loss mask.
    """
    with start_process("auto") as process:
        if process.world_size > 1:
            raise ValueError("--stride measures in one process: start it without torchrun")
        restored = restore(run_dir, process, **which)
        refuse_pairs(restored)
        require_data(run_dir, restored)
        data = restored.config.data
        if not 1 <= stride <= data.seq_len:
            raise ValueError(f"--stride {stride} must be between 1 and data.seq_len={data.seq_len}")
        reader = SplitReader(data.directory, split, seq_len=data.seq_len)
        scorer = open_scorer(restored)
        tokenizer = tokenizer_of_run(restored)
        num_rows = min(reader.num_rows, max_rows or reader.num_rows)
        advance = start_progress("tokens", num_rows * data.seq_len)
        log_probability, tokens, num_bytes = 0.0, 0, 0
        for first, end in _stretches(reader.streams, num_rows):
            stream = _stream(reader, first, end)
            rows = rolling_rows(stream[1:], stream[0], data.seq_len, stride=stride)
            scores = scorer.score([[row] for row in rows])
            log_probability += sum(score.total() for [score] in scores)
            tokens += len(stream) - 1
            num_bytes += len(tokenizer.decode(stream[1:]).encode())
            advance(len(stream) - 1)
    if not num_bytes:
        raise ValueError(f"{data.directory}: the split {split!r} has no text to measure")
    return SlidingMeasurement(
        restored.step, split, data.seq_len, stride, log_probability, tokens, num_bytes
    )


def measure_text(
    run_dir: Path | Restored,
    files: Sequence[str],
    *,
    seed: int = 0,
    start_progress: StartProgress = lambda what, number: lambda more: None,
    **which: Unpack[ModelChoice],
) -> SlidingMeasurement | None:
    """Returns a checkpoint's loss on the documents of files, whatever its data is; writes nothing.

    Documents are read and normalised as `moebius prepare` does; empty ones do not count. Ranks
    started by torchrun share their rows.

    Args:
        run_dir: the run folder, or a model.
        files: also folders, globs and URLs, and `prepare.key=value` of how to read them.
        seed: of group contexts, if the model needs them.
        start_progress: shows the bytes.
        which: as for `restore`.

    Returns:
        The loss on the first rank, with that of each document; None on others.

    Raises:
        ValueError: the run, its checkpoint, its tokenizer or a file cannot be read, there is no
            text, or the model reads later positions.
    """
    source = _source_of(files)
    with start_process("auto") as process:
        tell = logger.warning if process.rank == 0 else lambda news: None
        splits = plan_splits(source, tell)
        num_bytes = sum(split.num_bytes for split in splits)
        process.agree("text", {"files of --text": f"{len(splits):,} of {num_bytes:,} bytes"})
        restored = restore(run_dir, process, **which)
        refuse_pairs(restored)
        tokenizer, scorer = tokenizer_of_run(restored), open_scorer(restored, process, seed=seed)
        documents = _documents(source, splits, tokenizer, tell)
        advance = start_progress("text", num_bytes)
        found = tuple(_scored(documents, restored, tokenizer, scorer, advance))
    if not found:
        raise InputError(
            f"{some_of(source.input)}: there is no text in it: name files that hold some"
        )
    if process.rank > 0:
        return None
    sums = ("log_probability", "tokens", "text_bytes")
    whole = {name: sum(getattr(document, name) for document in found) for name in sums}
    return replace(found[0], split=some_of(source.input), documents=found, **whole)


def _source_of(words: Sequence[str]) -> PrepareConfig:
    """Returns how to read files, from their names and the keys among them."""
    keys = [word for word in words if word.startswith("prepare.") and "=" in word]
    files = [word for word in words if word not in keys]
    if unread := [key for key in keys if key.partition("=")[0] not in _READING]:
        raise ConfigError(
            f"{unread[0]}: leave it out; only {', '.join(_READING)} change how a text is read"
        )
    if not files:
        raise ConfigError("no text is named: give its files, folders, globs or URLs")
    # documents are counted over a file, and token files name no tokenizer: they have the run's
    options = {"input": files, "split_bytes": 2**62, "tokenizer": "bytes"}
    return resolve_prepare(None, keys, {}, options=options)


def _documents(
    source: PrepareConfig,
    splits: Sequence[InputSplit],
    tokenizer: Tokenizer,
    tell: Callable[[str], None],
) -> Iterator[tuple[str, Document]]:
    """Yields the documents with text, each with its id or place."""
    rules, limit, faults = source.all_sources[0], source.encoding_faults, 0
    for split in splits:
        for read in read_documents(split, rules, encoding_faults=limit, tokenizer=tokenizer):
            document = normalised_document(read, has_prompt=False)
            if document.text and not document.fault:
                yield document.record_id or f"{split.url}:{document.row + 1}", document
            faults += bool(document.fault)
            if isinstance(limit, int) and faults > limit:
                limit_text = f"more than prepare.encoding_faults={limit} documents are faulty"
                raise InputError(f"{split.url}: {limit_text}: repair the input, or raise the limit")
    if faults:
        tell(f"{some_of(source.input)}: faulty documents left out: {faults:,}")


def _scored(
    documents: Iterator[tuple[str, Document]],
    restored: Restored,
    tokenizer: Tokenizer,
    scorer: Scorer,
    advance: OnBytes,
) -> Iterator[SlidingMeasurement]:
    """Yields the loss of each document; collective with several ranks."""
    context = restored.config.data.seq_len
    batches = in_batches(documents, lambda named: len(named[1].text), _CHARS_AT_A_TIME)
    for number, batch in enumerate(batches):
        pairs = encoded(tokenizer, None, [document for _, document in batch])
        tokens = [ids.tolist() for _, ids in pairs]
        families = [rolling_rows(ids, tokenizer.end_of_document_id, context) for ids in tokens]
        scores = scorer.score(families, draw=number)
        for (name, document), ids, rows in zip(batch, tokens, scores, strict=True):
            total, size = sum(row.total() for row in rows), len(document.text.encode())
            if ids:
                yield SlidingMeasurement(
                    restored.step, name, context, context, total, len(ids), size
                )
            advance(size)


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
