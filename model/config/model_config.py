"""The model's configuration: sizes and named variants. Nothing here touches a device.

Sections with kinds: `attention`, `feed_forward` with its `router`, and `initialisation`.

Symbols in the papers: L `num_layers` (depth steps), G `layers_per_group` (distinct layers), R = L/G
repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ...plugins import is_own
from ..layers import NORM
from ..routers.router import Promises
from ..routers.table import ROUTER
from .attention_config import ATTENTION, POSITIONS, AnyAttentionConfig, SwitchHeadConfig
from .feed_forward_config import FEED_FORWARD, AnyFeedForwardConfig, ExpertsConfig
from .loops_config import LoopsConfig
from .sections import Keys, Section, kinds_first, set_value

# How a run multiplies matrices and stores weights (model/execution/precision.py).
Precision = Literal["float32", "bfloat16", "bfloat16_only"]


class HaltingConfig(Keys):
    """Configures stick-breaking adaptive computation time (SUT, arXiv 2310.07096, §3.3)."""

    loss: NonNegativeFloat = 0.01
    """Weight of the loss on the expected depth."""

    loss_sum: Literal["last", "all"] = "last"
    """Depth steps that the loss sums over: "last" is the expected depth itself (the SUT authors'
    code), "all" adds every step's running value (the MoEUT authors' port).
    """

    threshold: float = Field(default=0.999, gt=0, le=1)
    """A token stops once it has halted with this probability."""


class InitialisationConfig(Keys):
    """Selects the published rules of the starting values (formulas in model/initialise.py).

    "paper": MoEUT's training code; "release": its official release, which also gives every router
    row equal norm; "sut": SUT; "takase": Huginn.
    """

    kind: Literal["paper", "release", "sut", "takase"] = "paper"
    expert_axis_norm: bool = False
    """Gives V and O weights unit norm across the expert axis at the start, as in the paper's runs
    from 126M parameters on.
    """


class NormalInitialisationConfig(Keys):
    """Starts every matrix from N(0, `std`), norms at 1 and biases at 0 (Mixtral, Qwen, DeepSeek)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    """Standard deviation of every matrix, the embedding and routers too."""

    expert_axis_norm: bool = False
    """Gives V and O weights unit norm across the expert axis at the start."""


class ScaledInitialisationConfig(Keys):
    """Starts from truncated normals of variance scale / fan-in (Switch, Mixture of Tokens)."""

    kind: Literal["scaled"] = "scaled"
    scale: PositiveFloat = 0.1
    """Factor of every matrix's variance."""

    head: Literal["uniform", "scaled"] = "uniform"
    """Start of the read-out: "uniform" is U(±1/√D), "scaled" is like every other matrix
    (llm-random, arXiv 2310.15961).
    """

    expert_axis_norm: bool = False
    """Gives V and O weights unit norm across the expert axis at the start."""


INITIALISATION = Section(
    "initialisation",
    "initialisation",
    {
        "paper": InitialisationConfig,
        "release": InitialisationConfig,
        "sut": InitialisationConfig,
        "takase": InitialisationConfig,
        "scaled": ScaledInitialisationConfig,
        "normal": NormalInitialisationConfig,
    },
    kept=("expert_axis_norm",),
)
AnyInitialisationConfig = Annotated[
    InitialisationConfig | ScaledInitialisationConfig | NormalInitialisationConfig,
    BeforeValidator(INITIALISATION.read),
]

# The sections that have kinds, by path.
SECTIONS = {
    section.path: section
    for section in (ATTENTION, POSITIONS, FEED_FORWARD, ROUTER, INITIALISATION)
}


@dataclass(frozen=True)
class DepthStep:
    """Locates one step of a pass: its position in depth, and the layer that it applies."""

    index: int  # from 0, also of its cache and its report
    member: int  # the layer of the group that it applies
    loop: int | None  # from 0: the repeat of the core; None in prelude and coda

    @property
    def depth(self) -> int:
        """Returns its number from 1, as metrics and traces count depth steps."""
        return self.index + 1


