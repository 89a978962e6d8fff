"""A rank's share of a step as its model reads it: micro-batches, which of their targets count, and
the documents that their rows consist of.

The training loss is the mean over the targets that count, of the whole optimizer step: all ranks
and all micro-batches together. A mean of the micro-batches' means would weigh the answer of a short
one more than that of a long one, and another number of ranks would train another model. So the
number of targets must be known before the first backward pass: one all-reduce of one number per
step, made only where the data has a loss mask or document ids, and with these padding. Where it has
neither every target counts, the number follows from the configuration, and nothing is exchanged.

A target counts where the mask says so, and where it and the token before it are no padding. The
first token of a document counts too, after the last one of the document before, which is the end of
a document in every data set of ours: so a model learns how texts begin.

Labels of their own (`data.targets="paired"`): every second token of a row is the target of the one
before it, and no input. So labels travel as the tokens do, through shards, order and checksums.

Masks stay on the host, which so knows how many rows the read-out has without asking the device.

Legend: A micro-batches, B sequences of one, S positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..data_pipeline.read.loader import Batch
from ..model.documents import Documents, mark_documents
from .config.run_config import Config


@dataclass(frozen=True)
class MicroBatch:
    """Holds the rows of one forward pass, and what of them counts."""

    inputs_BS: Tensor  # int64, on the device
    targets_BS: Tensor  # int64, on the device: what is to be predicted at each of them
    loss_mask_BS: Tensor | None = None  # bool, on the host, of the targets; None: all count
    documents: Documents | None = None  # of the input tokens; None: every row is one
    document_ids_BS: Tensor | None = None  # int32, on the host: what `documents` was made of
    equal_rows: bool = False  # all ranks have equally many tokens, none of them padding


@dataclass(frozen=True)
class DocumentUse:
    """Says what of a row is input and target, and what a run respects of its documents beside
    padding.
    """

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
        """Returns which targets of a micro-batch count, on the host, and what it has of documents.

        Args:
            loss_mask: bool [B, S], of all tokens but the first; None: all count.
            document_ids: int32 [B, S+1]; None: the data says nothing of documents.
            device: the model's.

        Raises:
            ValueError: documents are to be respected, and the data does not have them.
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
    """Returns what a run is configured to read of its rows."""
    return DocumentUse(
        config.data.document_attention,
        config.train.balance_documents,
        paired=config.data.targets == "paired",
    )


def split_batch(batch: Batch, device: torch.device, use: DocumentUse) -> list[MicroBatch]:
    """Returns the micro-batches of a rank's batch, their tokens on `device`.

    Raises:
        ValueError: documents are to be respected, and the batch does not have them.
    """
    rows_ABS1 = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
    found = []
    for index, rows_BS1 in enumerate(rows_ABS1):
        mask = None if batch.loss_mask is None else batch.loss_mask[index]
        ids = None if batch.document_ids is None else batch.document_ids[index]
        ids_BS = None if ids is None else use.split(torch.from_numpy(ids))[0]
        mask_BS, documents = use.read(mask, ids, device)
        found.append(
            MicroBatch(
                *use.split(rows_BS1),
                mask_BS,
                documents,
                ids_BS,
                # Padding is no row of a sparse layer, and ranks have more or less of it.
                equal_rows=batch.equal_shapes and documents is None,
            )
        )
    return found


def count_targets(micro_batches: list[MicroBatch], device: torch.device) -> int | None:
    """Counts the targets of a step that count, over all ranks and micro-batches.

    A collective call where the data has a loss mask or document ids, which it has on all ranks or
    on none.

    Returns:
        The number; None where there is neither, and all count.
    """
    masks = [each.loss_mask_BS for each in micro_batches if each.loss_mask_BS is not None]
    if not masks:
        return None
    total = torch.stack([mask_BS.sum() for mask_BS in masks]).sum().to(device)
    dist.all_reduce(total)
    return int(total.item())
