"""Every architecture of the family, small enough to test all of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.precision import forward_in
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss
from moebius.train.recipes.family import FAMILY

NAMES = tuple(FAMILY)
VOCABULARY = 61
NOTHING: Mapping[str, Any] = {}


def some_tokens(*shape: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Draws tokens, the same for the same seed."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def gradients_of(
    model: Transformer, dtype: torch.dtype, rows: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Returns the loss of a micro-batch that is a whole batch, and all its gradients, by name."""
    model.before_step(0)
    torch.manual_seed(0)
    forward = partial(forward_in, model, dtype)
    result = micro_batch_loss(forward, rows, global_sequences=len(rows), **options)
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": result.loss.detach()} | found


def without_draws(name: str) -> dict[str, Any]:
    """Changes by which loops do not start from noise, which differs from row to row in training."""
    return {} if tiny_config(name).loops.start != "drawn" else {"loops.start": "zero"}


def tiny_config(name: str, changes: Mapping[str, Any] = NOTHING) -> ModelConfig:
    """Returns the recipe's model with small widths and all its features.

    `changes` have dotted keys.
    """
    model = FAMILY[name][1]().model
    small = {
        "vocab_size": VOCABULARY,
        "d_model": 24,
        "attention.d_head": 6,
        "feed_forward.d_feed_forward": 20,
    }
    if getattr(getattr(model.attention, "positions", None), "width", None) is not None:
        small["attention.positions.width"] = 6
    if model.experts is not None:
        small["feed_forward.d_expert"] = 8
    return model.changed({**small, **changes})


def tiny_model(
    name: str,
    changes: Mapping[str, Any] = NOTHING,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Transformer:
    """Builds and initialises a tiny model."""
    model = Transformer(tiny_config(name, changes))
    initialise(model, seed)
    return model.to(dtype)


@torch.no_grad()
def make_uneven(model: Transformer, *, common: float = 1.0, seed: int = 0) -> Transformer:
    """Makes routers opinionated, so that loads are uneven, capacities overflow and tokens halt
    anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "router" in name or "halting" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype))
    shared = (
        common
        * model.embedding.std().double()
        * torch.randn(model.config.d_model, generator=generator, dtype=torch.float64)
    )
    model.embedding.add_(shared.to(model.embedding.dtype))
    return model
