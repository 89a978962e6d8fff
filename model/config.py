"""What a model is: its sizes and its named variants. Nothing here touches a device.

Legend of the symbols in the papers: L `num_layers` (depth steps), G `group_size` (distinct layers),
R = L/G repeats, H `num_heads`, C `d_head`, N_A `num_attention_experts` (per head), E `num_experts`,
K the router's `top_k`, F `d_expert`.
"""

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from .routers.router import Promises
from .routers.sigmoid import SigmoidConfig
from .routers.table import AnyRouterConfig

# Without experts these would do nothing.
_OF_EXPERTS = (
    "sub_tokens",
    "sub_token_residual",
    "num_shared_experts",
    "output_norm",
    "expert_bias",
)


class HaltingConfig(BaseModel):
    """Stick-breaking adaptive computation time (SUT, arXiv 2310.07096, §3.3)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: NonNegativeFloat = 0.01
    # Over which depth steps the loss is added up: "last" is the expected depth itself (the SUT
    # authors' code), "all" adds the running value of every step (the MoEUT authors' port).
    loss_sum: Literal["last", "all"] = "last"
    threshold: float = Field(
        default=0.999, gt=0, le=1
    )  # a token is done once it has halted with this probability


class ModelConfig(BaseModel, frozen=True):  # a keyword, so that type checkers know it hashes
    """Sizes and variants of one Transformer: MoEUT (Csordás et al. 2024, arXiv 2405.16039) or one
    of its relatives.

    The model applies `group_size` distinct layers `num_layers / group_size` times each.
    """

    model_config = ConfigDict(extra="forbid")

    vocab_size: PositiveInt = 8000
    d_model: PositiveInt = 128
    num_layers: PositiveInt = 4
    group_size: PositiveInt = 2
    order: Literal["abab", "aabb"] = (
        "abab"  # whole group after whole group, or all repeats of one layer, then the next's
    )
    # "peri": a norm only before what ends in a softmax or sigmoid. "pre": before every block.
    # "post": after the addition.
    norm: Literal["peri", "pre", "post"] = "peri"
    positions: Literal["rotary", "learned", "none"] = (
        "rotary"  # momha has relative positions of its own: "none"
    )
    max_positions: PositiveInt = 1024  # of learned positions only

    # momha: Mixture of Multi-Head Attention, experts on Q and O; every expert has `num_heads` heads
    # of `d_head`.
    attention: Literal["switchhead", "dense", "momha"] = "switchhead"
    num_heads: PositiveInt = 4
    d_head: PositiveInt = 32
    num_attention_experts: PositiveInt = 4
    attention_top_k: PositiveInt = 2
    attention_sampled: NonNegativeInt = (
        0  # momha: so many of the chosen experts are drawn by probability, in training
    )
    max_distance: PositiveInt = 64  # momha: distances from max_distance − 1 on count alike
    attention_balance: float = Field(
        default=0.001, ge=0
    )  # δ: weight of SwitchHead's entropy terms; momha: of its MI loss
    # What one attention expert per head means: "output_gate" is the official release's (dense V and
    # O, one sigmoid per head on the attention result), "gated_experts" the paper's training code
    # (the V and the O gate remain).
    single_expert: Literal["output_gate", "gated_experts"] = "output_gate"
    rotary_width: int | None = (
        None  # rotated channels of a head; None: half of d_head, rounded down to even
    )
    rotary_base: float = 10000.0

    feed_forward: Literal["experts", "dense"] = "experts"
    # Which members of the group have experts: all, the last half, every second, or all after the
    # first n. The rest are dense.
    placement: Literal["all", "last_half", "every_second"] | NonNegativeInt = "all"
    router: AnyRouterConfig = SigmoidConfig()
    num_experts: PositiveInt = 16
    d_expert: PositiveInt = 128
    activation: Literal["relu", "gelu", "silu", "swiglu", "geglu"] = (
        "relu"  # of experts, shared experts and dense layers
    )
    expert_bias: bool = False
    sub_tokens: PositiveInt = 1  # MH-MoE: heads that a row is split into before routing
    sub_token_residual: bool = (
        False  # add a sub-token to its experts' answer: the paper's formula, not its released code
    )
    num_shared_experts: NonNegativeInt = 0  # always on, each of width d_expert, outside the router
    # "plain": shared + routed (DeepSeek). "mean": (shared + K·routed)/(K + 1), as OLMo-core weighs
    # them.
    shared_sum: Literal["plain", "mean"] = "plain"
    output_norm: bool = False  # a LayerNorm on the experts' answers
    d_feed_forward: PositiveInt = 512  # of dense feed-forwards
    dense_bias: bool = True  # of dense feed-forwards
    head_bias: bool = True  # of the read-out

    halting: HaltingConfig | None = None
    # Allow a router that reads later positions: what such a model learns is then no language
    # model's loss.
    allow_future_leak: bool = False

    # "paper": the training code's of MoEUT; "release": its official release's, which also gives
    # every router row equal norm; "scaled": truncated normals of variance init_scale / fan-in;
    # "sut": SUT's.
    initialisation: Literal["paper", "release", "scaled", "sut"] = "paper"
    init_scale: Annotated[float, Field(gt=0)] = 0.1
    # Unit norm across the expert axis of V and O at the start: the paper's runs from 126M
    # parameters on.
    expert_axis_norm: bool = False

    @property
    def num_repeats(self) -> int:
        """R: how often every distinct layer is applied."""
        return self.num_layers // self.group_size

    @property
    def schedule(self) -> tuple[int, ...]:
        """Which member of the group each depth step applies."""
        if self.order == "abab":
            return tuple(range(self.group_size)) * self.num_repeats
        return tuple(member for member in range(self.group_size) for _ in range(self.num_repeats))

    @property
    def rotary_channels(self) -> int:
        """How many channels of a head rotate."""
        if self.positions != "rotary":
            return 0
        return self.rotary_width if self.rotary_width is not None else self.d_head // 2 // 2 * 2

    @property
    def has_attention_experts(self) -> bool:
        """Whether SwitchHead's V and O are mixtures (False: dense matrices, with or without a gate
        per head).
        """
        return self.attention == "switchhead" and (
            self.num_attention_experts > 1 or self.single_expert != "output_gate"
        )

    def has_experts(self, member: int) -> bool:
        """Whether the feed-forward of this group member has experts."""
        if self.feed_forward == "dense":
            return False
        if isinstance(self.placement, int):
            return member >= self.placement
        first, step = {
            "all": (0, 1),
            "last_half": (self.group_size // 2, 1),
            "every_second": (1, 2),
        }[self.placement]
        return member >= first and (member - first) % step == 0

    @property
    def sparse_members(self) -> tuple[int, ...]:
        """The group members whose feed-forward has experts."""
        return tuple(member for member in range(self.group_size) if self.has_experts(member))

    @property
    def expert_depths(self) -> tuple[int, ...]:
        """The depth steps, counted from 1, whose feed-forward has experts."""
        return tuple(
            step for step, member in enumerate(self.schedule, start=1) if self.has_experts(member)
        )

    def expert_counts(self) -> dict[str, int]:
        """How many experts each kind of sparse layer has: an expert-parallel degree must not be
        more.
        """
        counts = {"feed_forward": self.num_experts} if self.sparse_members else {}
        if self.has_attention_experts:
            counts["attention"] = self.num_heads * self.num_attention_experts
        if self.attention == "momha":
            counts["attention"] = self.num_attention_experts
        return counts

    @property
    def group_sequences(self) -> int:
        """Consecutive samples that are routed together: what every micro-batch must be a multiple
        of.
        """
        return self.router.group_sequences if self.sparse_members else 1

    @property
    def evaluation_group_sequences(self) -> int:
        """The same in evaluation."""
        return self.router.evaluation_group_sequences if self.sparse_members else 1

    @property
    def promises(self) -> Promises:
        """What the model as a whole guarantees, from embedding to logits; attention's routers keep
        all but the balance.
        """
        everything = Promises(causal=True, batch_invariant=True, dropless=True, balanced=True)
        kept = self.router.promises if self.sparse_members else everything
        return replace(
            kept,
            balanced=kept.balanced and not self.has_attention_experts and self.attention != "momha",
        )

    @model_validator(mode="after")
    def _check_depth(self) -> Self:
        if self.num_layers % self.group_size:
            raise ValueError(
                f"num_layers={self.num_layers} is not divisible by group_size={self.group_size}: "
                "every layer of the group is repeated equally often; choose num_layers as a "
                f"multiple of {self.group_size}"
            )
        if self.feed_forward == "experts" and not self.sparse_members:
            raise ValueError(
                f"placement={self.placement!r} with group_size={self.group_size} leaves no layer "
                "with experts; "
                'write feed_forward="dense" if that is meant'
            )
        router = self.router.kind if self.sparse_members else None
        given = (self.group_size, self.norm, self.attention, router)
        if self.halting is not None and given != (1, "post", "momha", "sut"):
            raise ValueError(
                f"halting needs one shared layer of SUT: group_size=1 (given {self.group_size}), "
                'norm="post" '
                f'(given {self.norm!r}), attention="momha" (given {self.attention!r}) and '
                f'router.kind="sut" (given {router!r})'
            )
        if self.halting is not None and self.num_shared_experts:
            raise ValueError(
                f"halting with num_shared_experts={self.num_shared_experts}: shared experts would "
                "go on working for tokens that "
                "have halted; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        width = self.rotary_channels
        if width % 2 or not 0 <= width <= self.d_head:
            raise ValueError(
                f"rotary_width={width} with d_head={self.d_head}: channels rotate in pairs, so the "
                "width must be even "
                f"and at most d_head; {self.d_head // 2 // 2 * 2} is the usual choice"
            )
        if self.attention == "momha" and self.positions != "none":
            raise ValueError(
                'attention="momha" has relative positions of its own: write positions="none" '
                f"(given {self.positions!r})"
            )
        if self.attention == "momha" and self.norm == "peri":
            raise ValueError(
                'attention="momha" makes keys and values of the same rows, which norm="peri" would '
                'not: write norm="post", as '
                'SUT does, or "pre"'
            )
        if self.attention_sampled > (self.attention_top_k if self.attention == "momha" else 0):
            raise ValueError(
                f"attention_sampled={self.attention_sampled} of "
                f"attention_top_k={self.attention_top_k} experts are to be drawn, "
                f"with attention={self.attention!r}: it may be at most attention_top_k, and of "
                '"momha" only'
            )
        single_allowed = self.attention == "switchhead" and not self.has_attention_experts
        if (
            self.attention != "dense"
            and self.attention_top_k > self.num_attention_experts
            and not single_allowed
        ):
            advice = ": set attention_top_k=1" if self.num_attention_experts == 1 else " per head"
            raise ValueError(
                f"attention_top_k={self.attention_top_k} is more than "
                f"num_attention_experts={self.num_attention_experts}{advice}"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.shared_sum == "mean" and not self.num_shared_experts:
            raise ValueError(
                'shared_sum="mean" with num_shared_experts=0: there is nothing to weigh; leave it '
                "out"
            )
        if not self.sparse_members:
            idle = [
                name
                for name in _OF_EXPERTS
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if idle:
                raise ValueError(
                    f'feed_forward="dense" has no experts: {", ".join(idle)} would do nothing; '
                    "leave them out"
                )
            return self
        if self.d_model % self.sub_tokens:
            raise ValueError(f"sub_tokens={self.sub_tokens} does not divide d_model={self.d_model}")
        if self.sub_token_residual and self.sub_tokens == 1:
            raise ValueError(
                "sub_token_residual=True with sub_tokens=1: there are no sub-tokens; set "
                "sub_tokens to 2 or more"
            )
        self.router.check(self.num_experts)
        if self.shared_sum == "mean" and self.router.needs_length:
            raise ValueError(
                'shared_sum="mean" weighs by the experts that serve a row, and '
                f"router.kind={self.router.kind!r} as configured "
                'has no such number without the length of a sequence: set shared_sum="plain"'
            )
        if not self.router.promises.causal and not self.allow_future_leak:
            raise ValueError(
                f"router.kind={self.router.kind!r} as configured lets a position read later ones, "
                "so a language model's loss "
                "would be too low and its text worthless; set allow_future_leak=true if that is "
                "what you study"
            )
        return self
