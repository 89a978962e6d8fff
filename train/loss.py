"""The loss of one micro-batch as this rank's contribution to one global scalar.

loss = Σ over local tokens of cross-entropy ÷ global tokens + Σ over local sequences of
regularisation ÷ global sequences, global meaning all ranks and accumulation steps. Every reduction
of gradients is therefore a plain sum, without 1/dp, 1/ep or 1/steps. With a loss mask only counted
targets are tokens here (train/micro_batches.py counts them); regularisation covers all tokens,
because experts serve prompts and answers alike. Only the exits' entropy covers counted targets alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..model.balance import DepthLoad
from ..model.documents import Documents
from ..model.loops.steps import PassOptions
from ..model.transformer import ModelOutput
from .micro_batches import MicroBatch


class Forward(Protocol):
    """Runs a forward pass to the loss: a model, or one in lower precision
    (model/execution/precision.py).
    """

    def __call__(
        self,
        tokens_BS: Tensor,
        *,
        targets_BS: Tensor,
        loss_mask_BS: Tensor | None,
        documents: Documents | None,
        options: PassOptions,
    ) -> ModelOutput:
        """Returns the loss of tokens given their next tokens, as `Transformer.forward` does."""
        ...


@dataclass(frozen=True)
class MicroBatchLoss:
    """Holds a micro-batch's share of the loss and the reports of its forward pass."""

    loss: Tensor  # scalar, differentiable
    cross_entropy: Tensor  # detached: this micro-batch's share of the global mean, nats per token
    # detached: its share of the mean over sequences, all auxiliary losses with their coefficients
    regularisation: Tensor
    # detached: the same of every auxiliary loss, without its coefficient
    auxiliary: dict[str, Tensor]
    loads: dict[str, DepthLoad]
    carried: dict[
        str, Tensor
    ]  # this micro-batch's part of the totals that `Router.after_step` gets


def micro_batch_loss(
    forward: Forward,
    micro_batch: MicroBatch,
    *,
    global_sequences: int,
    global_targets: int | None = None,
    options: PassOptions | None = None,
) -> MicroBatchLoss:
    """Runs the model on a micro-batch; padding must hold token ids in range, too.

    Args:
        forward: the forward pass.
        micro_batch: inputs, targets, and which of them count.
        global_sequences: rows of one optimizer step over all ranks.
        global_targets: counted targets of one optimizer step over all ranks; required with a mask.
            If 0, the cross-entropy is 0.
        options: of the pass; None: as configured.

    Returns:
        Its share of the global loss, in nats per token, and what the pass has reported.

    Raises:
        ValueError: only one of mask and number is given.
    """
    mask_BS = micro_batch.loss_mask_BS
    if (mask_BS is None) != (global_targets is None):
        raise ValueError(
            "a loss mask requires the number of counted targets in the whole step, and vice versa; "
            f"given: {'no' if mask_BS is None else 'a'} mask and {global_targets=}"
        )
    output = forward(
        micro_batch.inputs_BS,
        targets_BS=micro_batch.targets_BS,
        loss_mask_BS=mask_BS,
        documents=micro_batch.documents,
        options=options or PassOptions(),
    )
    if global_targets is None:
        cross_entropy = output.cross_entropy / (global_sequences * micro_batch.inputs_BS.shape[1])
    else:
        cross_entropy = output.cross_entropy / max(global_targets, 1)
    regularisation = output.regularisation_B.sum() / global_sequences
    auxiliary: dict[str, Tensor] = {}
    if output.auxiliary:  # together, because a logged step has dozens
        sums = torch.stack([*output.auxiliary.values()]).sum(1) / global_sequences
        auxiliary = dict(zip(output.auxiliary, sums.unbind(), strict=True))
    return MicroBatchLoss(
        loss=cross_entropy + regularisation,
        cross_entropy=cross_entropy.detach(),
        regularisation=regularisation.detach(),
        auxiliary=auxiliary,
        loads=output.loads,
        carried=output.carried,
    )
