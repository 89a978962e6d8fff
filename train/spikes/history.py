"""A run's loss spikes: the window that detects them, and the rollbacks made so far.

    loss or norm > median + n · 1.4826 · MAD of the last good steps  →  a spike: no update
    several spikes within a few steps                                →  the run rolls back

Unlike mean and standard deviation, the median and the median absolute deviation (MAD) of a window
ignore outliers, and a spike's values never enter the window. A deviation is at least 1 % of the
median, for windows of nearly equal values. A loss or norm that is not finite is also a spike.

All ranks get the same numbers through the reduction of the gradient's norm
(distributed/gradients.py), so all decide alike. The window is saved with each checkpoint, so a
resumed run decides like an uninterrupted one. A window of 128 costs 40 µs per step.

Rollbacks are in the run folder's rollbacks.json, which is written before a run rolls back: a
resumed run skips the same samples in any case, on any number of ranks. Every checkpoint's meta has
the rollbacks before it, which identifies abandoned checkpoints.
"""

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from ...data_pipeline.read.skipped_samples import SkippedSamples
from ..config.train_config import SpikeConfig

_NORMAL = 1.4826  # × MAD = the standard deviation of a normal distribution
_LEAST = 0.01  # of the median


@dataclass(frozen=True)
class Spike:
    """Describes a step that was judged a spike, with the limits it exceeded."""

    loss: float
    grad_norm: float
    loss_limit: float
    grad_norm_limit: float
    in_a_row: int  # spikes since the last good step, this one included


class SpikeDetector:
    """Judges one step after another."""

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=config.window)  # of good steps
        self._norms: deque[float] = deque(maxlen=config.window)
        self._spikes: list[int] = []  # the last steps that were spikes
        self._in_a_row = 0

    @property
    def recent(self) -> Sequence[int]:
        """Returns the spikes of the last `rollback_within` steps."""
        return tuple(self._spikes)

    @property
    def rollback_is_due(self) -> bool:
        """Returns whether there were enough spikes to roll back."""
        return self.config.action == "rollback" and len(self._spikes) >= self.config.rollback_after

    def judge(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Returns the spike that a step is; None: a good step, which enters the window."""
        self._spikes = [one for one in self._spikes if one > step - self.config.rollback_within]
        limits = self._limits(step)
        values = (loss, grad_norm)
        if all(
            math.isfinite(value) and value <= most
            for value, most in zip(values, limits, strict=True)
        ):
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self._in_a_row = 0
            return None
        if step <= self.config.warmup_steps:
            return None
        self._in_a_row += 1
        self._spikes.append(step)
        return Spike(loss, grad_norm, *limits, self._in_a_row)

    def forget_spikes(self) -> None:
        """Clears the counted spikes after a reaction."""
        self._spikes.clear()

    def as_dict(self) -> dict[str, Any]:
        """Returns the state of the detector for a checkpoint's meta."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
            "spikes": list(self._spikes),
            "in_a_row": self._in_a_row,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores what `as_dict` returned; empty if the run was saved with spikes off."""
        window = self.config.window
        self._losses = deque(saved.get("losses", ()), maxlen=window)
        self._norms = deque(saved.get("grad_norms", ()), maxlen=window)
        self._spikes = list(saved.get("spikes", ()))
        self._in_a_row = saved.get("in_a_row", 0)

    def _limits(self, step: int) -> tuple[float, float]:
        """Returns the largest loss and gradient norm of a good step."""
        config = self.config
        if step <= config.warmup_steps or len(self._losses) < config.window // 2:
            return math.inf, math.inf
        return (
            _limit(self._losses, config.loss_deviations),
            _limit(self._norms, config.grad_norm_deviations),
        )


def _limit(values: Sequence[float], deviations: float) -> float:
    middle = median(values)
    deviation = _NORMAL * median(abs(value - middle) for value in values)
    return middle + deviations * max(deviation, _LEAST * abs(middle))


FILE = "rollbacks.json"


class Rollback(BaseModel):
    """Records one return to an earlier checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_step: NonNegativeInt  # the last step before the rollback
    to_step: NonNegativeInt  # of the checkpoint
    first_sample: NonNegativeInt  # of the skipped samples
    end_sample: NonNegativeInt
    why: str


_LIST = TypeAdapter(tuple[Rollback, ...])


def read_rollbacks(run_dir: Path) -> tuple[Rollback, ...]:
    """Returns the rollbacks of a run, in order.

    Raises:
        ValueError: the file cannot be read, or is damaged.
    """
    path = run_dir / FILE
    try:
        return _LIST.validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise ValueError(
            f"{path} is damaged ({error.errors()[0]['msg']}): restore it, or copy the list "
            '"rollbacks" from the newest checkpoint\'s meta.json; without it the run would read '
            "skipped samples again"
        ) from None


def write_rollbacks(run_dir: Path, rollbacks: Sequence[Rollback]) -> None:
    """Writes a run's rollbacks atomically, and returns once they are on disk."""
    partial = run_dir / f"{FILE}.tmp"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(as_values(rollbacks), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(run_dir / FILE)


def as_values(rollbacks: Sequence[Rollback]) -> list[dict[str, Any]]:
    """Returns rollbacks as JSON values."""
    return [rollback.model_dump() for rollback in rollbacks]


def from_values(values: Any) -> tuple[Rollback, ...]:
    """Returns the rollbacks from the values of `as_values`."""
    return _LIST.validate_python(values)


def skipped_by(rollbacks: Sequence[Rollback]) -> SkippedSamples:
    """Returns the samples that a run with these rollbacks skips."""
    return SkippedSamples.of(range(one.first_sample, one.end_sample) for one in rollbacks)


def why_abandoned(step: int, known: int, rollbacks: Sequence[Rollback]) -> str:
    """Returns why a run must not resume from a checkpoint; "" if it may.

    Args:
        step: of the checkpoint.
        known: the number of rollbacks when it was saved.
        rollbacks: of the run.
    """
    for rollback in rollbacks[known:]:
        if rollback.to_step < step:
            return (
                f"was saved before the run went back from step {rollback.from_step} to step "
                f"{rollback.to_step}"
            )
    return ""
