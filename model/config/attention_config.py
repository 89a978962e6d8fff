"""The section `model.attention` of the configuration.

Symbols in the papers: H `num_heads`, C `d_head`, N_A `num_experts` (SwitchHead's: per head).
"""

import math
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from ...plugins import is_subclass
from .sections import Keys, Section


class YarnConfig(Keys):
    """Configures YaRN (arXiv 2309.00071, §3.2), which stretches slow rotations to longer texts.

    With `ramp="turns"`, `beta_slow` 1 and `beta_fast` 4 it is Llama 3.1's scaling.
    """

    factor: PositiveFloat = 4.0
    """How many times longer texts become; slow rotations turn by 1/`factor`."""

    original_positions: PositiveInt = 4096
    """Positions of the texts that the model was trained on before."""

    beta_fast: PositiveFloat = 32.0
    """Turns within `original_positions` from which a rotation keeps its speed."""

    beta_slow: PositiveFloat = 1.0
    """Turns up to which a rotation is slowed by the whole `factor`."""

    truncate: bool = True
    """Rounds the bounds between fast and slow to whole pairs of channels."""

    ramp: Literal["pairs", "turns"] = "pairs"
    """What a speed between the bounds follows: the number of its pair, or its turns (Llama 3.1)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.ramp == "turns" and self.beta_slow >= self.beta_fast:
            raise ValueError(
                f'beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast} with ramp="turns"'
            )
        return self

    def speeds(self, width: int, base: float) -> list[float]:
        """Returns the factor of each of `width`/2 rotations, from 1/`factor` to 1."""
        places, low, high = self._ramp(width, base)
        slowed = [min(1.0, max(0.0, (place - low) / (high - low))) for place in places]
        return [1 - slow + slow / self.factor for slow in slowed]

    def _ramp(self, width: int, base: float) -> tuple[list[float], float, float]:
        """Returns the place of every rotation, the last one that is fast, and the first that is slow."""
        pairs = [float(pair) for pair in range(width // 2)]
        if self.ramp == "turns":
            length = self.original_positions / (2 * math.pi)
            turns = [length * base ** (-2 * pair / width) for pair in pairs]
            return turns, self.beta_fast, self.beta_slow
        bounds = [
            width * math.log(self.original_positions / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = max(bounds[0], 0), min(bounds[1], width - 1)
        return pairs, low, high + (0.001 if low == high else 0)


class RotaryConfig(Keys):
    """Configures rotary positions (RoFormer, arXiv 2104.09864), which rotate queries and keys."""

    kind: Literal["rotary"] = "rotary"
    width: int | None = None
    """Rotated channels of a head; none: half of `d_head`, rounded down to even."""

    base: float = 10000.0
    """Base of the rotation's wavelengths."""

    pairs: Literal["halves", "neighbours"] = "halves"
    """Which channels rotate together: i and i + width/2, or 2i and 2i + 1."""

    amplitude: PositiveFloat = 1.0
    """Factor of the rotated channels (YaRN's attention factor)."""

    yarn: YarnConfig | None = Field(default=None, examples=[{"factor": 4}])
    """Stretches positions to texts longer than the model was trained on; none: as they are."""


class LearnedPositionsConfig(Keys):
    """Configures a learned vector per position, added to the token's embedding."""

    kind: Literal["learned"] = "learned"
    max_positions: PositiveInt = 1024
    """Positions that have an embedding."""


class NoPositionsConfig(Keys):
    """Configures no positions: only the causal mask gives the order."""

    kind: Literal["none"] = "none"


POSITIONS = Section(
    "attention.positions",
    "kind of positions",
    {"rotary": RotaryConfig, "learned": LearnedPositionsConfig, "none": NoPositionsConfig},
)
AnyPositionsConfig = Annotated[
    RotaryConfig | LearnedPositionsConfig | NoPositionsConfig, BeforeValidator(POSITIONS.read)
]


class AttentionConfig(Keys):
    """Describes the keys of every attention: `num_heads` heads of `d_head` channels."""

    kind: str
    num_heads: PositiveInt = 4
    """Heads of every attention layer."""

    d_head: PositiveInt = 32
    """Channels of a head."""

    @property
    def expert_count(self) -> int:
        """Returns the number of experts of each sparse layer, over all heads; 0: none."""
        return 0

    @property
    def rotary_channels(self) -> int:
        """Returns how many channels of a head rotate."""
        return 0

    @property
    def rotary(self) -> RotaryConfig:
        """Returns how positions rotate; of no meaning if no channel does."""
        return RotaryConfig()

    @property
    def cached_numbers(self) -> int:
        """Returns how many numbers a token leaves in the cache of a depth step."""
        return 2 * self.num_heads * self.d_head

    @property
    def max_positions(self) -> int | None:
        """Returns how many positions have learned vectors; None: positions are not learned."""
        return None


