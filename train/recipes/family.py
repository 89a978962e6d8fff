"""The family at one small size: every architecture on the embedded corpus, at equal width, depth,
batch and data.

Two comparisons are fair here, and each recipe is in one:
  equal parameters   the dense baseline, Universal Transformers, MoEUT, σ-MoE, SwitchHead, SUT: about 1.84M parameters
  equal FLOPs        routers and a dense baseline of the same active width: two of four layers have experts of 4096 hidden
                     columns in all (eightfold), of which a token uses 512 on average: about 3.7M
                     parameters; mh_moe (eight
                     times the expert FLOPs, as first published) and soft_moe (its mixing) cost more
`moebius models` prints each recipe's cost. The papers' sizes: published.py.
"""

from typing import Any

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import PrepareConfig
from ...model.config.model_config import ModelConfig
from ..config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 4096, "d_model": 128, "num_layers": 4, "layers_per_group": 4, "norm": "pre",
    "attention.kind": "dense", "attention.num_heads": 4, "attention.d_head": 32,
    "feed_forward.kind": "dense", "feed_forward.d_feed_forward": 512,
}  # fmt: skip

# MoEUT: 56 experts in one shared layer, 28 in two; 16 in four is the σ-MoE control.
_MOEUT: dict[str, Any] = {
    "layers_per_group": 2, "norm": "peri",
    "attention.kind": "switchhead", "attention.num_experts": 4, "attention.top_k": 2,
    "attention.single_expert": "gated_experts",
    "feed_forward.kind": "experts", "feed_forward.num_experts": 28, "feed_forward.d_expert": 32,
    "feed_forward.router": {"kind": "sigmoid", "top_k": 8},
}  # fmt: skip
_SUT: dict[str, Any] = {
    "layers_per_group": 1, "norm": "post", "initialisation.kind": "sut",
    "attention.kind": "momha", "attention.num_heads": 2, "attention.num_experts": 8,
    "attention.top_k": 2, "attention.balance": 0.001,
    "feed_forward.kind": "experts", "feed_forward.num_experts": 8, "feed_forward.d_expert": 256,
    "feed_forward.expert_bias": True,
    "feed_forward.router": {"kind": "sut", "top_k": 2, "mi_loss": 0.001},
}  # fmt: skip
# Routers beside a dense layer of equal active width.
_SPARSE: dict[str, Any] = {
    "feed_forward.kind": "experts", "feed_forward.sparse_layers": "last_half",
    "feed_forward.num_experts": 8, "feed_forward.d_expert": 512, "initialisation.kind": "scaled",
}  # fmt: skip
_FINE: dict[str, Any] = _SPARSE | {"feed_forward.num_experts": 32, "feed_forward.d_expert": 128}
# Loops (model/loops/): one layer before and one after a core of two, which is applied four times.
_SANDWICH: dict[str, Any] = {
    "num_layers": 10, "norm_layer": "rmsnorm", "head_bias": False, "tied_head": True,
    "feed_forward.d_feed_forward": 352, "feed_forward.dense_bias": False,
    "attention.positions.width": 32, "attention.positions.base": 50_000,
    "attention.positions.pairs": "neighbours", "initialisation.kind": "takase",
    "loops.prelude": 1, "loops.coda": 1, "loops.start": "drawn", "loops.depth.gradient_loops": 2,
}  # fmt: skip
_HUGINN: dict[str, Any] = _SANDWICH | {
    "norm": "sandwich", "scale_embedding": True, "attention.qk_bias": True,
    "feed_forward.activation": "swiglu", "loops.inject": "linear",
    "loops.final_norm": "around_coda", "loops.depth.kind": "lognormal_poisson",
}  # fmt: skip
_PARCAE: dict[str, Any] = _SANDWICH | {
    "attention.qk_norm": True, "feed_forward.activation": "relu2",
    "feed_forward.d_feed_forward": 512, "loops.inject": "decay", "loops.input_norm": True,
    "loops.depth.kind": "poisson", "loops.depth.per": "sequence",
}  # fmt: skip
# As published; a later token can change an earlier one's result.
_READS_THE_FUTURE: dict[str, Any] = {"feed_forward.allow_future_leak": True}


def _router(kind: str, **settings: Any) -> dict[str, Any]:
    return {"feed_forward.router": {"kind": kind, **settings}}


