"""The section `model.feed_forward` of the configuration, which contains the router.

Symbols in the papers: E `num_experts`, K the router's `top_k`, F `d_expert`.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from ...kernels.reference import ACTIVATION
from ..routers.sigmoid import SigmoidConfig
from ..routers.table import ROUTER, AnyRouterConfig
from .sections import Keys, Section


class FeedForwardConfig(Keys):
    """Describes the dense layers that every kind has, beside layers with experts too."""

    kind: str
    activation: Annotated[str, ACTIVATION] = "relu"
    """Activation of experts, shared experts and dense layers.

    `swiglu`, `geglu` and gpt-oss's `clamped_swiglu` are gated: W_up has the gate's columns first.
    """

    d_feed_forward: PositiveInt = 512
    """Hidden width of dense layers."""

    dense_bias: bool = True
    """Gives dense layers a bias."""


class DenseFeedForwardConfig(FeedForwardConfig):
    """Describes a feed-forward of two matrices in every layer, without experts."""

    kind: Literal["dense"] = "dense"


class ExpertsConfig(FeedForwardConfig):
    """Describes routed experts in the sparse layers; the group's other layers are dense."""

    kind: Literal["experts"] = "experts"
    sparse_layers: (
        Literal["all", "last_half", "every_second"] | NonNegativeInt | tuple[NonNegativeInt, ...]
    ) = "all"
    """Which layers of the group have experts: all, the last half, every second, all after the
    first n, or those of a list, counted from 0."""

    num_experts: PositiveInt = 16
    """Experts of a layer."""

    d_expert: PositiveInt = 128
    """Hidden width of an expert."""

    expert_bias: bool = False
    """Gives experts and shared experts a bias."""

    router: AnyRouterConfig = SigmoidConfig()
    allow_future_leak: bool = False
    """Allows a router that reads later positions; the loss is then no language-model loss."""

    sub_tokens: PositiveInt = 1
    """Number of parts that a row is split into before routing (MH-MoE)."""

    num_shared_experts: NonNegativeInt = 0
    """Experts that every token uses, outside the router."""

    d_shared_expert: PositiveInt | None = None
    """Hidden width of a shared expert; none: `d_expert`."""

    shared_gate: bool = False
    """Multiplies what shared experts add by a sigmoid of the row (Qwen2-MoE)."""

    output_norm: bool = False
    """Applies a LayerNorm to the experts' outputs."""

    @property
    def d_shared(self) -> int:
        """Returns the hidden width of all shared experts together; 0: there are none."""
        return self.num_shared_experts * (self.d_shared_expert or self.d_expert)

    def is_sparse(self, member: int, layers_per_group: int) -> bool:
        """Returns whether this layer of the group has experts."""
        if isinstance(self.sparse_layers, int):
            return member >= self.sparse_layers
        if isinstance(self.sparse_layers, tuple):
            return member in self.sparse_layers
        first, step = {
            "all": (0, 1),
            "last_half": (layers_per_group // 2, 1),
            "every_second": (1, 2),
        }[self.sparse_layers]
        return member >= first and (member - first) % step == 0

    def experts_per_row(self, seq_len: int) -> float:
        """Returns the mean number of experts that serve one token or sub-token."""
        return self.router.active_experts(self.num_experts, seq_len * self.sub_tokens)

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        given = {"d_shared_expert": self.d_shared_expert, "shared_gate": self.shared_gate}
        for key, value in given.items():
            if value and not self.num_shared_experts:
                raise ValueError(f"{key}={value} without shared experts: set num_shared_experts")
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        router = self.router
        router.check(self.num_experts)
        if not router.promises.causal and not self.allow_future_leak:
            raise ValueError(
                f"router.kind={router.kind!r} as configured lets a position read later ones, so a "
                "language model's loss would be too low and its text worthless; set "
                "model.feed_forward.allow_future_leak=true if you study this"
            )
        return self


FEED_FORWARD = Section(
    "feed_forward",
    "feed-forward",
    {"experts": ExpertsConfig, "dense": DenseFeedForwardConfig},
    kept=("activation", "d_feed_forward", "dense_bias"),
    inner=(ROUTER,),
)
AnyFeedForwardConfig = Annotated[
    ExpertsConfig | DenseFeedForwardConfig, BeforeValidator(FEED_FORWARD.read)
]
