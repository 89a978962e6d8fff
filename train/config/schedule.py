"""The learning rate of every step: the published cosine, or a user's own."""

import math
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ...plugins import PluginError, Registry

# The function is defined below; `ScheduleConfig` needs only its name.
SCHEDULE = Registry(
    "optim.schedule",
    "a schedule",
    {"cosine": lambda step, config: cosine_rate(config, step)},
    "a function of (step, OptimConfig) that returns the learning rate",
    settings=True,
    takes=2,
)


class ScheduleConfig(BaseModel):
    """Configures warm-up and cosine: the half of `OptimConfig` that makes the learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schedule: Annotated[str, SCHEDULE] = "cosine"
    """The learning-rate schedule."""

    learning_rate: float = Field(default=2.5e-4, gt=0)
    """Peak of the schedule."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the peak at which the cosine ends."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    decay_steps: PositiveInt | None = None
    """Half period of the cosine, counted from the end of the warm-up; none: what is left of
    `train.steps`."""

    def over(self, steps: int) -> Self:
        """Returns the settings of a run of so many steps, in which `decay_steps` is a number."""
        rest = max(1, steps - self.warmup_steps)
        return self.model_copy(update={"decay_steps": self.decay_steps or rest})


def schedule_notes(
    config: ScheduleConfig, steps: int, steps_before: int | None = None
) -> list[str]:
    """Says in at most one line where the cosine does not end with the run, or ended elsewhere before.

    `steps_before` is `train.steps` of the run that is continued; None: it is new.
    """
    if config.schedule != "cosine":
        return []
    ends = config.warmup_steps + (config.decay_steps or 0)
    last = f"the last step's rate is {cosine_rate(config.over(steps), steps - 1):.3g}"
    if config.warmup_steps > steps:
        return [
            f"optim.warmup_steps={config.warmup_steps} is more than train.steps={steps}: {last}"
        ]
    if config.decay_steps is None and steps_before is not None and steps_before != steps:
        return [
            f"train.steps={steps_before} became {steps}: the cosine ends with the run, so the rate "
            "of the next step differs; to keep the former one, set "
            f"optim.decay_steps={config.over(steps_before).decay_steps}"
        ]
    if config.decay_steps is None or steps <= ends <= 2 * steps:
        return []
    return [
        f"optim.decay_steps={config.decay_steps} ends the cosine at step {ends}, and train.steps="
        f"{steps}: {last}; optim.decay_steps=none ends it with the run"
    ]


def learning_rate_at(config: ScheduleConfig, step: int) -> float:
    """Returns the learning rate of step `step`, counted from 0.

    Raises:
        PluginError: a user's own schedule returns no number, or a negative one.
    """
    rate = SCHEDULE.get(config.schedule)(step, config)
    if getattr(rate, "ndim", None) == 0:  # of numpy or torch
        rate = rate.item()
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise PluginError(
            f"optim.schedule: {config.schedule} returned {rate!r} for step {step}: it must return "
            "the learning rate, a number that is at least 0"
        )
    return float(rate)


def cosine_rate(config: ScheduleConfig, step: int) -> float:
    """Returns the learning rate of the published schedule.

    Warm-up peak·(step+1)/N_w, then a cosine whose half period is `decay_steps` *after* the warm-up.
    As in the published runs, with 4000 of 100,000 steps the last rate is a little above
    final_fraction·peak.
    """
    peak, floor = config.learning_rate, config.final_fraction
    assert config.decay_steps is not None, "a run's settings come from `over`"
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / config.decay_steps, 1.0)
    return peak * (floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * progress)))