def _switch(drop_order: str) -> dict[str, Any]:
    capacities = {"capacity_factor": 1.25, "evaluation_capacity_factor": 2.0}
    return _SPARSE | _router("token_choice", top_k=1, **capacities, drop_order=drop_order)


_TOP_4 = _router("token_choice", top_k=4, balance=0.01)
_HALF_EXPERTS: dict[str, Any] = _SPARSE | {
    "feed_forward.num_experts": 16, "feed_forward.d_expert": 256,
}  # fmt: skip
_EXPERT_CHOICE: dict[str, Any] = _SPARSE | {"feed_forward.output_norm": True}
# Loops with experts in the core.
_SPARSE_CORE: dict[str, Any] = _TOP_4 | {
    "feed_forward.kind": "experts", "feed_forward.sparse_layers": (1, 2),
    "feed_forward.num_experts": 16, "feed_forward.d_expert": 88,
}  # fmt: skip

# fmt: off
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Transformer with rotary positions, pre-norm", {}),
    "naive_ut": (
        "Universal Transformer: one dense layer, shared by all depth steps",
        {"layers_per_group": 1, "feed_forward.d_feed_forward": 2816},
    ),
    "moeut": ("MoEUT: two layers of experts, repeated", _MOEUT),
    "moeut_g1": (
        "MoEUT with one shared layer",
        _MOEUT | {"layers_per_group": 1, "attention.num_experts": 8, "feed_forward.num_experts": 56},
    ),
    "moeut_aabb": ("MoEUT, all repeats of one layer before the next", _MOEUT | {"order": "aabb"}),
    "moeut_pre": ("MoEUT with pre-norm", _MOEUT | {"norm": "pre"}),
    "moeut_post": ("MoEUT with post-norm", _MOEUT | {"norm": "post"}),
    "sigma_moe": (
        "σ-MoE as the MoEUT paper's control: gated heads, peri-norm, nothing shared",
        _MOEUT | {
            "layers_per_group": 4, "attention.num_experts": 1, "attention.top_k": 1,
            "feed_forward.num_experts": 16,
        },
    ),
    "sigma_moe_original": (
        "σ-MoE as first published: dense attention, balanced over the global batch",
        {
            "feed_forward.kind": "experts", "feed_forward.num_experts": 16,
            "feed_forward.d_expert": 32, "initialisation.kind": "release",
            **_router("sigmoid", top_k=4, balance=0.001, balance_scope="global_batch", expert_dropout=0.05),
        },
    ),
    "switchhead": (
        "SwitchHead: experts on V and O, dense feed-forward",
        {
            "attention.kind": "switchhead", "attention.num_heads": 2, "attention.num_experts": 4,
            "attention.top_k": 2, "attention.balance": 0.0, "feed_forward.d_feed_forward": 432,
        },
    ),
    "sut": (
        "Sparse Universal Transformer with stick-breaking halting",
        _SUT | {"halting": {"loss": 0.01}},
    ),
    "sut_no_act": ("Sparse Universal Transformer of fixed depth", _SUT),
    "huginn_small": ("Huginn: a core of two layers between two others, looped", _HUGINN),
    "huginn_moe": ("Huginn with experts in the core", _HUGINN | _SPARSE_CORE),
    "parcae_small": ("Parcae: the looped state decays by channel", _PARCAE),
    "parcae_moe": ("Parcae with experts in the core", _PARCAE | _SPARSE_CORE),
    "ouro_moe": (
        "Ouro with experts: two layers, looped four times, with the final norm in the loop",
        _SPARSE_CORE | {
            "num_layers": 8, "layers_per_group": 2, "norm": "branch", "norm_layer": "rmsnorm",
            "head_bias": False, "attention.positions.width": 32, "loops.final_norm": "every_loop",
            "loops.exit_entropy": 0.05, "feed_forward.activation": "swiglu",
            "feed_forward.sparse_layers": "all",
        },
    ),
    "moeut_sandwich": (
        "MoEUT with a layer before and a layer after the repeated ones",
        _MOEUT | {
            "num_layers": 6, "layers_per_group": 4, "feed_forward.num_experts": 16,
            "loops.prelude": 1, "loops.coda": 1,
        },
    ),
    "middle_half_twice": (
        "top-k of four layers, of which the middle two are applied twice, as SMELT",
        _FINE | _TOP_4 | {
            "num_layers": 6, "feed_forward.sparse_layers": "all", "loops.prelude": 1,
            "loops.coda": 1,
        },
    ),
    "switch": (
        "Switch: the best expert, capacity factor 1.25", _switch("token_major") | _READS_THE_FUTURE
    ),
    "switch_causal": (
        "Switch with a capacity that no later position can take", _switch("position_major")
    ),
    "gshard": (
        "GShard: two experts, the second at random, capacity 1 per choice",
        _HALF_EXPERTS | _READS_THE_FUTURE | _router(
            "token_choice", top_k=2, renormalise=True, second_expert="random", capacity_factor=1.0,
            drop_order="slot_major",
        ),
    ),
    "top_k": (
        "dropless top-k of many small experts, as OLMoE",
        _FINE | _router("token_choice", top_k=4, balance=0.01, z_loss=0.001),
    ),
    "deepseek": (
        "DeepSeek: sigmoid scores, bias without a loss, groups of experts, one shared expert",
        _FINE | {"feed_forward.num_shared_experts": 1} | _router(
            "deepseek", top_k=3, num_groups=4, kept_groups=2, route_scale=1.0, bias_rate=0.001
        ),
    ),
    "x_moe": (
        "X-MoE: cosine router on a low-dimensional sphere", _SPARSE | _router("cosine", top_k=1)
    ),
    "x_moe_torchscale": (
        "X-MoE as its released code behaves",
        _HALF_EXPERTS | _READS_THE_FUTURE | _router(
            "cosine", top_k=2, behaviour="torchscale", capacity_factor=1.0,
            evaluation_capacity_factor=2.0, capacity_rounding="rows", drop_order="slot_major",
            balance_choices="first",
        ),
    ),
    "expert_choice": (
        "expert choice by position across sequences",
        _EXPERT_CHOICE | _router("expert_choice", sequences_per_group=8, mean_experts=1.0),
    ),
    "expert_choice_flat": (
        "expert choice over all tokens: reads the future",
        _EXPERT_CHOICE | _READS_THE_FUTURE | _router("expert_choice", mean_experts=1.0, scope="flat"),
    ),
    "mixture_of_tokens": (
        "Mixture of Tokens: groups of 8 sequences, 4 small experts for each full one",
        _FINE | _router("mixture_of_tokens", sequences_per_group=8),
    ),
    "soft_moe": (
        "Soft MoE: mixes all tokens of a sequence, reads the future",
        _FINE | _READS_THE_FUTURE | _router("soft_moe", slots_per_expert=16),
    ),
    "transition": (
        "Mixture of Tokens that becomes a Switch",
        _SPARSE | _router(
            "transition", sequences_per_group=8, switch_step=300, capacity_factor=1.25, calibrate=True
        ),
    ),
    "mh_moe": (
        "Multi-Head MoE on X-MoE's router, parameters as the others: eight times their expert FLOPs",
        _SPARSE | {"feed_forward.sub_tokens": 4, "feed_forward.d_expert": 1984}
        | _router("cosine", top_k=2),
    ),
    "mh_moe_parity": (
        "Multi-Head MoE at equal FLOPs and parameters",
        _SPARSE | _router("token_choice", top_k=2, renormalise=True) | {
            "feed_forward.sub_tokens": 2, "feed_forward.num_experts": 40,
            "feed_forward.d_expert": 192,
        },
    ),
}
# fmt: on


def _config(name: str, sizes: dict[str, Any]) -> Config:
    return Config(
        model=ModelConfig.from_dotted(_COMMON | sizes),
        data=DataConfig(seq_len=128),
        prepare=PrepareConfig(vocab_size=4096, validation_fraction=0.05),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=40, clip_norm=1.0),
        train=TrainConfig(
            steps=400, global_batch=32, micro_batch=8, log_every=4, eval_every=100, eval_rows=256
        ),
        checkpoint=CheckpointConfig(every=100, keep_last=2),
        job=JobConfig(name=name),
    )


FAMILY = {
    name: (description, lambda name=name, sizes=sizes: _config(name, sizes))
    for name, (description, sizes) in _MODELS.items()
}
