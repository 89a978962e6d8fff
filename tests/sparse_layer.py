"""One layer of experts in float64."""

from collections.abc import Mapping
from typing import Any

import torch
from parts import layers
from torch import Tensor

from moebius.kernels.reference import activate
from moebius.model.config.attention_config import DenseAttentionConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer

NOTHING: Mapping[str, Any] = {}


def make_model(
    router: dict[str, Any], changes: Mapping[str, Any] = NOTHING, *, seed: int = 0, **sizes: Any
) -> Transformer:
    """Builds two pre-norm layers with causal attention, float64, on the reference backend.

    `sizes` are the experts', `changes` (under dotted keys) the whole model's.
    """
    experts = {"num_experts": 6, "d_expert": 10, "allow_future_leak": True} | sizes
    config = ModelConfig(
        vocab_size=31,
        d_model=12,
        num_layers=2,
        layers_per_group=2,
        norm="pre",
        attention=DenseAttentionConfig(num_heads=2, d_head=6),
        feed_forward=ExpertsConfig.model_validate(experts | {"router": router}),
    )
    model = Transformer(config.changed(changes), backend="reference")
    initialise(model, seed)
    return model.double()


def make_layer(router: dict[str, Any], *, spread: float = 1.0, **sizes: Any) -> Any:
    """Builds a feed-forward with router weights of standard deviation `spread`, opinionated unlike
    at the start.
    """
    layer = layers(make_model(router, **sizes))[0].feed_forward
    if hasattr(layer.router, "weight"):
        with torch.no_grad():
            layer.router.weight.normal_(0, spread, generator=torch.Generator().manual_seed(1))
    return layer


def expert(layer: Any, e: int, row_D: Tensor) -> Tensor:
    """Returns one expert's answer to rows."""
    bank = layer.sparse.experts
    return activate(row_D @ bank.w_up[e], bank.activation) @ bank.w_down[e]


def rows(batch: int, length: int, width: int = 12, *, seed: int = 0) -> Tensor:
    """Returns (B, S, D) with a component common to all rows, so that a router has favourites."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(width, dtype=torch.float64, generator=generator)
    return torch.randn(batch, length, width, dtype=torch.float64, generator=generator) + common
