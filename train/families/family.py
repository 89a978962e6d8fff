"""What a family of published models is: parts of config.json, and rules of tensors' names.

Import and export both follow from the two tables. In patterns of names {L} is a layer and {E} an
expert, both counted from 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from ...distributed.checkpoint.pieces import Piece
from ...model.config.model_config import ModelConfig
from .keys import Balance, ConfigKey, Dotted, Only, Own, Part, Reader, UnfitError, in_words_of

# Names of tensors --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """Says how a published tensor lies in one of ours."""

    axes: tuple[int, ...] | None = None  # as of a `Piece`; none: our order
    half: int | None = None  # it is this half of ours along `dim`; gates are the first half
    dim: int = 0
    step: int = 1  # above 1: its entries lie interleaved with those of the other half


_PARTS = ("weight", "bias")  # of a matrix
SAME = Arrangement()
FIRST, SECOND = Arrangement(half=0), Arrangement(half=1)  # rows
LEADING_ONE = Arrangement(axes=(-1, 0))  # (1, E) of our (E,)
BANK = Arrangement(axes=(0, 2, 1))  # (E, out, in) of our (E, in, out)
EXPERT = Arrangement(axes=(2, 1))  # (out, in)
EXPERT_FIRST, EXPERT_SECOND = (Arrangement(axes=(2, 1), half=half, dim=2) for half in (0, 1))
EVEN, ODD = (Arrangement(half=half, dim=-1, step=2) for half in (0, 1))  # columns


@dataclass(frozen=True)
class Rule:
    """Maps published tensors to one of ours, or to a half of it."""

    ours: str  # "group.{L}.attention.query.weight"
    published: str  # "model.layers.{L}.self_attn.q_proj.weight"; {E}: one tensor per expert
    layout: Arrangement = SAME

    def pieces(self, name: str, shape: Sequence[int]) -> Iterator[Piece]:
        """Yields the published tensors of our tensor `name`."""
        layout, start, sizes = self.layout, [0] * len(shape), list(shape)
        if layout.half is not None:
            sizes[layout.dim] //= 2
            start[layout.dim] = layout.half * sizes[layout.dim]
        axes = layout.axes or tuple(range(len(shape)))
        steps = (layout.step, layout.half or 0) if layout.step > 1 else (1, 0)
        if "{E}" not in self.published:
            yield Piece(self.published, name, tuple(start), tuple(sizes), axes, *steps)
            return
        for expert in range(shape[0]):
            key = self.published.replace("{E}", str(expert))
            yield Piece(key, name, (expert, *start[1:]), (1, *sizes[1:]), axes, *steps)


def in_layers(
    names: Mapping[str, str | tuple[str, Arrangement]], theirs: str = "", ours: str = ""
) -> tuple[Rule, ...]:
    """Returns rules of a layer's tensors under two prefixes: published name to ours."""
    layouts = {key: (name, SAME) if isinstance(name, str) else name for key, name in names.items()}
    return tuple(
        Rule(f"group.{{L}}.{ours}{name}", f"model.layers.{{L}}.{theirs}{key}", layout)
        for key, (name, layout) in layouts.items()
    )


def attention(names: Mapping[str, str], norms: Mapping[str, str]) -> tuple[Rule, ...]:
    """Returns the rules of an attention's projections, with or without bias, and of its norms."""
    found = {f"{key}.{part}": f"{names[key]}.{part}" for key in names for part in _PARTS}
    found |= {f"{key}.weight": f"{name}.weight" for key, name in norms.items()}
    return in_layers(found, "self_attn.", "attention.")


