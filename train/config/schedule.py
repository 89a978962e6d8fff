"""The learning rate of every step: cosine, warm-up–stable–decay, linear, constant, or a user's own.

A schedule rises linearly to its peak, and falls to a fraction of it. WSD: MiniCPM, arXiv 2404.06395; its
tail 1 − √x: Hägele et al., arXiv 2405.18392.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ...data_pipeline.data_config import MAY_CHANGE
from ...plugins import PluginError, Registry

Shape = Literal["sqrt", "linear", "cosine"]

# The function is defined below; `ScheduleConfig` needs only the names.
SCHEDULE = Registry(
    "optim.schedule",
    "a schedule",
    {
        "cosine": lambda step, run: decayed(run, step, run.warmup_steps, "cosine"),
        "wsd": lambda step, run: decayed(run, step, run.steps - run.decay_steps, run.decay_shape),
        "linear": lambda step, run: decayed(run, step, run.warmup_steps, "linear"),
        "constant": lambda step, run: decayed(run, step, math.inf, "linear"),
    },
    "a function of (step, RunSchedule) that returns the learning rate",
    settings=True,
    takes=2,
)


def _length(value: Any, least: int = 0) -> int | float:
    """Checks a length: a number of steps (int), or a fraction of the run (float, at most 1)."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):  # a text that is no number
            value = kind(value)
            break
    if isinstance(value, int) and value >= least and not isinstance(value, bool):
        return value
    if isinstance(value, float) and (0 < value <= 1 or value == least):
        return value
    is_count = isinstance(value, float) and value.is_integer() and value > 1
    raise ValueError(
        f"must be a number of steps, such as {int(value) if is_count else 100}, or a fraction of the run, at most "
        "1.0 (the whole run), such as 0.1"
    )


def _decay_length(value: Any) -> int | float | str:
    """Checks the length of a decay; configurations of former versions have none for "auto"."""
    return "auto" if value in (None, "none", "auto") else _length(value, least=1)


class ScheduleConfig(BaseModel):
    """Configures the learning rate: the half of `OptimConfig` that a schedule reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schedule: Annotated[str, SCHEDULE] = "cosine"
    """The learning-rate schedule. "wsd" keeps the peak until its decay, the last `decay_steps` of the
    run."""

    learning_rate: float = Field(default=2.5e-4, gt=0)
    """Peak of the schedule."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the peak at which the decay ends; by default 0 for "wsd" and "linear"."""

    warmup_steps: Annotated[int | float, BeforeValidator(_length), MAY_CHANGE] = Field(
        default=0, examples=[0.04]
    )
    """Linear warm-up: a number of steps, or a fraction of the run (1 is one step, 1.0 the whole run)."""

    decay_steps: Annotated[
        int | float | Literal["auto"], BeforeValidator(_decay_length), MAY_CHANGE
    ] = Field(default="auto", examples=[0.2])
    """Decay: a number of steps, or a fraction of the run. Of a cosine it is the half period, counted from
    the end of the warm-up. "auto": a tenth of the run for "wsd", else what the warm-up leaves."""

    decay_shape: Shape = "sqrt"
    """Form of the decay of "wsd": 1 − √x, 1 − x, or half a cosine."""

    @model_validator(mode="before")
    @classmethod
    def _choose_floor(cls, values: Any) -> Any:
        """Sets the default of `final_fraction`, which depends on the schedule."""
        if isinstance(values, dict) and values.get("final_fraction") is None:
            values = values | {"final_fraction": default_floor(values.get("schedule"))}
        return values

    def over(self, steps: int) -> "RunSchedule":
        """Returns the schedule of a run of so many steps, with all lengths in steps."""
        warmup, decay = _in_steps(self.warmup_steps, steps), self.decay_steps
        if decay == "auto":
            decay = 0.1 if self.schedule == "wsd" else steps - warmup
        decay = max(1, _in_steps(decay, steps))
        rates = (self.schedule, self.learning_rate, self.final_fraction, self.decay_shape)
        return RunSchedule(*rates, warmup_steps=warmup, decay_steps=decay, steps=steps)


