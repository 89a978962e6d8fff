"""What a model is: its sizes and its named variants. Nothing here touches a device.

Legend of the symbols in the papers: L `num_layers` (depth steps), G `group_size` (distinct layers), R = L/G repeats,
H `num_heads`, C `d_head`, N_A `num_attention_experts` (per head), E `num_experts`, K `top_k`, F `d_expert`.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class ModelConfig(BaseModel):
    """Sizes and variants of one Transformer: MoEUT (Csordás et al. 2024, arXiv 2405.16039) or its dense baseline.

    The model applies `group_size` distinct layers `num_layers / group_size` times each, in the order ABAB….
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: PositiveInt = 8000
    d_model: PositiveInt = 128
    num_layers: PositiveInt = 4
    group_size: PositiveInt = 2
    norm: Literal["peri", "pre"] = "peri"

    attention: Literal["switchhead", "dense"] = "switchhead"
    num_heads: PositiveInt = 4
    d_head: PositiveInt = 32
    num_attention_experts: PositiveInt = 4
    attention_top_k: PositiveInt = 2
    # What one attention expert per head means: "output_gate" is the official release's (dense V and O, one sigmoid
    # per head on the attention result), "gated_experts" the paper's training code (the V and the O gate remain).
    single_expert: Literal["output_gate", "gated_experts"] = "output_gate"
    rotary_width: int | None = None  # rotated channels of a head; None: half of d_head, rounded down to even
    rotary_base: float = 10000.0

    feed_forward: Literal["sigma_moe", "dense"] = "sigma_moe"
    num_experts: PositiveInt = 16
    top_k: PositiveInt = 4
    d_expert: PositiveInt = 128
    d_feed_forward: PositiveInt = 512  # of the dense feed-forward only

    # "paper": the training code's; "release": the official release's, which also gives every router row equal norm.
    initialisation: Literal["paper", "release"] = "paper"
    # Unit norm across the expert axis of V and O at the start: the paper's runs from 126M parameters on.
    expert_axis_norm: bool = False

    feed_forward_balance: float = Field(default=0.01, ge=0)  # γ, weight of the feed-forward routers' entropy term
    attention_balance: float = Field(default=0.001, ge=0)  # δ, of the V and O routers'

    @property
    def num_repeats(self) -> int:
        """R: how often every distinct layer is applied."""
        return self.num_layers // self.group_size

    @property
    def rotary_channels(self) -> int:
        """How many channels of a head rotate."""
        return self.rotary_width if self.rotary_width is not None else self.d_head // 2 // 2 * 2

    @property
    def has_attention_experts(self) -> bool:
        """Whether V and O are mixtures (False: dense matrices, with or without a gate per head)."""
        return self.attention == "switchhead" and (
            self.num_attention_experts > 1 or self.single_expert != "output_gate"
        )

    def expert_counts(self) -> dict[str, int]:
        """How many experts each kind of sparse layer has: what an expert-parallel degree must divide."""
        counts = {"feed_forward": self.num_experts} if self.feed_forward == "sigma_moe" else {}
        if self.has_attention_experts:
            counts["attention"] = self.num_heads * self.num_attention_experts
        return counts

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.num_layers % self.group_size:
            raise ValueError(
                f"num_layers={self.num_layers} is not divisible by group_size={self.group_size}: "
                f"every layer of the group is repeated equally often; choose num_layers as a multiple of {self.group_size}"
            )
        width = self.rotary_channels
        if width % 2 or not 0 <= width <= self.d_head:
            raise ValueError(
                f"rotary_width={width} with d_head={self.d_head}: channels rotate in pairs, so the width must be even "
                f"and at most d_head; {self.d_head // 2 // 2 * 2} is the usual choice"
            )
        if self.feed_forward == "sigma_moe" and self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.attention == "switchhead" and self.attention_top_k > self.num_attention_experts > 1:
            raise ValueError(
                f"attention_top_k={self.attention_top_k} is more than num_attention_experts={self.num_attention_experts} per head"
            )
        if self.has_attention_experts and self.attention_top_k > self.num_attention_experts:
            raise ValueError(
                f"attention_top_k={self.attention_top_k} with num_attention_experts=1: set attention_top_k=1"
            )
        return self
