"""What watches the loops of a pass: it names the sequences that make each one, and sees what changed.

A pass has one of three: this one, which only knows each sequence's depth; `LoopMeasures`, which
compares loops in training; or `Exits`, which lets sequences leave in evaluation.

Legend: B sequences, S positions, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..balance import RouterReport
from ..config.model_config import DepthStep
from .depth import PassDepth


@dataclass(frozen=True)
class Reading:
    """Reads a state between two loops as the pass would at its end."""

    rows: Callable[[Tensor, Tensor | None], Tensor]  # of a state of sequences (B',); None: of all
    logits: Callable[[Tensor], Tensor]  # of such rows
    gate: Callable[[Tensor], Tensor] | None  # the exit gate, of such rows; None: the model has none


class LoopWatch:
    """Follows the depth of every sequence, and measures nothing."""

    marks_choices = False  # whether `see_routes` needs the experts of every route

    def __init__(self, depth: PassDepth, x_BSD: Tensor, real_BS: Tensor | None) -> None:
        """Takes which positions are not padding, bool; None: all."""
        self.depth, self.batch_size, self.real_BS = depth, len(x_BSD), real_BS

    def enter(self, loop: int) -> list[int] | None:
        """Returns the sequences that make a loop of the pass; None: all."""
        return self.depth.live(loop)

    def see_routes(self, step: DepthStep, report: RouterReport | None) -> None:
        """Sees the choices of the feed-forward's router in a depth step."""

    def leave(self, loop: int, before_BSD: Tensor, after_BSD: Tensor, reading: Reading) -> None:
        """Sees the states of the sequences that have made a loop, before and after it."""

    def values(self) -> dict[str, Tensor]:
        """Returns what the pass logs, (B,) by name."""
        return {}