class WithPositionsConfig(AttentionConfig):
    """Describes the kinds of attention whose positions are configurable."""

    positions: AnyPositionsConfig = RotaryConfig()
    qk_bias: bool = False
    """Adds a learned vector to the queries and keys of every head, before they rotate (Huginn)."""

    qk_norm: bool | Literal["per_head", "all_heads"] = False
    """Divides queries and keys by their root mean square before they rotate: of every head without a
    weight (true, Parcae), of every head with one weight of `d_head` for all ("per_head", Qwen3), or
    over all heads together ("all_heads", OLMoE)."""

    @property
    def rotary_channels(self) -> int:
        """Returns how many channels of a head rotate."""
        if not isinstance(self.positions, RotaryConfig):
            return 0
        width = self.positions.width
        return self._usual_width if width is None else width

    @property
    def max_positions(self) -> int | None:
        """Returns how many positions have learned vectors; None: positions are not learned."""
        positions = self.positions
        return positions.max_positions if isinstance(positions, LearnedPositionsConfig) else None

    @property
    def rotary(self) -> RotaryConfig:
        """Returns how positions rotate; of no meaning if no channel does."""
        return self.positions if isinstance(self.positions, RotaryConfig) else RotaryConfig()

    @property
    def _usual_width(self) -> int:
        return self.d_head // 2 // 2 * 2

    @model_validator(mode="after")
    def _check_rotary_width(self) -> Self:
        width = self.rotary_channels
        if width % 2 or not 0 <= width <= self.d_head:
            raise ValueError(
                f"positions.width={width} with d_head={self.d_head}: channels rotate in pairs, so "
                f"choose an even width of at most d_head; {self._usual_width} is the default"
            )
        return self


class DenseAttentionConfig(WithPositionsConfig):
    """Describes multi-head attention without experts."""

    kind: Literal["dense"] = "dense"
    num_kv_heads: PositiveInt | None = None
    """Heads of keys and values, each read by `num_heads` / `num_kv_heads` neighbouring query heads
    (grouped-query attention, arXiv 2305.13245); none: `num_heads`."""

    bias: Literal["none", "qkv", "qkvo"] = "none"
    """Which of the query, key, value and output maps have a bias."""

    scale: PositiveFloat | None = None
    """Factor of the scores before the softmax; none: 1/√`d_head`."""

    window: PositiveInt | None = None
    """How many positions a position sees, itself included; none: all before it."""

    window_layers: Literal["all"] | tuple[NonNegativeInt, ...] = "all"
    """Layers of the group that have the window, counted from 0; others see all positions."""

    sinks: bool = False
    """Gives every head a learned logit that takes part in its softmax and adds nothing (gpt-oss)."""

    @property
    def kv_heads(self) -> int:
        """Returns the heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def cached_numbers(self) -> int:
        """Returns how many numbers a token leaves in the cache of a depth step."""
        return 2 * self.kv_heads * self.d_head

    def window_of(self, member: int) -> int | None:
        """Returns how many positions a layer of the group sees; None: all before it."""
        listed = self.window_layers == "all" or member in self.window_layers
        return self.window if listed else None

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        if self.window_layers != "all" and self.window is None:
            raise ValueError(
                f"window_layers={list(self.window_layers)} without a window: set window"
            )
        return self


class MLAConfig(AttentionConfig):
    """Describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).

    Keys and values are read out of one latent per token, and one rotated key serves all heads.
    """

    kind: Literal["mla"] = "mla"
    d_rotary: PositiveInt = 16
    """Channels of a head's query and of the shared key that rotate, beside the `d_head` that do not."""

    d_value: PositiveInt = 32
    """Channels of a head's value."""

    kv_rank: PositiveInt = 64
    """Width of the latent of keys and values, which is what the cache holds."""

    q_rank: PositiveInt | None = None
    """Width of the queries' latent; none: queries are read directly."""

    bias: bool = False
    """Gives the maps to the latents and the output map a bias."""

    scale: PositiveFloat | None = None
    """Factor of the scores before the softmax; none: 1/√(`d_head` + `d_rotary`)."""

    positions: RotaryConfig = RotaryConfig()
    """How the rotated channels rotate; all of them do."""

    @property
    def rotary_channels(self) -> int:
        """Returns how many channels of a head rotate."""
        return self.d_rotary

    @property
    def rotary(self) -> RotaryConfig:
        """Returns how the rotated channels turn with the position."""
        return self.positions

    @property
    def cached_numbers(self) -> int:
        """Returns how many numbers a token leaves in the cache of a depth step."""
        return self.kv_rank + self.d_rotary

    @model_validator(mode="after")
    def _check_rotary(self) -> Self:
        if self.d_rotary % 2:
            raise ValueError(f"d_rotary={self.d_rotary}: channels rotate in pairs; make it even")
        if self.positions.width not in (None, self.d_rotary):
            raise ValueError(
                f"positions.width={self.positions.width} with d_rotary={self.d_rotary}: all of d_rotary "
                "rotate; set positions.width=none"
            )
        return self


