"""Measures a checkpoint's loss on a split, over windows as in training or overlapping windows.

Without overlap, as in training, a token has half a window of context on average. Windows that move
by less than their length give every token but the first ones at least length − stride tokens of
context. Bits per byte divide by the text's UTF-8 bytes instead of tokens, so that runs with
different tokenizers compare.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data_pipeline.errors import DataError
from ..data_pipeline.read.rows import SplitReader
from ..distributed.checkpoint.loading import Weights
from ..distributed.process.process import start_process
from ..model.loops.exits import ExitRule
from ..train.evaluate import Evaluation, evaluate
from .batches import rolling_rows
from .restore import refuse_pairs, require_data, restore, tokenizer_of_run
from .scoring import open_scorer

_ROWS_AT_A_TIME = 1024  # rows of the split in memory


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
    run_dir: Path,
    *,
    step: int | None = None,
    split: str = "validation",
    max_rows: int = 0,
    loops: int | None = None,
    exit_rule: ExitRule | None = None,
    weights: Weights = "trained",
) -> Measurement:
    """Returns the mean cross-entropy of a checkpoint over non-overlapping rows of a split.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; None: the newest.
        split: train or validation.
        max_rows: upper limit of rows; 0: all.
        loops: repeats of the core; None: as trained.
        exit_rule: when a sequence leaves before; None: never.
        weights: those of the step, or their average.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, or the model cannot follow
            the exit rule.
    """
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step, loops=loops, weights=weights)
        require_data(run_dir, restored)
        if exit_rule is not None:
            exit_rule.check(restored.config.model)
        train = restored.config.train.model_copy(update={"eval_rows": max_rows})
        config = restored.config.model_copy(update={"train": train})
        result = evaluate(restored.model, config, process, split=split, exit_rule=exit_rule)
    return Measurement(restored.step, split, result, weights)


@dataclass(frozen=True)
class SlidingMeasurement:
    """Holds a checkpoint's loss on a split, with windows of `context` tokens that move by `stride`."""

    step: int
    split: str
    context: int
    stride: int
    log_probability: float  # nats, of all tokens together
    tokens: int
    text_bytes: int

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
        return (
            f"step {self.step}, {self.split}: loss {self.loss:.4f} nats per token, perplexity "
            f"{perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte, over {self.tokens:,} tokens "
            f"({self.text_bytes:,} bytes), windows of {self.context} that move by {self.stride}"
        )


def measure_sliding(
    run_dir: Path,
    *,
    stride: int,
    step: int | None = None,
    split: str = "validation",
    max_rows: int = 0,
    advance: Callable[[int, int], None] | None = None,
    weights: Weights = "trained",
) -> SlidingMeasurement:
    """Returns the loss of a checkpoint over a split, with overlapping windows; one process.

    Every token but the first is scored once. A source's documents form one stream, as in training;
    windows restart at each source and every 1,024 rows.

    Args:
        run_dir: the run folder.
        stride: tokens by which windows move; the run's seq_len means no overlap.
        step: of the checkpoint; None: the newest.
        split: train or validation.
        max_rows: upper limit of rows of seq_len tokens, from the beginning; 0: all.
        advance: called with the number of finished tokens and their total.
        weights: those of the step, or their average.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, the stride does not fit, the
            model reads later positions, or the data has a loss mask.
    """
    with start_process("auto") as process:
        if process.world_size > 1:
            raise ValueError("--stride measures in one process: start it without torchrun")
        restored = restore(run_dir, process, step=step, weights=weights)
        refuse_pairs(restored)
        require_data(run_dir, restored)
        data = restored.config.data
        if not 1 <= stride <= data.seq_len:
            raise ValueError(f"--stride {stride} must be between 1 and data.seq_len={data.seq_len}")
        reader = SplitReader(data.directory, split, seq_len=data.seq_len)
        scorer = open_scorer(restored)
        tokenizer = tokenizer_of_run(restored)
        num_rows = min(reader.num_rows, max_rows or reader.num_rows)
        log_probability, tokens, num_bytes = 0.0, 0, 0
        for first, end in _stretches(reader.streams, num_rows):
            stream = _stream(reader, first, end)
            rows = rolling_rows(stream[1:], stream[0], data.seq_len, stride=stride)
            scores = scorer.score([[row] for row in rows])
            log_probability += sum(score.total() for [score] in scores)
            tokens += len(stream) - 1
            num_bytes += len(tokenizer.decode(stream[1:]).encode())
            if advance is not None:
                advance(tokens, num_rows * data.seq_len)
    if not num_bytes:
        raise ValueError(f"{data.directory}: the split {split!r} has no text to measure")
    return SlidingMeasurement(
        restored.step, split, data.seq_len, stride, log_probability, tokens, num_bytes
    )


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