def default_floor(schedule: str | None) -> float:
    """Returns the final fraction of a schedule that is given none."""
    return 0.0 if schedule in ("wsd", "linear") else 0.1


def _in_steps(length: int | float, steps: int) -> int:
    return round(length * steps) if isinstance(length, float) else length


@dataclass(frozen=True)
class RunSchedule:
    """Holds the schedule of one run, as `ScheduleConfig`, but with lengths in whole steps."""

    schedule: str
    learning_rate: float
    final_fraction: float
    decay_shape: Shape
    warmup_steps: int
    decay_steps: int
    steps: int  # of the run


def learning_rate_at(run: RunSchedule, step: int) -> float:
    """Returns the learning rate of step `step`, counted from 0.

    Raises:
        PluginError: a user's own schedule returns no number, or a negative one.
    """
    rate = SCHEDULE.get(run.schedule)(step, run)
    if getattr(rate, "ndim", None) == 0:  # of numpy or torch
        rate = rate.item()
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise PluginError(
            f"optim.schedule: {run.schedule} returned {rate!r} for step {step}: it must return "
            "the learning rate, a number that is at least 0"
        )
    return float(rate)


def decayed(run: RunSchedule, step: int, start: float, shape: Shape) -> float:
    """Returns the learning rate of step `step` under a decay that begins at step `start`, from 0.

    With N_w steps of warm-up, N_d of decay, and f the final fraction:

        warm-up          peak·(step + 1)/N_w
        step start + i   peak·(f + (1 − f)·shape(i/N_d)), i = 0 … N_d

    The decay's first step has the peak, and f is the value of the step *after* it: a run whose decay ends
    with it makes no step with rate 0. If both overlap, the lower rate holds. As in the published runs of
    MoEUT, a cosine of 100,000 steps after a warm-up of 4000 ends a little above f at step 100,000.
    """
    peak, floor = run.learning_rate, run.final_fraction
    progress = min(max(step - start, 0) / run.decay_steps, 1.0)
    rate = peak * (floor + (1 - floor) * _left(progress, shape))
    if step >= run.warmup_steps:
        return rate
    warm = peak * (step + 1) / run.warmup_steps
    return min(rate, warm) if step > start else warm


def _left(progress: float, shape: Shape) -> float:
    """Returns what a decay has left of 1."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (math.sqrt(progress) if shape == "sqrt" else progress)


# What a run is told -------------------------------------------------------------------------------


def rates_line(now: RunSchedule, *, before: RunSchedule | None = None, done: int = 0) -> str:
    """Says the learning rate of a run's next step, after its warm-up and of its last step.

    Those `before` stand beside them, if they need no code that the run does not import anyway.
    """
    words = f"learning rate: {_told(now, done)}"
    if before in (None, now) or before.schedule not in (*SCHEDULE.known, now.schedule):
        return words
    return f"{words}; before: {_told(before, done)}"


def _told(run: RunSchedule, done: int) -> str:
    last, warmup = run.steps - 1, run.warmup_steps
    places = {step: f"at step {step + 1:,}" for step in (min(done, last), last)}
    if done < warmup < last:
        places[warmup] = f"after the warm-up ({warmup:,} steps)"
    return ", ".join(f"{learning_rate_at(run, at):.3g} {places[at]}" for at in sorted(places))


def decay_is_over(run: RunSchedule, done: int) -> bool:
    """Returns whether all steps after the first `done` have a built-in schedule's final rate."""
    if run.schedule not in SCHEDULE.known or not run.warmup_steps <= done < run.steps:
        return False
    floor = run.learning_rate * run.final_fraction
    return learning_rate_at(run, done) <= floor < run.learning_rate


def shape_notes(config: ScheduleConfig) -> list[str]:
    """Says so if a built-in schedule does not read the form of the decay."""
    schedule, shape = config.schedule, config.decay_shape
    if shape == "sqrt" or schedule == "wsd" or schedule not in SCHEDULE.known:
        return []
    return [f"optim.decay_shape={shape}: optim.schedule={schedule} does not read it; wsd does"]
