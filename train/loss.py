"""The loss of one micro-batch as this rank's contribution to one global scalar.

loss = Σ over local tokens of cross-entropy ÷ global tokens + Σ over local sequences of
regularisation ÷ global sequences, both over all ranks and accumulation steps. So every reduction of
gradients is a plain sum: no 1/dp, no 1/ep, no 1/steps anywhere.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..model.balance import DepthLoad
from ..model.transformer import ModelOutput


class Forward(Protocol):
    """A forward pass to the loss: a model, or one in lower precision (model/precision.py)."""

    def __call__(self, tokens_BS: Tensor, *, targets_BS: Tensor) -> ModelOutput:
        """Returns the loss of tokens, given those that follow them; both (B, S) int64."""
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
    forward: Forward, rows_BS1: Tensor, *, global_sequences: int
) -> MicroBatchLoss:
    """Runs the model on rows of S + 1 tokens: the first S are the input, the last S the targets.

    Args:
        rows_BS1: int64, every token valid.
        global_sequences: rows of one optimizer step over all ranks.
    """
    inputs_BS, targets_BS = rows_BS1[:, :-1], rows_BS1[:, 1:]
    output = forward(inputs_BS, targets_BS=targets_BS)
    cross_entropy = output.cross_entropy / (global_sequences * inputs_BS.shape[1])
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
