"""AdamW and the published learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


class OptimConfig(BaseModel):
    """The settings of AdamW, warm-up and cosine; every default is that of the MoEUT paper."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float = Field(default=2.5e-4, gt=0)
    """Peak of the schedule."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the peak at which the cosine ends."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""

    decay_steps: PositiveInt = 100_000
    """Half period of the cosine, counted from the end of the warm-up."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of all parameters, norms and biases included."""

    clip_norm: float = Field(default=0.25, gt=0)
    """Largest global norm of the gradient, over all parameters of all ranks."""


def learning_rate_at(config: OptimConfig, step: int) -> float:
    """Returns the learning rate of step `step`, counted from 0.

    Warm-up peak·(step+1)/N_w, then a cosine whose half period is `decay_steps` *after* the warm-up
    (as in the published runs, so that with 4000 of 100,000 steps the last rate is a little above
    final_fraction·peak).
    """
    peak, floor = config.learning_rate, config.final_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / config.decay_steps, 1.0)
    return peak * (floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * progress)))


def make_optimizer(
    config: OptimConfig, parameters: Iterable[Parameter], *, fused: bool | None = None
) -> torch.optim.AdamW:
    """Makes AdamW; its moments have the parameters' own precision.

    Sharded parameters of one mesh are a group, and so are those that are not sharded: one operation
    cannot mix them.

    Args:
        fused: one kernel updates a group, in another order of roundings; else some ten operations
            over all of its tensors do, and the host reads every tensor's count of steps. None: on
            GPUs, where launches are dear. On CPUs it is quicker too, but torch rounds the last
            elements of a tensor, or of a thread's part of it, otherwise than the others: copies of
            an expert in different slots of a bank would drift apart (train/expert_placement.py).
    """
    groups: dict[Any, list[Parameter]] = {}
    parameters = list(parameters)
    if fused is None:
        fused = all(parameter.device.type == "cuda" for parameter in parameters)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=not fused,
        fused=fused,
    )
