"""Decides which steps change no weight: steps without a finite gradient or a target, and loss spikes.

    loss > median + n · 1.4826 · MAD of the last good steps, or the gradient norm with 2 n  →  a spike

Unlike mean and standard deviation, the median and the median absolute deviation (MAD) of a window
ignore outliers, and a spike's values never enter the window. A deviation is at least 1 % of the
median, for windows of nearly equal values. A loss or norm that is not finite is also a spike.

All ranks get the same numbers through the reduction of the gradient's norm
(distributed/gradients.py), so all decide alike. The window is saved with each checkpoint, so a
resumed run decides like an uninterrupted one. It costs 40 µs per step.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

logger = logging.getLogger(__name__)

WINDOW = 128
"""Good steps that a step is compared with; nothing is judged before there are as many."""

_NORMAL = 1.4826  # × MAD = the standard deviation of a normal distribution
_LEAST = 0.01  # of the median
_MOST_SKIPS = 100  # in a row
NOT_FINITE = "gradients that are not finite"
NO_TARGET = "no target that counts in the loss"
SPIKE = "a spike of the loss or the gradient norm"
_ADVICE = {
    NOT_FINITE: "lower optim.learning_rate or optim.clip_norm, or train in float32",
    NO_TARGET: "check the data's loss mask (prompts without answers?)",
    SPIKE: "check in metrics.jsonl whether train.skip_spikes is too strict",
}


@dataclass(frozen=True)
class Spike:
    """Describes a step that was judged a spike, with the limits it exceeded."""

    loss: float
    grad_norm: float
    loss_limit: float
    grad_norm_limit: float
    in_a_row: int  # spikes since the last good step, this one included


class SkipPolicy:
    """Decides after every step's backward pass whether its update is skipped.

    Args:
        deviations: `train.skip_spikes`; None: no step is a spike.
        window: good steps to compare with.
    """

    def __init__(self, deviations: float | None, window: int = WINDOW) -> None:
        self.deviations = deviations
        self._losses: deque[float] = deque(maxlen=window)  # of good steps
        self._norms: deque[float] = deque(maxlen=window)
        self._spikes_in_a_row = 0
        self._skips_in_a_row = 0

    def why_skipped(
        self, grad_norm: float, counted_targets: int | None, loss: Sequence[float]
    ) -> tuple[str | None, Spike | None]:
        """Judges a step before its update.

        Args:
            grad_norm: the norm of the whole gradient.
            counted_targets: targets in the loss over all ranks; None: all.
            loss: the step's loss over all ranks; empty without `deviations`.

        Returns:
            Why the update must be skipped, or None; and the spike, if it is one.
        """
        if counted_targets == 0 and math.isfinite(grad_norm):
            return NO_TARGET, None
        spike = None if self.deviations is None else self._judge(loss[0], grad_norm)
        if not math.isfinite(grad_norm):
            return NOT_FINITE, spike
        return (SPIKE if spike else None), spike

    def count(self, step: int, why: str | None, *, is_rank_0: bool) -> None:
        """Counts a step, and ends a run that only skips.

        Raises:
            ValueError: too many consecutive updates were skipped for the run to recover.
        """
        self._skips_in_a_row = 0 if why is None else self._skips_in_a_row + 1
        if why == NO_TARGET and is_rank_0:
            logger.warning("step %d had %s, and its update was skipped", step, why)
        if why is not None and self._skips_in_a_row == _MOST_SKIPS:
            raise ValueError(
                f"{_MOST_SKIPS} steps in a row up to step {step} were skipped, the last "
                f"for {why}: {_ADVICE[why]}, and continue from a checkpoint"
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the window for a checkpoint's meta."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
            "in_a_row": self._spikes_in_a_row,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores what `as_dict` returned; an absent window is empty."""
        self._losses.extend(saved.get("losses", ()))
        self._norms.extend(saved.get("grad_norms", ()))
        self._spikes_in_a_row = saved.get("in_a_row", 0)

    def _judge(self, loss: float, grad_norm: float) -> Spike | None:
        """Returns the spike that a step is; None: a good step, which enters the window."""
        limits = self._limits()
        values = (loss, grad_norm)
        if all(
            math.isfinite(value) and value <= most
            for value, most in zip(values, limits, strict=True)
        ):
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self._spikes_in_a_row = 0
            return None
        self._spikes_in_a_row += 1
        return Spike(loss, grad_norm, *limits, self._spikes_in_a_row)

    def _limits(self) -> tuple[float, float]:
        """Returns the largest loss and gradient norm of a good step."""
        if self.deviations is None or len(self._losses) < (self._losses.maxlen or 0):
            return math.inf, math.inf
        return _limit(self._losses, self.deviations), _limit(self._norms, 2 * self.deviations)


def _limit(values: Sequence[float], deviations: float) -> float:
    middle = median(values)
    deviation = _NORMAL * median(abs(value - middle) for value in values)
    return middle + deviations * max(deviation, _LEAST * abs(middle))
