"""Validation loss: the mean over every validation token, the same for any number of ranks."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..data_pipeline.read.corruption import open_fetcher
from ..data_pipeline.read.loader import validation_batches
from ..distributed.process.process import Process
from ..model.execution.precision import forward_in, products_dtype
from ..model.transformer import Transformer
from .config.run_config import Config
from .micro_batches import document_use


@dataclass(frozen=True)
class Evaluation:
    """The mean cross-entropy (nats per token) over the `tokens` tokens that count."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Returns the perplexity, exp(loss); a loss above 700 counts as 700."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: Transformer, config: Config, process: Process, *, split: str = "validation"
) -> Evaluation:
    """Measures the loss over a split of the data, per target that counts; a collective call.

    Every rank runs the same number of passes, so that expert exchanges always meet.

    Rows do not overlap; each counts once, on one rank. Evaluation mode: no regularisation. A model
    that routes sequences together sees the same groups on every layout. Copies that fill up the
    last batch do not count, but where there is a capacity in evaluation they take places like other
    rows.

    Raises:
        ValueError: no target of the split counts.
    """
    dtype = products_dtype(config.train.precision)
    sums = torch.zeros(2, dtype=torch.float64, device=process.device)
    model.eval()
    group = config.model.evaluation_group_sequences
    wanted = config.train.eval_batch or config.train.micro_batch
    use = document_use(config)
    for batch in validation_batches(
        Path(config.data.directory),
        split=split,
        seq_len=config.data.seq_len,
        batch_size=-(-wanted // group) * group,
        sequences_per_group=group,
        rank=process.rank,
        num_ranks=process.world_size,
        max_rows=config.train.eval_rows or None,
        document_ids=config.data.gives_document_ids,
        fetch=open_fetcher(config.data),
    ):
        rows_BS1 = torch.from_numpy(batch.tokens).to(process.device)
        valid_B = torch.from_numpy(batch.valid).to(process.device)
        mask_BS, documents = use.read(batch.loss_mask, batch.document_ids, process.device)
        inputs_BS, targets_BS = use.split(rows_BS1)
        logits_BSV = forward_in(model, dtype, inputs_BS, documents=documents).logits_BSV
        losses = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none")
        losses_BS = losses.view_as(targets_BS)
        if mask_BS is None:
            counted_B = valid_B * losses_BS.shape[1]
        else:
            mask_BS = mask_BS.to(process.device)
            losses_BS = losses_BS.where(mask_BS, 0.0)
            counted_B = mask_BS.sum(1) * valid_B
        # not by an index, for whose length the host would wait
        sums[0] += losses_BS.sum(1, dtype=torch.float64).where(valid_B, 0.0).sum()
        sums[1] += counted_B.sum()
    model.train()
    dist.all_reduce(sums)
    loss, tokens = sums.tolist()
    if not tokens:
        raise ValueError(
            f"{config.data.directory}: no target of the split {split!r} counts in the loss, so "
            "there is nothing to measure: look at the data's loss mask (prompts without answers?)"
        )
    return Evaluation(loss=loss / tokens, tokens=int(tokens))
