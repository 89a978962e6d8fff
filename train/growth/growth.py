"""What an operator of growth returns."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...distributed.checkpoint.grown import Take
from ...model.config.model_config import ModelConfig


@dataclass(frozen=True)
class Given:
    """Holds what an operator may use beside the model and its words."""

    seed: int
    tensor: Callable[[str], Tensor]  # reads a whole tensor of the model before


@dataclass(frozen=True)
class Growth:
    """Holds a grown model and what its tensors copy; those without a `Take` stay as they are."""

    model: ModelConfig
    takes: tuple[Take, ...]
    promise: str  # a sentence for the user
    is_exact: bool = True  # False: the loss before and after is said
    notes: tuple[str, ...] = ()  # for the user, a line each
