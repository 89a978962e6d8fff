"""A rank's share of a step as its model reads it: micro-batches, and which of their targets count.

The training loss is the mean over the targets that count, of the whole optimizer step: all ranks
and all micro-batches together. A mean of the micro-batches' means would weigh the answer of a short
one more than that of a long one, and another number of ranks would train another model. So the
number of targets must be known before the first backward pass: one all-reduce of one number per
step, made only where the data has a loss mask. Where it has none every target counts, the number
follows from the configuration, and nothing is exchanged.

Masks stay on the host, which so knows how many rows the read-out has without asking the device.

Legend: A micro-batches, B sequences of one, S positions.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..data_pipeline.loader import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Holds the rows of one forward pass, and what of them counts."""

    rows_BS1: Tensor  # int64, on the device: the first S tokens are the input, the last S targets
    loss_mask_BS: Tensor | None = None  # bool, on the host, of the targets; None: all count


def split_batch(batch: Batch, device: torch.device) -> list[MicroBatch]:
    """Returns the micro-batches of a rank's batch, their tokens on `device`."""
    rows_ABS1 = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
    if batch.loss_mask is None:
        return [MicroBatch(rows_BS1) for rows_BS1 in rows_ABS1]
    masks_ABS = torch.from_numpy(batch.loss_mask)
    return [MicroBatch(*each) for each in zip(rows_ABS1, masks_ABS, strict=True)]


def count_targets(micro_batches: list[MicroBatch], device: torch.device) -> int | None:
    """Counts the targets of a step that count, over all ranks and micro-batches.

    A collective call where the data has a loss mask, which it has on all ranks or on none.

    Returns:
        The number; None where there is no mask, and all count.
    """
    masks = [each.loss_mask_BS for each in micro_batches if each.loss_mask_BS is not None]
    if not masks:
        return None
    total = torch.stack([mask_BS.sum() for mask_BS in masks]).sum().to(device)
    dist.all_reduce(total)
    return int(total.item())
