"""What the feed-forward of a model is: one section of its configuration, `model.feed_forward`.

It comes in kinds. The router stands in it, for it routes to these experts:
`model.feed_forward.router.kind`.

Legend of the symbols in the papers: E `num_experts`, K the router's `top_k`, F `d_expert`.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from ...kernels.reference import ACTIVATION
from ..routers.sigmoid import SigmoidConfig
from ..routers.table import AnyRouterConfig
from .sections import Section


class FeedForwardConfig(BaseModel):
    """Describes dense layers, which all kinds have: they stand beside those with experts too."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: str
    activation: Annotated[str, ACTIVATION] = "relu"
    """Activation of experts, shared experts and dense layers."""

    d_feed_forward: PositiveInt = 512
    """Hidden width of dense layers."""

    dense_bias: bool = True
    """Gives dense layers a bias."""


class DenseFeedForwardConfig(FeedForwardConfig):
    """Describes a feed-forward of two matrices in every layer, without experts."""

    kind: Literal["dense"] = "dense"


class ExpertsConfig(FeedForwardConfig):
    """Describes experts behind a router in the sparse layers; the group's others are dense."""

    kind: Literal["experts"] = "experts"
    sparse_layers: Literal["all", "last_half", "every_second"] | NonNegativeInt = "all"
    """Which layers of the group have experts: all, the last half, every second, or all after the
    first n."""

    num_experts: PositiveInt = 16
    """Experts of a layer."""

    d_expert: PositiveInt = 128
    """Hidden width of an expert."""

    expert_bias: bool = False
    """Gives experts and shared experts a bias."""

    router: AnyRouterConfig = SigmoidConfig()
    allow_future_leak: bool = False
    """Allows a router that reads later positions; the loss is then not a language model's."""

    sub_tokens: PositiveInt = 1
    """Parts that a row is split into before routing (MH-MoE)."""

    sub_token_residual: bool = False
    """Adds a sub-token to its experts' output: the paper's formula, not its released code."""

    num_shared_experts: NonNegativeInt = 0
    """Experts that every token uses, each of width `d_expert`, outside the router."""

    shared_sum: Literal["plain", "mean"] = "plain"
    """How shared and routed outputs add up: "plain" is their sum (DeepSeek), "mean" is (shared +
    K·routed)/(K + 1), as in OLMo-core."""

    output_norm: bool = False
    """Puts a LayerNorm on the experts' outputs."""

    def is_sparse(self, member: int, layers_per_group: int) -> bool:
        """Returns whether one layer of the group has experts."""
        if isinstance(self.sparse_layers, int):
            return member >= self.sparse_layers
        first, step = {
            "all": (0, 1),
            "last_half": (layers_per_group // 2, 1),
            "every_second": (1, 2),
        }[self.sparse_layers]
        return member >= first and (member - first) % step == 0

    def experts_per_row(self, seq_len: int) -> float:
        """Returns how many experts serve one row, a token or a sub-token, on average."""
        return self.router.active_experts(self.num_experts, seq_len * self.sub_tokens)

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.shared_sum == "mean" and not self.num_shared_experts:
            raise ValueError(
                'shared_sum="mean" with num_shared_experts=0: there is nothing to weigh; leave it '
                "out"
            )
        if self.sub_token_residual and self.sub_tokens == 1:
            raise ValueError(
                "sub_token_residual=True with sub_tokens=1: there are no sub-tokens; set "
                "sub_tokens to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        router = self.router
        router.check(self.num_experts)
        if self.shared_sum == "mean" and router.needs_length:
            raise ValueError(
                'shared_sum="mean" weighs by the experts that serve a row, and '
                f"router.kind={router.kind!r} as configured "
                'has no such number without the length of a sequence: set shared_sum="plain"'
            )
        if not router.promises.causal and not self.allow_future_leak:
            raise ValueError(
                f"router.kind={router.kind!r} as configured lets a position read later ones, "
                "so a language model's loss would be too low and its text worthless; set "
                "model.feed_forward.allow_future_leak=true if that is what you study"
            )
        return self


FEED_FORWARD = Section(
    "feed_forward",
    "feed-forward",
    {"experts": ExpertsConfig, "dense": DenseFeedForwardConfig},
    kept=("activation", "d_feed_forward", "dense_bias"),
)
AnyFeedForwardConfig = Annotated[
    ExpertsConfig | DenseFeedForwardConfig, BeforeValidator(FEED_FORWARD.read)
]