class SwitchHeadConfig(WithPositionsConfig):
    """Describes SwitchHead (arXiv 2312.07987): every head has experts on V and O."""

    kind: Literal["switchhead"] = "switchhead"
    num_experts: PositiveInt = 4
    """Experts of each head's V and O projections."""

    top_k: PositiveInt = 2
    """Experts that a token uses per head and projection."""

    balance: NonNegativeFloat = 0.001
    """Weight δ of the entropy terms that balance the experts."""

    single_expert: Literal["output_gate", "gated_experts"] = "output_gate"
    """Meaning of one expert per head: "output_gate" has dense V and O and one sigmoid per head (the
    official MoEUT release), "gated_experts" keeps the V and O gates (the paper's training code).
    """

    @property
    def has_experts(self) -> bool:
        """Returns whether V and O are mixtures; otherwise they are dense, with a gate per head."""
        return self.num_experts > 1 or self.single_expert != "output_gate"

    @property
    def expert_count(self) -> int:
        """Returns the number of experts of V and of O, over all heads; 0: they are dense."""
        return self.num_heads * self.num_experts if self.has_experts else 0

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.has_experts and self.top_k > self.num_experts:
            advice = ": set top_k=1" if self.num_experts == 1 else " per head"
            raise ValueError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}{advice}"
            )
        return self


class MoMHAConfig(AttentionConfig):
    """Describes Mixture of Multi-Head Attention (SUT, arXiv 2310.07096): experts on Q and O.

    Every expert has `num_heads` heads of `d_head`. Positions are learned per relative distance.
    """

    kind: Literal["momha"] = "momha"
    num_experts: PositiveInt = 4
    """Experts, each a set of query and output heads."""

    top_k: PositiveInt = 2
    """Experts that a token uses."""

    sampled: NonNegativeInt = 0
    """How many of the K experts are drawn by probability, in training."""

    balance: NonNegativeFloat = 0.001
    """Weight of the mutual-information loss."""

    max_distance: PositiveInt = 64
    """Relative distances of `max_distance` − 1 or more share one value."""

    @property
    def expert_count(self) -> int:
        """Returns the number of experts of Q and of O."""
        return self.num_experts

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.sampled > self.top_k:
            raise ValueError(
                f"sampled={self.sampled} is more than top_k={self.top_k}: sample at most top_k experts"
            )
        if self.top_k > self.num_experts:
            advice = ": set top_k=1" if self.num_experts == 1 else ""
            raise ValueError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}{advice}"
            )
        return self


ATTENTION = Section(
    "attention",
    "attention",
    {
        "switchhead": SwitchHeadConfig,
        "dense": DenseAttentionConfig,
        "momha": MoMHAConfig,
        "mla": MLAConfig,
    },
    config_of=lambda entry: getattr(entry, "Config", entry),
    kept=("num_heads", "d_head", "positions", "qk_bias", "qk_norm"),
    own="a subclass of Attention whose Config is a subclass of AttentionConfig",
    fits=lambda found: is_subclass(getattr(found, "Config", None), AttentionConfig),
)
AnyAttentionConfig = Annotated[
    SwitchHeadConfig
    | DenseAttentionConfig
    | MoMHAConfig
    | MLAConfig
    | SerializeAsAny[AttentionConfig],
    BeforeValidator(ATTENTION.read),
]
