"""Passes of a trained model over a split of its data, with what went on inside of each.

The rows are those of `moebius eval`, in the same micro-batches: evenly spaced over the split, the
same for every call. So what routes sequences together sees the same groups, and the mean loss is the
one that an evaluation of these rows reports. A token counts where its row is no copy that fills up
the last batch, and where it is no padding.

Nothing of a pass outlives it but what the counters add up: memory does not grow with the tokens.
One process, with all experts in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebius.data_pipeline.read.corruption import open_fetcher
from moebius.data_pipeline.read.loader import ValidationBatch, validation_batches
from moebius.data_pipeline.read.rows import SplitReader
from moebius.evaluation.restore import Restored
from moebius.model.documents import Documents
from moebius.model.execution.precision import forward_in, products_dtype
from moebius.train.config.run_config import Config
from moebius.train.micro_batches import document_use
from moebius.train.record.route_tap import tap
from moebius.train.record.routed_call import RoutedCall

from .hidden import HiddenPass, tap_hidden
from .updates import DepthUpdate, tap_residual


@dataclass(frozen=True)
class AnalysedPass:
    """Holds one forward pass over T tokens (B rows of S)."""

    token_ids_T: Tensor  # int64: the input
    counted_T: Tensor  # bool
    calls: list[RoutedCall]  # of all sparse layers, in order
    updates: list[DepthUpdate]  # of all depth steps, in order
    hidden: list[HiddenPass]  # of all feed-forwards with a ReLU, in order
    loss_sum: float  # nats, of the targets that count
    num_targets: int
    num_rows: int  # that count


def rows_of(num_tokens: int | None, seq_len: int) -> int | None:
    """Returns how many rows hold that many tokens, at least one; None: the whole split.

    Raises:
        ValueError: fewer than one token is asked for.
    """
    if num_tokens is None:
        return None
    if num_tokens < 1:
        raise ValueError(
            f"--tokens {num_tokens}: nothing would be counted; give at least 1, or `all`"
        )
    return -(-num_tokens // seq_len)


def count_rows(config: Config, split: str, max_rows: int | None) -> int:
    """Returns how many rows the passes over a split will count."""
    with SplitReader(config.data.directory, split, seq_len=config.data.seq_len) as reader:
        return min(max_rows or reader.num_rows, reader.num_rows)


@torch.no_grad()
def analysed_passes(
    restored: Restored, *, split: str = "validation", max_rows: int | None = None
) -> Iterator[AnalysedPass]:
    """Yields a pass for every micro-batch of the split.

    Args:
        restored: a model in evaluation mode, with its run's configuration.
        split: train or validation.
        max_rows: how many rows at most, evenly spaced; None: all.

    Raises:
        ValueError: the data cannot be read, or the split is shorter than one row.
    """
    config, model = restored.config, restored.model
    dtype = products_dtype(config.train.precision)
    device = model.embedding.device
    use = document_use(config)
    for batch in _batches(config, split, max_rows):
        rows_BS1 = torch.from_numpy(batch.tokens).to(device)
        valid_B = torch.from_numpy(batch.valid)
        mask_BS, documents = use.read(batch.loss_mask, batch.document_ids, device)
        inputs_BS, answers_BS = use.split(rows_BS1)
        targets_BS = valid_B[:, None].expand(inputs_BS.shape)
        if mask_BS is not None:
            targets_BS = targets_BS & mask_BS
        with tap(model) as calls, tap_residual(model) as updates, tap_hidden(model) as hidden:
            output = forward_in(
                model,
                dtype,
                inputs_BS,
                targets_BS=answers_BS,
                loss_mask_BS=targets_BS,
                documents=documents,
            )
        yield AnalysedPass(
            token_ids_T=inputs_BS.flatten(),
            counted_T=_counted(valid_B.to(device), inputs_BS.shape[1], documents),
            calls=calls,
            updates=updates,
            hidden=hidden,
            loss_sum=float(output.cross_entropy),
            num_targets=int(targets_BS.sum()),
            num_rows=int(valid_B.sum()),
        )


def count_items(config: Config, split: str, max_rows: int | None) -> np.ndarray:
    """Returns how often every vocabulary item is an input in these rows, without a model.

    Raises:
        ValueError: the data cannot be read, or the split is shorter than one row.
    """
    counts_V = np.zeros(config.model.vocab_size, dtype=np.int64)
    for batch in _batches(config, split, max_rows):
        counted_BS = np.broadcast_to(batch.valid[:, None], batch.tokens[:, :-1].shape)
        if batch.document_ids is not None:
            counted_BS = counted_BS & (batch.document_ids[:, : counted_BS.shape[1]] >= 0)
        counts_V += np.bincount(batch.tokens[:, :-1][counted_BS], minlength=len(counts_V))
    return counts_V


def _batches(config: Config, split: str, max_rows: int | None) -> Iterator[ValidationBatch]:
    group = config.model.evaluation_group_sequences
    return validation_batches(
        Path(config.data.directory),
        split=split,
        seq_len=config.data.seq_len,
        batch_size=-(-config.train.micro_batch // group) * group,
        sequences_per_group=group,
        rank=0,
        num_ranks=1,
        max_rows=max_rows,
        document_ids=config.data.gives_document_ids,
        fetch=open_fetcher(config.data),
    )


def _counted(valid_B: Tensor, length: int, documents: Documents | None) -> Tensor:
    counted_BS = valid_B[:, None].expand(len(valid_B), length)
    if documents is not None and documents.real_BS is not None:
        counted_BS = counted_BS & documents.real_BS
    return counted_BS.flatten()
