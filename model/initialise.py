"""Starting values: both published initialisations, drawn tensor by tensor.

Every tensor has its own random stream, keyed by (seed, name), and is drawn whole before a rank keeps its share: so the start is
the same for every number of ranks, and no rank ever holds more than one full tensor beyond its own.

With c = √(2/L), L the depth *steps* (not the distinct layers):
  up-projections, routers, Q, K, V   N(0, c/√D)
  down-projections                   N(0, c/√(E·F)), all experts counted as fan-in
  O                                  N(0, c/√(H·C))
  embedding                          N(0, 1/√D)
  head                               U(−1/√D, 1/√D), weight and bias
The dense baseline's layers: truncated normal, rescaled to a standard deviation of exactly √(2/(L·fan_in)); biases 0.
"""

import hashlib
import math

import torch
from torch import Tensor

from .config import ModelConfig
from .transformer import Transformer


def draw(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The starting value of one parameter, whole, float32 on the CPU.

    Raises:
        ValueError: no rule for this name, which is a fault of this module.
    """
    generator = torch.Generator().manual_seed(_stream(seed, name))
    member, _, part = name.partition(".")[2].partition(".")
    if member.isdigit():
        return _layer_value(part, shape, config, generator)
    if name == "embedding":
        return _normal(shape, config.d_model**-0.5, generator)
    if name in ("head.weight", "head.bias"):
        bound = config.d_model**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return _norm_value(name, shape)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fills a whole model (every expert on this rank)."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, parameter.shape, model.config, seed))


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def _layer_value(part: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> Tensor:
    block, _, rest = part.partition(".")
    if block.endswith("_norm"):
        return _norm_value(rest, shape)
    dense_block = config.attention if block == "attention" else config.feed_forward
    if dense_block == "dense":
        return _dense_value(rest, shape, config, generator)
    std = math.sqrt(2 / config.num_layers) / math.sqrt(_fan_in(block, rest, config))
    value = _normal(shape, std, generator)
    if block == "feed_forward" and rest == "router.weight" and config.initialisation == "release":
        value = _equal_rows(value)
    if block == "attention" and rest in ("value_router.weight", "output_router.weight"):
        value = _rescale_rows(value)
    if rest in ("value.experts.weight", "output.experts.weight") and config.expert_axis_norm:
        value = _unit_expert_axis(value)
    return value


def _fan_in(block: str, rest: str, config: ModelConfig) -> int:
    if block == "feed_forward":
        return config.num_experts * config.d_expert if rest == "sparse.experts.w_down" else config.d_model
    return config.num_heads * config.d_head if rest.startswith("output.") else config.d_model


def _dense_value(rest: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if rest.endswith("bias"):
        return torch.zeros(shape)
    value = torch.nn.init.trunc_normal_(torch.empty(shape), generator=generator)
    return value * (math.sqrt(2 / (config.num_layers * shape[1])) / value.std())


def _norm_value(name: str, shape: torch.Size) -> Tensor:
    if name.endswith("weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    raise ValueError(f"no initialisation is known for the parameter {name!r} of shape {tuple(shape)}")


def _normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)


def _equal_rows(weight: Tensor) -> Tensor:
    """Every row of equal norm, the global standard deviation kept: no expert starts ahead of the others."""
    rows = weight / weight.norm(dim=-1, keepdim=True)
    return rows * (weight.std() / rows.std())


def _rescale_rows(weight: Tensor) -> Tensor:
    """Rows to unit norm, then times (own std / global std): as published, and nearly no change."""
    rows = weight / weight.norm(dim=-1, keepdim=True)
    return rows * (weight.std(dim=-1, keepdim=True) / rows.std())


def _unit_expert_axis(weight: Tensor) -> Tensor:
    """Every [in, out] position of unit norm over all experts, the global standard deviation kept."""
    unit = weight / weight.norm(dim=0, keepdim=True)
    return unit * (weight.std() / unit.std())