class ModelConfig(BaseModel, frozen=True):  # a keyword, so that type checkers know it hashes
    """Describes one Transformer, MoEUT (arXiv 2405.16039) or a relative.

    It applies `layers_per_group` distinct layers `num_layers / layers_per_group` times each.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    vocab_size: PositiveInt = 8000
    """Number of token ids in the embedding and the read-out."""

    d_model: PositiveInt = 128
    """Width of the residual stream."""

    num_layers: PositiveInt = 4
    """Depth steps of a pass, repeats included."""

    layers_per_group: PositiveInt = 2
    """Layers with their own weights; the group repeats up to `num_layers`."""

    order: Literal["abab", "aabb"] = "abab"
    """Order of the repeats: "abab" repeats the whole group, "aabb" repeats each layer before the
    next.
    """

    norm: Literal["peri", "pre", "post", "sandwich", "branch", "output"] = "peri"
    """Where norms stand: "peri" only before what ends in a softmax or sigmoid, "pre" before every
    block, "post" after the addition, "sandwich" before the block and after the addition (Huginn),
    "branch" before the block and on its output (Ouro), "output" only on its output (OLMo 2).
    """

    norm_layer: Annotated[str, NORM] = "layernorm"
    """The norm; your own subclass of torch.nn.Module returns float32 rows."""

    norm_eps: PositiveFloat | None = None
    """What norms add to the variance or mean square; none: 1e-5 for layernorm, 1e-6 for rmsnorm."""

    attention: AnyAttentionConfig = SwitchHeadConfig()
    feed_forward: AnyFeedForwardConfig = ExpertsConfig()
    halting: HaltingConfig | None = Field(default=None, examples=[{"loss": 0.01}])
    """Stick-breaking halting of a Universal Transformer; none: every token takes all depth
    steps.
    """

    loops: LoopsConfig = LoopsConfig()
    scale_embedding: bool | PositiveFloat = False
    """Multiplies the embedded tokens by √`d_model` (true), or by a number (Granite)."""

    residual_multiplier: PositiveFloat = 1.0
    """Factor of what attention and feed-forward add to the residual stream (Granite)."""

    logits_scaling: PositiveFloat = 1.0
    """Divides the rows that the read-out multiplies, and so the logits (Granite)."""

    final_norm: bool = True
    """Applies a norm before the read-out; a post-norm model never has one."""

    tied_head: bool = False
    """Shares the embedding's weights with the read-out."""

    head_bias: bool = True
    """Gives the read-out a bias."""

    initialisation: AnyInitialisationConfig = InitialisationConfig()

    @classmethod
    def from_dotted(cls, values: Mapping[str, Any]) -> Self:
        """Builds a model's configuration from values under dotted keys and defaults.

        For example {"d_model": 64, "attention.kind": "dense"}.

        Raises:
            ValidationError: a key is unknown, or values conflict.
        """
        return cls().changed(values)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Returns the same model with values changed under dotted keys.

        A new `kind` of a section keeps only the keys with the same meaning in both; a mapping
        replaces a whole section.

        Raises:
            ValidationError: a key is unknown, or values conflict.
        """
        plain = self.model_dump()
        for path in sorted(values, key=kinds_first):
            set_value(plain, path, values[path], SECTIONS)
        return type(self).model_validate(plain)

    @property
    def embedding_factor(self) -> float:
        """Returns what embedded tokens are multiplied by."""
        return (
            self.d_model**0.5 if self.scale_embedding is True else float(self.scale_embedding or 1)
        )

    @property
    def num_repeats(self) -> int:
        """Returns R: how often every layer of the core is applied."""
        return (self.num_layers - self.loops.prelude - self.loops.coda) // self.core_layers

    @property
    def core_layers(self) -> int:
        """Returns C: the distinct layers that are repeated."""
        return self.layers_per_group - self.loops.prelude - self.loops.coda

    @property
    def schedule(self) -> tuple[DepthStep, ...]:
        """Returns the depth steps of a pass of `num_layers`."""
        return self.schedule_of(self.num_repeats)

    def schedule_of(self, num_loops: int) -> tuple[DepthStep, ...]:
        """Returns the depth steps of a pass: the one place that decides the order of layers.

        Raises:
            ValueError: it has no loop.
        """
        if num_loops < 1:
            raise ValueError(f"num_loops={num_loops} must be at least 1")
        first, last = self.loops.prelude, self.layers_per_group - self.loops.coda
        core = [(member, loop) for loop in range(num_loops) for member in range(first, last)]
        if self.order == "aabb":
            core.sort()
        before = [(member, None) for member in range(first)]
        after = [(member, None) for member in range(last, self.layers_per_group)]
        steps = enumerate([*before, *core, *after])
        return tuple(DepthStep(index, member, loop) for index, (member, loop) in steps)

    def with_loops(self, num_loops: int) -> Self:
        """Returns the configuration with another R."""
        return self.model_copy(update={"num_layers": len(self.schedule_of(num_loops))})

    @property
    def experts(self) -> ExpertsConfig | None:
        """Returns the experts' section; None: all layers are dense."""
        return self.feed_forward if isinstance(self.feed_forward, ExpertsConfig) else None

    def has_experts(self, member: int) -> bool:
        """Returns whether this group member's feed-forward has experts."""
        return self.experts is not None and self.experts.is_sparse(member, self.layers_per_group)

    @property
    def own_parts(self) -> dict[str, str]:
        """Returns the user's own parts that layers are made of, `module:name` by key."""
        parts = {
            "model.attention.kind": self.attention.kind,
            "model.feed_forward.activation": self.feed_forward.activation,
            "model.norm_layer": self.norm_layer,
            "model.feed_forward.router.kind": self.experts.router.kind if self.experts else "",
        }
        return {key: name for key, name in parts.items() if is_own(name)}

    @property
    def sparse_members(self) -> tuple[int, ...]:
        """Returns the group members whose feed-forward has experts."""
        return tuple(member for member in range(self.layers_per_group) if self.has_experts(member))

    @property
    def load_steps(self) -> tuple[DepthStep, ...]:
        """Returns the depth steps that loads are counted by.

        Where the number of loops changes from step to step, or a coda runs after several loops, a
        layer's loads are added up, and one loop stands for all.
        """
        drawn, reads = self.loops.depth.kind != "fixed", self.loops.read_loops(self.num_repeats)
        by_layer = drawn or (self.loops.coda and len(reads) > 1)
        return self.schedule_of(1) if by_layer else self.schedule

    @property
    def expert_depths(self) -> tuple[int, ...]:
        """Returns the depth steps, counted from 1, whose feed-forward has experts."""
        return tuple(step.depth for step in self.load_steps if self.has_experts(step.member))

    def expert_counts(self) -> dict[str, int]:
        """Returns the number of experts of each kind of sparse layer: upper limits of expert
        parallelism.
        """
        counts = {} if self.experts is None else {"feed_forward": self.experts.num_experts}
        if self.attention.expert_count:
            counts["attention"] = self.attention.expert_count
        return counts

    @property
    def group_sequences(self) -> int:
        """Returns how many consecutive samples route together; it divides a micro-batch."""
        return 1 if self.experts is None else self.experts.router.group_sequences

    @property
    def evaluation_group_sequences(self) -> int:
        """Returns how many consecutive samples route together in evaluation."""
        return 1 if self.experts is None else self.experts.router.evaluation_group_sequences

    @property
    def promises(self) -> Promises:
        """Returns what the whole model guarantees; attention's routers only lose the balance."""
        return self._kept(self.experts and self.experts.router.promises)

    @property
    def evaluation_promises(self) -> Promises:
        """Returns what the whole model guarantees in evaluation, without capacities or random
        choices of training.
        """
        return self._kept(self.experts and self.experts.router.evaluation_promises)

    def _kept(self, router: Promises | None) -> Promises:
        kept = router or Promises(causal=True, batch_invariant=True, dropless=True, balanced=True)
        return replace(kept, balanced=kept.balanced and not self.attention.expert_count)

    @model_validator(mode="after")
    def _check_core(self) -> Self:
        if self.core_layers < 1:
            once = self.loops.prelude + self.loops.coda
            raise ValueError(
                f"loops.prelude={self.loops.prelude} and loops.coda={self.loops.coda} leave no core of "
                f"layers_per_group={self.layers_per_group}: set layers_per_group to at least {once + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        once, core = self.loops.prelude + self.loops.coda, self.core_layers
        if (self.num_layers - once) % core or self.num_layers <= once:
            fewer = max(1, (self.num_layers - once) // core)
            parts = f"loops.prelude + loops.coda + R·{core} = {once} + R·{core}, R ≥ 1"
            fault = f"not {parts}" if once else f"not divisible by layers_per_group={core}"
            raise ValueError(
                f"num_layers={self.num_layers} is {fault}: every layer of the core repeats "
                f"equally often; choose num_layers={once + fewer * core} or "
                f"{once + (fewer + 1) * core}"
            )
        return self

    @model_validator(mode="after")
    def _check_drawn_loops(self) -> Self:
        depth = self.loops.depth
        if depth.values and self.num_repeats not in depth.reached:
            raise ValueError(
                f"loops.depth.values={list(depth.values)} never reaches the R={self.num_repeats} loops that "
                f"num_layers={self.num_layers} gives evaluation: add R, or change num_layers"
            )
        return self

    @model_validator(mode="after")
    def _check_loops_of_loss(self) -> Self:
        last = max(self.loops.read_out, default=1)
        if self.loops.depth.kind == "fixed" and last > self.num_repeats:
            raise ValueError(
                f"loops.read_out={list(self.loops.read_out)} names a loop that a pass of "
                f"R={self.num_repeats} loops does not make: loops are counted from 1"
            )
        return self

    @model_validator(mode="after")
    def _check_router_of_own_depths(self) -> Self:
        kept = self.promises
        if self.loops.depth.per == "sequence" and not (kept.causal and kept.batch_invariant):
            raise ValueError(
                'loops.depth.per="sequence" needs a router that treats every sequence by itself, '
                f"and router.kind={self.experts and self.experts.router.kind!r} as configured "
                "does not: sequences that are done would change the others"
            )
        return self

    @model_validator(mode="after")
    def _check_scale_of_own_depths(self) -> Self:
        if self.loops.depth.per == "sequence" and self.loops.residual_scale is not None:
            raise ValueError(
                'loops.residual_scale with loops.depth.per="sequence": the scale follows R, of '
                'which every sequence has its own; set per="step", or leave the scale out'
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        has_loops = not self.loops.is_plain or self.loops.depth.per == "sequence"
        if self.order == "aabb" and has_loops:
            raise ValueError(
                'order="aabb" repeats each layer by itself, and so there is no loop that '
                'model.loops could describe: set order="abab"'
            )
        return self

    @model_validator(mode="after")
    def _check_listed_layers(self) -> Self:
        _check_listed("feed_forward.sparse_layers", self.experts, self.layers_per_group)
        _check_listed("attention.window_layers", self.attention, self.layers_per_group)
        if self.experts is not None and not self.sparse_members:
            raise ValueError(
                f"feed_forward.sparse_layers={self.experts.sparse_layers!r} with "
                f"layers_per_group={self.layers_per_group} leaves no layer with experts; set "
                'feed_forward.kind="dense" if you want none'
            )
        return self

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.experts is not None and self.d_model % self.experts.sub_tokens:
            raise ValueError(
                f"feed_forward.sub_tokens={self.experts.sub_tokens} does not divide "
                f"d_model={self.d_model}; choose a divisor"
            )
        return self

    @model_validator(mode="after")
    def _check_norms(self) -> Self:
        if self.attention.kind in ("momha", "mla") and self.norm == "peri":
            raise ValueError(
                f"attention.kind={self.attention.kind!r} computes keys and values from the same rows, "
                'unlike norm="peri": set norm="post", as SUT does, or "pre"'
            )
        if self.norm_eps is not None and is_own(self.norm_layer):
            raise ValueError(
                f"norm_eps={self.norm_eps} with norm_layer={self.norm_layer!r}: your own norm has its own; "
                "leave norm_eps out"
            )
        return self

    @model_validator(mode="after")
    def _check_halting(self) -> Self:
        if self.halting is None:
            return self
        router = None if self.experts is None else self.experts.router.kind
        given = (self.layers_per_group, self.norm, self.attention.kind, router)
        if given != (1, "post", "momha", "sut"):
            raise ValueError(
                "halting requires one shared layer of SUT: "
                f"layers_per_group=1 (given {self.layers_per_group}), "
                f'norm="post" (given {self.norm!r}), '
                f'attention.kind="momha" (given {self.attention.kind!r}) and '
                f'feed_forward.router.kind="sut" (given {router!r})'
            )
        if self.loops != LoopsConfig():
            raise ValueError("halting with model.loops: SUT repeats its one layer; leave loops out")
        if self.experts is not None and self.experts.num_shared_experts:
            raise ValueError(
                f"halting with num_shared_experts={self.experts.num_shared_experts}: shared "
                "experts would keep serving halted tokens; leave them out"
            )
        return self


def _check_listed(path: str, section: BaseModel | None, num_layers: int) -> None:
    """Checks that the layers a key lists exist."""
    listed = getattr(section, path.partition(".")[2], ())
    if isinstance(listed, tuple) and max(listed, default=0) >= num_layers:
        raise ValueError(
            f"{path}={list(listed)} names layer {max(listed)}, and "
            f"layers_per_group={num_layers}: layers are counted from 0"
        )
