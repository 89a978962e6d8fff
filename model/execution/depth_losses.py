"""A user's own losses on the residual stream's state after every depth step.

`train.losses` names the functions and their weights. The model calls them at the end of every
training forward pass; evaluation has none. The backward pass keeps the states anyway, so a loss
costs only its own computation; a read-out costs as much as the model's.

Legend: B sequences, S positions, D model width, L depth steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...plugins import PluginError, Registry
from ..balance import RouterReport
from ..config.model_config import DepthStep


@dataclass(frozen=True)
class DepthStates:
    """Holds the inputs of a depth loss from one forward pass."""

    states_L: tuple[Tensor, ...]  # (B, S, D) after every depth step, in the embedding's dtype
    tokens_BS: Tensor  # int64: the input
    targets_BS: Tensor  # int64: the token after every position
    loss_mask_BS: Tensor | None  # bool: which targets count; None: all
    # (B, S, D) to (B,): the cross-entropy of the targets read out of a state, nats per position;
    # every sequence gets the micro-batch's mean
    cross_entropy: Callable[[Tensor], Tensor]
    # (B, S, D) to (B, S, V): the logits read out of a state, in float32, which must fit in memory
    logits: Callable[[Tensor], Tensor]
    # of every depth step in the order in which they ran, with its layer and loop: each router's
    # report by kind, whose `sums` are differentiable, per sequence
    routing: tuple[tuple[DepthStep, Mapping[str, RouterReport]], ...] = ()

    @property
    def read_out(self) -> Callable[[Tensor], Tensor]:
        """Returns `cross_entropy`, which had this name before 0.3."""
        return self.cross_entropy


DepthLoss = Callable[[DepthStates], Tensor]
DEPTH_LOSS = Registry(
    "train.losses",
    "a loss",
    {},
    "a function of DepthStates that returns a value per sequence",
    settings=True,
    takes=1,
)


@dataclass(frozen=True)
class WeightedLoss:
    """Holds a depth loss with its name and its weight."""

    path: str
    weight: float
    function: DepthLoss

    @property
    def name(self) -> str:
        """Returns the metric's name: the function's, with its settings."""
        return self.path.partition(":")[2]

    def value(self, states: DepthStates) -> Tensor:
        """Computes the loss per sequence, (B,), without its weight.

        Raises:
            PluginError: the function returns something else.
        """
        value_B = self.function(states)
        wanted = states.tokens_BS.shape[:1]
        if not isinstance(value_B, Tensor) or value_B.shape != wanted:
            shape = tuple(value_B.shape) if isinstance(value_B, Tensor) else type(value_B).__name__
            raise PluginError(
                f"train.losses: {self.path} returned {shape}: it must return one value per sequence, "
                f"a tensor of shape {tuple(wanted)}"
            )
        return value_B


def weighted_losses(weights: Mapping[str, float]) -> tuple[WeightedLoss, ...]:
    """Imports the losses named in `train.losses`.

    Raises:
        PluginError: a function does not exist.
    """
    return tuple(
        WeightedLoss(path, weight, DEPTH_LOSS.get(path)) for path, weight in weights.items()
    )
