"""The loss of one micro-batch as this rank's contribution to one global scalar.

loss = Σ over local tokens of cross-entropy ÷ global tokens + Σ over local sequences of
regularisation ÷ global sequences, both over all ranks and accumulation steps. So every reduction of
gradients is a plain sum: no 1/dp, no 1/ep, no 1/steps anywhere. With a loss mask tokens are those
whose targets count (train/micro_batches.py counts them); regularisation is of all tokens, for
experts serve prompts as they serve answers.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..model.balance import DepthLoad
from ..model.documents import Documents
from ..model.transformer import ModelOutput


class Forward(Protocol):
    """A forward pass to the loss: a model, or one in lower precision (model/execution/precision.py)."""

    def __call__(
        self,
        tokens_BS: Tensor,
        *,
        targets_BS: Tensor,
        loss_mask_BS: Tensor | None,
        documents: Documents | None,
    ) -> ModelOutput:
        """Returns the loss of tokens, given those that follow them; both (B, S) int64.

        `loss_mask_BS`: bool, which of those that follow count; None: all. `documents`: of the
        tokens; None: every row is one.
        """
        ...


@dataclass(frozen=True)
class MicroBatchLoss:
    """This micro-batch's share of the loss, and what its forward pass reports."""

    loss: Tensor  # scalar, to be differentiated
    cross_entropy: Tensor  # detached: this micro-batch's share of the global mean, nats per token
    # detached: its share of the mean over sequences, all auxiliary losses with their coefficients
    regularisation: Tensor
    # detached: the same of every auxiliary loss, without its coefficient
    auxiliary: dict[str, Tensor]
    loads: dict[str, DepthLoad]
    carried: dict[str, Tensor]  # sums of this micro-batch that routers want of the whole step


def micro_batch_loss(
    forward: Forward,
    rows_BS1: Tensor,
    *,
    global_sequences: int,
    targets_BS: Tensor | None = None,
    loss_mask_BS: Tensor | None = None,
    global_targets: int | None = None,
    documents: Documents | None = None,
) -> MicroBatchLoss:
    """Runs the model on rows of S + 1 tokens: the first S are the input, the last S the targets.

    Args:
        rows_BS1: int64, every token valid, padding too.
        targets_BS: where these are given, all of the rows is input, and these are what is to be
            predicted at each token of it.
        global_sequences: rows of one optimizer step over all ranks.
        loss_mask_BS: bool: which targets count; None: all of them.
        global_targets: those that count in one optimizer step over all ranks; needed with a mask.
            With none at all the cross-entropy is 0.
        documents: of the input tokens; None: every row is one.

    Raises:
        ValueError: one of mask and number without the other.
    """
    if (loss_mask_BS is None) != (global_targets is None):
        raise ValueError(
            "a loss mask and the number of targets that count in the whole step go together; "
            f"given: {'no' if loss_mask_BS is None else 'a'} mask and {global_targets=}"
        )
    inputs_BS = rows_BS1
    if targets_BS is None:
        inputs_BS, targets_BS = rows_BS1[:, :-1], rows_BS1[:, 1:]
    output = forward(
        inputs_BS, targets_BS=targets_BS, loss_mask_BS=loss_mask_BS, documents=documents
    )
    if global_targets is None:
        cross_entropy = output.cross_entropy / (global_sequences * inputs_BS.shape[1])
    else:
        cross_entropy = output.cross_entropy / max(global_targets, 1)
    regularisation = output.regularisation_B.sum() / global_sequences
    auxiliary = {
        name: value_B.sum() / global_sequences for name, value_B in output.auxiliary.items()
    }
    return MicroBatchLoss(
        loss=cross_entropy + regularisation,
        cross_entropy=cross_entropy.detach(),
        regularisation=regularisation.detach(),
        auxiliary=auxiliary,
        loads=output.loads,
        carried=output.carried,
    )
