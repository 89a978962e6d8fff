"""X-MoE: rows and experts are compared on a low-dimensional sphere (arXiv 2204.09179).

A linear router's gradient pulls rows into the span of the expert embeddings (rank E − 1), and so
together. Here rows are projected to d_e = E/2 dimensions, both sides are L2-normalised, and a
learnable temperature compensates the bounded scores:

    s_e = cos(W h, e_e),   gate softmax(s/τ) or sigmoid(s/τ), not renormalised
    balancing loss over softmax(s/τ₀) with fixed τ₀ = 0.3 (softmax gate), 0.07 (sigmoid gate)

τ is stored as its logarithm, so it stays positive, and starts at τ₀, as the paper names no other
value. The gradient into a row has rank d_e at most.

The released code (torchscale) differs, and `behaviour="torchscale"` follows it: width 16 for any E,
expert embeddings rescaled in place to norm 1.5, rows that are *not* normalised (their norm is the
temperature), no τ, no τ₀, softmax only, and with two experts GShard's renormalised gates and random
second expert. It rescales in every forward pass, here `before_step` does. Both agree, since only
the optimizer changes norms and scores ignore them.

Cost of a row: 2·D·d_e + 2·d_e·E FLOPs. Legend: T rows, D their width, E experts, K experts chosen,
R dimensions of the sphere.
"""

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from ..execution.recompute import save_topk
from ..initialise import Initializer, constant, normal, parameter, uniform
from ..layers import own_dtype, wide_dtype
from .capacity import CapacityConfig, CapacityRouter
from .router import Choice
from .token_choice import softmax_gates

_RELEASED_WIDTH, _RELEASED_NORM, _RELEASED_GAIN, _RELEASED_EPS = 16, 1.5, 0.32, 1e-4
_PAPER_TEMPERATURE = {"softmax": 0.3, "sigmoid": 0.07}


class CosineConfig(CapacityConfig):
    """Describes X-MoE's router, as in the paper or in its released code."""

    kind: Literal["cosine"] = "cosine"
    gate: Literal["softmax", "sigmoid"] = "softmax"
    """How similarities become gate weights."""

    d_routing: PositiveInt | None = None
    """Width d_e of the sphere; none: half the number of experts."""

    behaviour: Literal["paper", "torchscale"] = "paper"
    """With "torchscale", follows the released code where it differs from the paper."""

    initial_temperature: PositiveFloat | None = None
    """Start of the learned temperature τ; none: 0.3 for softmax gates, 0.07 for sigmoid gates."""

    balance_temperature: PositiveFloat | None = None
    """Fixed temperature τ₀ of the balancing loss; none: τ."""

    @property
    def random_second(self) -> bool:
        """Returns whether training uses a row's second expert at random."""
        return self.behaviour == "torchscale" and self.top_k == 2

    def width(self, num_experts: int) -> int:
        """Returns d_e: the dimensions in which rows and experts are compared."""
        return (
            _RELEASED_WIDTH
            if self.behaviour == "torchscale"
            else self.d_routing or max(1, num_experts // 2)
        )

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row."""
        return 2 * self.width(num_experts) * (d_row + num_experts)

    @model_validator(mode="after")
    def _check_behaviour(self) -> Self:
        if self.behaviour == "paper":
            return self
        fixed = ("d_routing", "initial_temperature", "balance_temperature")
        given = ", ".join(
            f"{name}={getattr(self, name)}" for name in fixed if getattr(self, name) is not None
        )
        if given or self.gate != "softmax" or self.top_k > 2:
            raise ValueError(
                f'behaviour="torchscale" with gate={self.gate!r}, '
                f"top_k={self.top_k}{', ' + given if given else ''}: "
                f"the released code has softmax gates, one or two experts, width {_RELEASED_WIDTH} "
                'and no temperature; leave these out or set behaviour="paper"'
            )
        return self


class CosineRouter(CapacityRouter):
    """Scores experts by cosine on a low-dimensional sphere, top-k, with or without a capacity."""

    Config = CosineConfig
    config: CosineConfig
    keeps_float32: ClassVar = ("log_temperature",)

    def __init__(
        self, config: CosineConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        width, released = config.width(num_experts), config.behaviour == "torchscale"
        # In the released code a row's norm is its temperature, so start the projection as published.
        self.projection = parameter(width, d_row, init=uniform(d_row**-0.5) if released else init)
        self.expert_embedding = parameter(
            num_experts,
            width,
            init=orthogonal(_RELEASED_GAIN) if released else normal(width**-0.5),
        )
        usual = _PAPER_TEMPERATURE[config.gate]
        log_temperature = math.log(config.initial_temperature or usual)
        self.log_temperature = None if released else parameter(1, init=constant(log_temperature))
        self.balance_temperature = config.balance_temperature or usual

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses the K nearest experts on the sphere."""
        config, wide = self.config, wide_dtype(x_TD)
        dtype = own_dtype(x_TD, self.projection)
        z_TR, embedding_ER = (
            x_TD.to(dtype) @ self.projection.to(dtype).T,
            self.expert_embedding.to(dtype),
        )
        if self.log_temperature is None:
            scores_TE = z_TR @ F.normalize(embedding_ER, dim=-1, eps=_RELEASED_EPS).T
            logits_TE = finite(scores_TE.to(wide))
            chosen_TK, experts_TK = save_topk(logits_TE, config.top_k)
            weights_TK = softmax_gates(chosen_TK, logits_TE, renormalise=config.top_k > 1)
            return Choice(experts_TK, weights_TK, logits_TE)
        cosine_TE = (F.normalize(z_TR, dim=-1) @ F.normalize(embedding_ER, dim=-1).T).to(wide)
        logits_TE = cosine_TE * torch.exp(-self.log_temperature.to(wide))
        chosen_TK, experts_TK = save_topk(logits_TE, config.top_k)
        sigmoid = config.gate == "sigmoid"
        weights_TK = (
            chosen_TK.sigmoid()
            if sigmoid
            else softmax_gates(chosen_TK, logits_TE, renormalise=False)
        )
        return Choice(
            experts_TK, weights_TK, logits_TE, (cosine_TE / self.balance_temperature).softmax(-1)
        )

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Rescales every expert embedding to norm 1.5, for torchscale's behaviour.

        A second call changes no bit, so an evaluation leaves no trace.
        """
        if self.config.behaviour == "torchscale":
            norm_E1 = self.expert_embedding.double().norm(dim=1, keepdim=True)
            factor_E1 = _RELEASED_NORM / norm_E1
            close = max(1e-6, torch.finfo(self.expert_embedding.dtype).eps)  # as near as it gets
            factor_E1 = torch.where(
                (factor_E1 - 1).abs() < close, torch.ones_like(factor_E1), factor_E1
            )
            self.expert_embedding.mul_(factor_E1.to(self.expert_embedding.dtype))


def finite(scores_TE: Tensor) -> Tensor:
    """Replaces non-finite scores by the smallest finite one, without gradient."""
    known_TE = scores_TE.isfinite()
    smallest = scores_TE.detach().masked_fill(~known_TE, torch.inf).amin()
    return torch.where(known_TE, scores_TE, smallest)


def orthogonal(gain: float) -> Initializer:
    """Draws orthonormal columns (or rows, if they are fewer) times `gain`."""
    return lambda shape, generator: torch.nn.init.orthogonal_(
        torch.empty(shape), gain, generator=generator
    )