def swiglu(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Returns the rules of a dense SwiGLU, with or without bias: gate rows above up rows."""
    halves = {"gate_proj": FIRST, "up_proj": SECOND}
    found: dict[str, str | tuple[str, Arrangement]] = {
        f"{key}.{part}": (f"up.{part}", halves[key]) for key in halves for part in _PARTS
    }
    found |= {f"down_proj.{part}": f"down.{part}" for part in _PARTS}
    return in_layers(found, theirs, ours)


def experts(theirs: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Returns the rules of experts that are published one by one."""
    layouts = {gate: ("w_up", EXPERT_FIRST), up: ("w_up", EXPERT_SECOND), down: ("w_down", EXPERT)}
    return in_layers({f"{{E}}.{key}.weight": layouts[key] for key in layouts}, theirs, BANKS)


def banks(theirs: str, up: str, down: str) -> tuple[Rule, ...]:
    """Returns the rules of experts in one tensor per layer, with gate rows above up rows."""
    return in_layers({up: ("w_up", BANK), down: ("w_down", BANK)}, theirs, BANKS)


BANKS = "feed_forward.sparse.experts."
GATE, GATE_BIAS = "feed_forward.router.weight", "feed_forward.router.selection_bias"
EMBEDDING_AND_HEAD = (
    Rule("embedding", "model.embed_tokens.weight"),
    Rule("final_norm.weight", "model.norm.weight"),
    Rule("head.weight", "lm_head.weight"),
)
OUTER = (
    *EMBEDDING_AND_HEAD,
    *in_layers({"input_layernorm.weight": "attention_norm.weight"}),
    *in_layers({"post_attention_layernorm.weight": "feed_forward_norm.weight"}),
)
ATTENTION = attention(
    {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"},
    {"q_norm": "query_norm", "k_norm": "key_norm"},
)
DENSE = swiglu("mlp.", "feed_forward.")
SHARED = swiglu("mlp.shared_experts.", "feed_forward.shared.")
ROUTER = in_layers({"mlp.gate.weight": GATE})
SELECTION_BIAS = in_layers({"mlp.gate.e_score_correction_bias": GATE_BIAS})
EXPERTS = experts("mlp.experts.", "gate_proj", "up_proj", "down_proj")
FUSED = banks("mlp.experts.", "gate_up_proj", "down_proj")
MIXTURE = (*OUTER, *ATTENTION, *ROUTER, *EXPERTS)
DENSE_MODEL = (*OUTER, *ATTENTION, *DENSE)

_LAYER = re.compile(r"^group\.(\d+)\.")

# config.json -------------------------------------------------------------------------------------

_DECODER = {  # of families unless they say otherwise; none repeats a layer
    "norm": "pre",
    "norm_layer": "rmsnorm",
    "head_bias": False,
    "attention.kind": "dense",
    "feed_forward.kind": "experts",
    "feed_forward.activation": "swiglu",
    "feed_forward.dense_bias": False,
    "initialisation.kind": "normal",
}
SIZES = (
    ConfigKey("vocab_size", "vocab_size"),
    ConfigKey("hidden_size", "d_model"),
    ConfigKey("num_hidden_layers", "num_layers"),
    ConfigKey("num_hidden_layers", "layers_per_group"),
    ConfigKey("num_attention_heads", "attention.num_heads"),
    ConfigKey("rms_norm_eps", "norm_eps", float),
    ConfigKey("tie_word_embeddings", "tied_head", bool),
    ConfigKey("initializer_range", "initialisation.std", float),
    Only("hidden_act", "silu"),
    Only("attention_dropout", 0.0),
)
DENSE_ATTENTION = (
    *SIZES,
    ConfigKey("num_key_value_heads", "attention.num_kv_heads", null=True),
    ConfigKey("head_dim", "attention.d_head"),
)
QKVO_BIAS = ConfigKey("attention_bias", "attention.bias", bool, {False: "none", True: "qkvo"})
WINDOW = ConfigKey("sliding_window", "attention.window", null=True)
TOP_K, NUM_EXPERTS = "feed_forward.router.top_k", "feed_forward.num_experts"
D_EXPERT, D_DENSE = "feed_forward.d_expert", "feed_forward.d_feed_forward"
DENSE_PARTS = (*DENSE_ATTENTION, ConfigKey("intermediate_size", D_DENSE))
WITHOUT_EXPERTS = {"feed_forward.kind": "dense"}
RENORMALISE = ConfigKey("norm_topk_prob", "feed_forward.router.renormalise", bool)
BALANCE = Balance("router_aux_loss_coef")
TOKEN_CHOICE = (ConfigKey("num_experts_per_tok", TOP_K, also=("experts_per_token",)), BALANCE)


def _first_dense(reader: Reader) -> dict[str, Any]:
    return {"feed_forward.sparse_layers": reader.take("first_k_dense_replace", int)}


def _write_first_dense(model: Dotted) -> dict[str, Any]:
    sparse, layers = model["feed_forward.sparse_layers"], model["num_layers"]
    if sparse != tuple(range(sparse[0], layers)):
        raise UnfitError("its dense layers are not the first ones")
    return {"first_k_dense_replace": sparse[0]}


DEEPSEEK_GATE = (
    ConfigKey("n_routed_experts", NUM_EXPERTS, also=("num_local_experts", "num_experts")),
    ConfigKey("num_experts_per_tok", TOP_K),
    ConfigKey("moe_intermediate_size", D_EXPERT),
    ConfigKey("intermediate_size", D_DENSE),
    ConfigKey("n_shared_experts", "feed_forward.num_shared_experts"),
    ConfigKey("routed_scaling_factor", "feed_forward.router.route_scale", float),
    Balance("aux_loss_alpha", is_added=False),
    Own(_first_dense, _write_first_dense),
)
V3_GATE = (
    *DEEPSEEK_GATE,
    RENORMALISE,
    ConfigKey("n_group", "feed_forward.router.num_groups"),
    ConfigKey("topk_group", "feed_forward.router.kept_groups"),
)
FIXED_BIAS = {"feed_forward.router.kind": "deepseek", "feed_forward.router.bias_rate": 0.0}
_TRAINING = (  # keys of a router that a family's model may have otherwise
    *("balance", "balance_form", "balance_scope", "balance_choices", "balance_pool"),
    *("z_loss", "bias_rate", "bias_until_step", "jitter"),
)


def _head_dim(reader: Reader) -> int:
    return reader.take("hidden_size", int) // max(1, reader.take("num_attention_heads", int))


@dataclass(frozen=True)
class Family:
    """Describes one family; import and export both follow from it."""

    model_types: tuple[str, ...]  # of config.json; the first is written
    architecture: str
    parts: tuple[Part, ...]
    constants: Mapping[str, Any]  # dotted, of every model of the family
    defaults: Mapping[str, Any]  # of transformers' class; a function computes one from others
    rules: tuple[Rule, ...]  # published names, which export writes
    also: tuple[Rule, ...] = ()  # other names of the same tensors, which import reads too
    mtp_layers: bool = False  # layers after the last predict further tokens and are left out
    dropped: tuple[str, ...] = ()  # regular expressions of other keys that are left out
    float32: str = r"e_score_correction_bias$"  # keys that are so whatever the model's dtype
    ignored: tuple[str, ...] = ()  # keys of config.json that change nothing in this family
    zeros: str = "\0"  # end of our buffers that the family lacks and that must be zero

    def read(self, config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
        """Returns the model that config.json describes, and what was assumed.

        Raises:
            UnfitError: it asks for what moebius does not compute, or is not of the family.
        """
        usual = {"initializer_range": 0.02, "tie_word_embeddings": False, "head_dim": _head_dim}
        usual["output_router_logits"] = lambda reader: False
        reader = Reader(config, usual | dict(self.defaults), {*self.ignored})
        found: dict[str, Any] = {**_DECODER, **self.constants}
        origins: dict[str, dict[str, Any]] = {}  # of our keys: the keys of config.json
        for part in self.parts:
            reader.asked = {}
            values = part.read(reader)
            found |= values
            origins |= dict.fromkeys(values, reader.asked)
        reader.refuse_unknown()
        try:
            return ModelConfig.from_dotted(found), reader.notes
        except ValidationError as error:
            every = error.errors()
            faults = [each for each in every if not each["type"].startswith("bool")] or every
            faults = dict.fromkeys(in_words_of(origins, each) for each in faults)
            raise UnfitError("; ".join(faults)) from None

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """Returns config.json of a model, in both dialects.

        Raises:
            UnfitError: the model is not of the family.
        """
        found: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_types[0],
            "max_position_embeddings": max_positions,
        }
        for part in self.parts:
            found |= part.write(Dotted(model))
        return found

    def fits(self, model: ModelConfig, config: Mapping[str, Any] | None = None) -> bool:
        """Returns whether a config.json, or else that of `write`, describes all but its training."""
        try:
            return same_function(self.read(config or self.write(model, 1))[0], model)
        except UnfitError:
            return False

    def forms(self, name: str) -> list[list[Rule]]:
        """Returns the rules of a tensor of ours, in its layer: published names, then the others."""
        layer = _LAYER.match(name)
        pattern, number = _LAYER.sub("group.{L}.", name), layer[1] if layer else ""
        found = [
            [
                replace(rule, published=rule.published.replace("{L}", number))
                for rule in table
                if rule.ours == pattern
            ]
            for table in (self.rules, self.also)
        ]
        return [rules for rules in found if rules]


def same_function(one: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether two models compute the same from the same weights."""
    values = [Dotted(model).values for model in (one, other)]
    for plain, model in zip(values, (one, other), strict=True):
        del plain["initialisation"]
        if len(model.sparse_members) == model.layers_per_group:
            del plain["feed_forward"]["d_feed_forward"]
        for key in _TRAINING:
            plain["feed_forward"].get("router", {}).pop(key, None)
    return values[0] == values[1]
