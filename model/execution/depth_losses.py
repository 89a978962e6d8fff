"""Losses of the user's own on the states of the residual stream, one state per depth step.

`train.losses` names the functions with their weights. The model calls them at the end of every
forward pass in training; evaluation has none. The states are kept for the backward pass in any case,
so a loss costs what it computes; a read-out costs as much as the model's own.

Legend: B sequences, S positions, D model width, L depth steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...own_parts import OwnPartError, Wanted


@dataclass(frozen=True)
class DepthStates:
    """Holds what a loss on depth steps sees of one forward pass."""

    states_L: tuple[Tensor, ...]  # (B, S, D) after every depth step, as wide as the embedding
    tokens_BS: Tensor  # int64: the input
    targets_BS: Tensor  # int64: the token after every position
    loss_mask_BS: Tensor | None  # bool: which targets count; None: all
    # (B, S, D) to (B,): the cross-entropy of reading the targets out of a state, nats per position;
    # the mean of the micro-batch, for each of its sequences
    read_out: Callable[[Tensor], Tensor]


DepthLoss = Callable[[DepthStates], Tensor]
DEPTH_LOSS = Wanted(
    "train.losses",
    "a loss",
    {},
    "a function of DepthStates that returns a value per sequence",
    settings=True,
)


@dataclass(frozen=True)
class WeightedLoss:
    """Holds a loss on depth steps, with its name and its weight in the whole loss."""

    path: str
    weight: float
    function: DepthLoss

    @property
    def name(self) -> str:
        """Returns the name in the metrics: the function's, with its settings."""
        return self.path.partition(":")[2]

    def value(self, states: DepthStates) -> Tensor:
        """Computes the loss per sequence, (B,), without its weight.

        Raises:
            OwnPartError: the function returns something else.
        """
        value_B = self.function(states)
        wanted = states.tokens_BS.shape[:1]
        if not isinstance(value_B, Tensor) or value_B.shape != wanted:
            shape = tuple(value_B.shape) if isinstance(value_B, Tensor) else type(value_B).__name__
            raise OwnPartError(
                f"train.losses: {self.path} returned {shape}: it must return one value per sequence, "
                f"a tensor of shape {tuple(wanted)}"
            )
        return value_B


def weighted_losses(weights: Mapping[str, float]) -> tuple[WeightedLoss, ...]:
    """Imports the losses of `train.losses`.

    Raises:
        OwnPartError: there is no such function.
    """
    return tuple(
        WeightedLoss(path, weight, DEPTH_LOSS.get(path)) for path, weight in weights.items()
    )
