"""The optimizer and the learning-rate schedule: AdamW with the published cosine, or a user's own.

Every command that reads a configuration imports this module. A DTensor is known here by its
attributes, because importing its class takes 0.3 s, a third of what torch takes.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import Parameter

from ..model.loops.program import WITHOUT_DECAY
from ..plugins import PluginError, Registry

# The functions are defined below; `OptimConfig` needs only their names.
OPTIMIZER = Registry(
    "optim.kind",
    "an optimizer",
    {"adamw": lambda named, config: make_optimizer(config, named)},
    "a function of (named parameters, OptimConfig) that returns a torch.optim.Optimizer",
    settings=True,
    takes=2,
)
SCHEDULE = Registry(
    "optim.schedule",
    "a schedule",
    {"cosine": lambda step, config: cosine_rate(config, step)},
    "a function of (step, OptimConfig) that returns the learning rate",
    settings=True,
    takes=2,
)


class OptimConfig(BaseModel):
    """Configures AdamW, warm-up and cosine; every default is from the MoEUT paper."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Annotated[str, OPTIMIZER] = "adamw"
    """The optimizer."""

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

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of all parameters, norms and biases included; of Parcae's injection of none."""

    clip_norm: float = Field(default=0.25, gt=0)
    """Largest global norm of the gradient, over all parameters of all ranks."""

    def over(self, steps: int) -> "OptimConfig":
        """Returns the settings of a run of so many steps, in which `decay_steps` is a number."""
        rest = max(1, steps - self.warmup_steps)
        return self.model_copy(update={"decay_steps": self.decay_steps or rest})


def schedule_notes(config: OptimConfig, steps: int, steps_before: int | None = None) -> list[str]:
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


def learning_rate_at(config: OptimConfig, step: int) -> float:
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


def cosine_rate(config: OptimConfig, step: int) -> float:
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


def optimizer_of(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the configured optimizer over all parameters of a model.

    Raises:
        PluginError: a user's own function returns no optimizer, or omits parameters.
    """
    named = list(model.named_parameters())
    optimizer = OPTIMIZER.get(config.kind)(named, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(
            f"optim.kind: {config.kind} returned a {type(optimizer).__name__}: it must return a "
            "torch.optim.Optimizer"
        )
    taken = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if left_out := [name for name, parameter in named if parameter not in taken]:
        raise PluginError(
            f"optim.kind: {config.kind} leaves out {len(left_out)} of {len(named)} parameters, "
            f"for example {left_out[0]}: give every parameter a group, with lr=0 to freeze it"
        )
    for group in optimizer.param_groups:
        group["initial"] = _numbers(group)
        group["constant"] = deepcopy(_others(group))
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, rate: float, *, peak: float) -> None:
    """Scales the rate that every group was built with by rate / peak."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial", _numbers(group))  # of a group added since
        if "lr" in initial:
            group["lr"] = rate * (initial["lr"] / peak)


def changed_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Returns the numbers of every group, except its rate, that differ from those at the start.

    Raises:
        PluginError: something else differs, which a checkpoint cannot hold.
    """
    check_constants(optimizer)
    return [
        {
            name: value
            for name, value in _numbers(group).items()
            if name != "lr" and value != group["initial"].get(name)
        }
        for group in optimizer.param_groups
    ]


def check_constants(optimizer: torch.optim.Optimizer) -> None:
    """Checks that what is no number in an optimizer's groups is as it was built.

    Raises:
        PluginError: it differs.
    """
    for group in optimizer.param_groups:
        now, before = _others(group), group.get("constant")
        if before is not None and now != before:
            changed = next(name for name in now | before if now.get(name) != before.get(name))
            raise PluginError(
                f"optim.kind: {type(optimizer).__name__} changes {changed!r} of a group, a "
                f"{type(now.get(changed)).__name__}, and checkpoints hold only numbers there"
            )


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in group.items() if isinstance(value, int | float)}


def _others(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a group that are no numbers."""
    ours = ("params", "initial", "constant")
    plain = str | list | tuple | dict | set
    return {key: one for key, one in group.items() if key not in ours and isinstance(one, plain)}


def make_optimizer(
    config: OptimConfig, named: Iterable[tuple[str, Parameter]], *, fused: bool | None = None
) -> torch.optim.AdamW:
    """Builds AdamW, whose moments have the parameters' dtype.

    Sharded parameters of one mesh form a group, and unsharded ones another, because one operation
    cannot mix them.

    Args:
        config: of the optimizer.
        named: the parameters to update, with their names.
        fused: update each parameter in one kernel, which rounds in another order; otherwise about
            ten operations over all tensors of a group do, and the host reads every tensor's step
            count. None: on GPUs, and on CPUs where the bits do not depend on the layout.
    """
    groups: dict[Any, list[Parameter]] = {}
    for name, parameter in named:
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        decay = 0.0 if name in WITHOUT_DECAY else config.weight_decay
        in_one = _rounds_alike_anywhere(parameter) if fused is None else fused
        groups.setdefault((mesh, decay, in_one), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": decay, "fused": in_one, "foreach": not in_one}
            for (_, decay, in_one), group in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )


def _rounds_alike_anywhere(parameter: Parameter) -> bool:
    """Returns whether the fused kernel gives an element the same bits at any place in a tensor.

    On CPUs torch rounds the elements after a tensor's last whole 64 bytes differently. Experts move
    between slots, have copies and are sharded by the first dimension, so each must fill 64 bytes.
    """
    if parameter.device.type != "cpu":
        return True
    local: Tensor = getattr(parameter, "to_local", lambda: parameter)()
    return math.prod(local.shape[1:]) * local.element_size() % 64 == 0
