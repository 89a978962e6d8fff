"""Validation loss: the mean over every validation token, equal for any number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..data_pipeline.errors import NothingToReadError
from ..data_pipeline.read.corruption import open_fetcher
from ..data_pipeline.read.given import given_rows, given_split
from ..data_pipeline.read.loader import validation_batches
from ..distributed.process.process import Process
from ..model.documents import Documents
from ..model.execution.precision import forward_in, products_dtype
from ..model.layers import on_device
from ..model.loops.exits import ExitRule
from ..model.loops.steps import PassOptions
from ..model.transformer import Transformer
from .config.run_config import Config
from .micro_batches import document_use


@dataclass(frozen=True)
class Evaluation:
    """Holds the mean cross-entropy (nats per token) over `tokens` counted tokens."""

    loss: float
    tokens: int
    loops: float | None = None
    """Mean over the sequences, where they leave the loops early."""

    @property
    def perplexity(self) -> float:
        """Returns the perplexity, exp(loss), with the loss capped at 700."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class Rows:
    """Holds a micro-batch of a run's data as its model reads it."""

    tokens_BS: Tensor
    """int64, the input."""
    targets_BS: Tensor
    """int64, the target of each input."""
    counted_BS: Tensor
    """bool: False for padding, and for copies that fill the last micro-batch."""
    asked_BS: Tensor
    """bool: which targets count in the loss."""
    documents: Documents | None = None
    """The rows' documents, if the run respects them."""
    num_rows: int = 0
    """Number of rows that are not copies."""


def read_rows(
    config: Config,
    device: torch.device,
    *,
    split: str = "validation",
    max_rows: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Rows]:
    """Yields a rank's rows of a split by micro-batch, equally many on every rank.

    Args:
        config: the run's.
        device: where the tokens go.
        split: train or validation.
        max_rows: maximum number of rows, evenly spaced; None: all.
        rank: whose rows.
        num_ranks: how many ranks share the split.

    Raises:
        ValueError: the data cannot be read, or the split is shorter than one row.
    """
    use = document_use(config)
    group = config.model.evaluation_group_sequences
    wanted = config.train.eval_batch or config.train.micro_batch
    for batch in validation_batches(
        Path(config.data.directory),
        split=split,
        seq_len=config.data.seq_len,
        batch_size=-(-wanted // group) * group,
        sequences_per_group=group,
        rank=rank,
        num_ranks=num_ranks,
        max_rows=max_rows,
        document_ids=config.data.gives_document_ids,
        fetch=open_fetcher(config.data),
        given=given_split(config.data, split),
    ):
        valid_B1 = torch.from_numpy(batch.valid)[:, None]
        mask_BS, documents = use.read(batch.loss_mask, batch.document_ids, device)
        tokens_BS, targets_BS = use.split(on_device(torch.from_numpy(batch.tokens), device))
        asked_BS = valid_B1.expand(tokens_BS.shape)
        counted_BS = on_device(asked_BS, device)
        if documents is not None and documents.real_BS is not None:
            counted_BS = counted_BS & documents.real_BS
        yield Rows(
            tokens_BS=tokens_BS,
            targets_BS=targets_BS,
            counted_BS=counted_BS,
            asked_BS=asked_BS if mask_BS is None else asked_BS & mask_BS,
            documents=documents,
            num_rows=int(valid_B1.sum()),
        )


def check_validation(config: Config) -> None:
    """Checks that some target counts among the rows that a run evaluates.

    Raises:
        NothingToReadError: none does, or there is no row.
    """
    decides = config.checkpoint.keep_best == "validation"
    if config.data.dataset and not decides and "validation" not in given_rows(config.data):
        return  # as the user wants it
    rows = read_rows(config, torch.device("cpu"), max_rows=config.train.eval_rows or None)
    if not any(some.asked_BS.any() for some in rows):
        raise _no_target(config, "validation")


def _no_target(config: Config, split: str) -> NothingToReadError:
    return NothingToReadError(
        f"{config.data.directory}: no target of the split {split!r} counts in the loss, so there is "
        "nothing to measure: check the data's loss mask (prompts without answers?), or hold out more"
    )


@torch.no_grad()
def evaluate(
    model: Transformer,
    config: Config,
    process: Process,
    *,
    split: str = "validation",
    exit_rule: ExitRule | None = None,
) -> Evaluation:
    """Measures the loss over a split of the data, per counted target; a collective call.

    Every rank runs the same number of passes, so that expert exchanges always match. Each row
    counts once, on one rank, without regularisation. A model that routes sequences together sees
    the same groups on every layout. Copies that fill the last batch do not count, but they do take
    places in an evaluation capacity.

    Raises:
        NothingToReadError: no target of the split counts.
    """
    dtype, options = products_dtype(config.train.precision), PassOptions(exit_rule=exit_rule)
    sums = torch.zeros(4, dtype=torch.float64, device=process.device)
    model.eval()
    for rows in read_rows(
        config,
        process.device,
        split=split,
        max_rows=config.train.eval_rows or None,
        rank=process.rank,
        num_ranks=process.world_size,
    ):
        output = forward_in(model, dtype, rows.tokens_BS, documents=rows.documents, options=options)
        losses = F.cross_entropy(
            output.logits_BSV.flatten(0, 1), rows.targets_BS.flatten(), reduction="none"
        )
        asked_BS = on_device(rows.asked_BS, process.device)
        # not by index, whose length the host would wait for
        losses_BS = losses.view_as(asked_BS).where(asked_BS, 0.0)
        sums[0] += losses_BS.sum(1, dtype=torch.float64).sum()
        sums[1] += asked_BS.sum()
        if "loops" in output.auxiliary:
            sums[2] += output.auxiliary["loops"][: rows.num_rows].sum()
            sums[3] += rows.num_rows
    model.train()
    dist.all_reduce(sums)
    loss, tokens, loops, num_rows = sums.tolist()
    if not tokens:
        raise _no_target(config, split)
    return Evaluation(loss / tokens, int(tokens), loops / num_rows if num_rows else None)
