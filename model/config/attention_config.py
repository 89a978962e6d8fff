"""The section `model.attention` of the configuration.

Symbols in the papers: H `num_heads`, C `d_head`, N_A `num_experts` (SwitchHead's: per head).
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from ...plugins import is_subclass
from .sections import Section


class RotaryConfig(BaseModel):
    """Configures rotary positions (RoFormer, arXiv 2104.09864), which rotate queries and keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["rotary"] = "rotary"
    width: int | None = None
    """Rotated channels of a head; none: half of `d_head`, rounded down to even."""

    base: float = 10000.0
    """Base of the rotation's wavelengths."""

    pairs: Literal["halves", "neighbours"] = "halves"
    """Which channels rotate together: i and i + width/2, or 2i and 2i + 1."""


class LearnedPositionsConfig(BaseModel):
    """Configures a learned vector per position, added to the token's embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["learned"] = "learned"
    max_positions: PositiveInt = 1024
    """Positions that have an embedding."""


class NoPositionsConfig(BaseModel):
    """Configures no positions: only the causal mask gives the order."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["none"] = "none"


POSITIONS = Section(
    "attention.positions",
    "kind of positions",
    {"rotary": RotaryConfig, "learned": LearnedPositionsConfig, "none": NoPositionsConfig},
)
AnyPositionsConfig = Annotated[
    RotaryConfig | LearnedPositionsConfig | NoPositionsConfig, BeforeValidator(POSITIONS.read)
]


class AttentionConfig(BaseModel):
    """Describes the keys of every attention: `num_heads` heads of `d_head` channels."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    def rotary_base(self) -> float:
        """Returns the base of the rotation's frequencies."""
        return RotaryConfig().base

    @property
    def max_positions(self) -> int | None:
        """Returns how many positions have learned vectors; None: positions are not learned."""
        return None


class WithPositionsConfig(AttentionConfig):
    """Describes the kinds of attention whose positions are configurable."""

    positions: AnyPositionsConfig = RotaryConfig()
    qk_bias: bool = False
    """Adds a learned vector to the queries and keys of every head, before they rotate (Huginn)."""

    qk_norm: bool = False
    """Divides the queries and keys of every head by their root mean square, without a weight
    (Parcae)."""

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
    def rotary_base(self) -> float:
        """Returns the base of the rotation's frequencies."""
        positions = self.positions if isinstance(self.positions, RotaryConfig) else RotaryConfig()
        return positions.base

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
    {"switchhead": SwitchHeadConfig, "dense": DenseAttentionConfig, "momha": MoMHAConfig},
    config_of=lambda entry: getattr(entry, "Config", entry),
    kept=("num_heads", "d_head", "positions", "qk_bias", "qk_norm"),
    own="a subclass of Attention whose Config is a subclass of AttentionConfig",
    fits=lambda found: is_subclass(getattr(found, "Config", None), AttentionConfig),
)
AnyAttentionConfig = Annotated[
    SwitchHeadConfig | DenseAttentionConfig | MoMHAConfig | SerializeAsAny[AttentionConfig],
    BeforeValidator(ATTENTION.read),
]
