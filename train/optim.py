"""The optimizer: AdamW, or a user's own. Its learning rate: config/schedule.py.

Every command that reads a configuration imports this module. A DTensor is known here by its
attributes, because importing its class takes 0.3 s, a third of what torch takes.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import Parameter

from ..model.loops.program import WITHOUT_DECAY
from ..plugins import PluginError, Registry
from .config.schedule import ScheduleConfig

# The function is defined below; `OptimConfig` needs only its name.
OPTIMIZER = Registry(
    "optim.kind",
    "an optimizer",
    {"adamw": lambda named, config: make_optimizer(config, named)},
    "a function of (named parameters, OptimConfig) that returns a torch.optim.Optimizer",
    settings=True,
    takes=2,
)


class OptimConfig(ScheduleConfig):
    """Configures AdamW, warm-up and cosine; every default is from the MoEUT paper."""

    kind: Annotated[str, OPTIMIZER] = "adamw"
    """The optimizer."""

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
