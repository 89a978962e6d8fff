"""Splits a rank's share of a step into micro-batches, with their counted targets and documents.

The training loss is the mean over all counted targets of the optimizer step, over all ranks and
micro-batches. A mean of the micro-batches' means would overweight short answers, and would train
another model on another number of ranks. So the number of targets must be known before the first
backward pass: one all-reduce of one number per step, made only if the data has a loss mask or
document ids. Otherwise every target counts, and the number follows from the configuration.

A target counts if the mask says so and neither it nor the token before it is padding. A document's
first token counts too, after the end-of-document token before it, so that a model learns how texts
begin.

With `data.targets="paired"` the data has its own labels: every second token of a row is the target
of the one before it, and no input. Labels thus travel like tokens, through shards, order and
checksums.

Masks stay on the host, which then knows the read-out's number of rows without asking the device.

Legend: A micro-batches, B sequences of one, S positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..data_pipeline.read.loader import Batch
from ..distributed.process.process import Process
from ..model.documents import Documents, mark_documents
from ..model.execution.draws import Draws, draws_of
from ..model.layers import on_device
from ..model.loops.depth import depths_of_step, loops_of
from ..model.loops.steps import PassOptions
from .config.run_config import Config

_DRAWS_COMPARED = 64  # steps whose loops the ranks compare before the first


@dataclass(frozen=True)
class MicroBatch:
    """Holds the rows of one forward pass, and which of them count."""

    inputs_BS: Tensor  # int64, on the device
    targets_BS: Tensor  # int64, on the device: each input's target
    loss_mask_BS: Tensor | None = None  # bool, on the host, of the targets; None: all count
    documents: Documents | None = None  # of the input tokens; None: every row is one
    equal_rows: bool = False  # all ranks have equally many tokens and no padding


@dataclass(frozen=True)
class DocumentUse:
    """Says how rows split into input and target, and what respects documents beside padding."""

    attention: bool  # data.document_attention
    balance: bool  # train.balance_documents
    paired: bool = False  # data.targets="paired"

    def split(self, rows_BS1: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs of rows of tokens, and the target of each input."""
        if self.paired:
            return rows_BS1[:, :-1:2], rows_BS1[:, 1::2]
        return rows_BS1[:, :-1], rows_BS1[:, 1:]

    def read(
        self,
        loss_mask: np.ndarray | None,
        document_ids: np.ndarray | None,
        device: torch.device,
    ) -> tuple[Tensor | None, Documents | None]:
        """Returns which targets of a micro-batch count, on the host, and its documents.

        Args:
            loss_mask: bool [B, S], of all tokens but the first; None: all count.
            document_ids: int32 [B, S+1]; None: the data has none.
            device: the model's.

        Raises:
            ValueError: the run must respect documents, and the data has none.
        """
        mask_BS = None if loss_mask is None else torch.from_numpy(loss_mask)
        if mask_BS is not None and self.paired:
            mask_BS = mask_BS[:, ::2]
        if document_ids is None:
            if self.attention or self.balance:
                raise ValueError(
                    f"data.document_attention={self.attention} and train.balance_documents="
                    f"{self.balance} need the documents of every row, and these batches have none: "
                    "set both to false, or read data whose batches have document_ids"
                )
            return mask_BS, None
        ids_BS1 = torch.from_numpy(document_ids)
        of_inputs_BS, of_targets_BS = self.split(ids_BS1)
        real_BS = (of_inputs_BS >= 0) & (of_targets_BS >= 0)
        documents = mark_documents(
            of_inputs_BS, device, attention=self.attention, balance=self.balance
        )
        return real_BS if mask_BS is None else mask_BS & real_BS, documents


def document_use(config: Config) -> DocumentUse:
    """Returns how a run is configured to read its rows."""
    return DocumentUse(
        config.data.document_attention,
        config.train.balance_documents,
        paired=config.data.targets == "paired",
    )


def split_batch(batch: Batch, device: torch.device, use: DocumentUse) -> list[MicroBatch]:
    """Returns the micro-batches of a rank's batch, with tokens on `device`.

    Raises:
        ValueError: the run must respect documents, and the batch has none.
    """
    rows_ABS1 = on_device(torch.from_numpy(batch.tokens), device)
    found = []
    for index, rows_BS1 in enumerate(rows_ABS1):
        mask = None if batch.loss_mask is None else batch.loss_mask[index]
        ids = None if batch.document_ids is None else batch.document_ids[index]
        mask_BS, documents = use.read(mask, ids, device)
        found.append(
            MicroBatch(
                *use.split(rows_BS1),
                mask_BS,
                documents,
                # Sparse layers drop padding, of which ranks have different amounts.
                equal_rows=batch.equal_shapes and documents is None,
            )
        )
    return found


def count_targets(micro_batches: list[MicroBatch], device: torch.device) -> int | None:
    """Counts a step's targets in the loss, over all ranks and micro-batches.

    A collective call if the data has a loss mask or document ids, which it has on all ranks or on
    none.

    Returns:
        The number; None: all count.
    """
    masks = [each.loss_mask_BS for each in micro_batches if each.loss_mask_BS is not None]
    if not masks:
        return None
    total = torch.stack([mask_BS.sum() for mask_BS in masks]).sum().to(device)
    dist.all_reduce(total)
    return int(total.item())


def options_of_passes(
    config: Config, step: int, process: Process, micro_batches: Sequence[MicroBatch]
) -> list[PassOptions]:
    """Returns the loops, draws and promises of this rank's passes in a step."""
    seed, rows, num_passes = config.train.seed, config.train.micro_batch, len(micro_batches)
    depths = depths_of_step(
        config.model,
        seed,
        step,
        rank=process.rank,
        num_ranks=process.world_size,
        passes=num_passes,
        rows=rows,
    )
    return [
        PassOptions(
            depth=depth,
            draws=pass_draws(seed, step, process.rank * num_passes + place, rows, process.device),
            recompute=config.train.recompute,
            equal_rows=micro_batch.equal_rows and depth.of_sequence is None,
        )
        for place, (micro_batch, depth) in enumerate(zip(micro_batches, depths, strict=True))
    ]


def pass_draws(seed: int, step: int, index: int, rows: int, device: torch.device) -> Draws:
    """Returns the random numbers of the step's `index`-th micro-batch of `rows` over all ranks."""
    return draws_of(f"{seed}/{step}", torch.arange(index * rows, (index + 1) * rows, device=device))


def depth_facts(config: Config) -> dict[str, str]:
    """Returns the loops of the first steps as text, which every rank must draw alike."""
    depth, mean = config.model.loops.depth, config.model.num_repeats
    drawn = [loops_of(depth, mean, config.train.seed, step, 0) for step in range(_DRAWS_COMPARED)]
    return {"loops of the first steps": " ".join(map(str, drawn))}
