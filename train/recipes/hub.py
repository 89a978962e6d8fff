"""Other people's mixtures: their published sizes, and each family at one small size for this machine.

A published size is for the planner (`moebius simulate`), for runs that start from nothing, and, with a
lower rate, for runs that start from published weights: `moebius train --from FOLDER`. Sizes are those
of the models' own config.json files. The protocol (batch, rate, decay) is common to all and not theirs.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import OWN_TEXTS, PrepareConfig
from ...distributed.layout import MeshConfig
from ...model.config.model_config import ModelConfig
from ..config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig

# The short names of the tables below.
_KEYS = {
    "layers": ("num_layers", "layers_per_group"),
    "width": ("d_model",),
    "heads": ("attention.num_heads",),
    "kv": ("attention.num_kv_heads",),
    "d_head": ("attention.d_head", "attention.positions.width"),
    "nope": ("attention.d_head",),
    "rotary": ("attention.d_rotary",),
    "d_value": ("attention.d_value",),
    "q_rank": ("attention.q_rank",),
    "kv_rank": ("attention.kv_rank",),
    "experts": ("feed_forward.num_experts",),
    "top_k": ("feed_forward.router.top_k",),
    "d_expert": ("feed_forward.d_expert",),
    "dense": ("feed_forward.d_feed_forward",),
    "shared": ("feed_forward.num_shared_experts",),
    "d_shared": ("feed_forward.d_shared_expert",),
    "groups": ("feed_forward.router.num_groups",),
    "kept": ("feed_forward.router.kept_groups",),
    "scale": ("feed_forward.router.route_scale",),
    "vocab": ("vocab_size",),
    "base": ("attention.positions.base",),
    "tied": ("tied_head",),
}

_DECODER: dict[str, Any] = {
    "norm": "pre", "norm_layer": "rmsnorm", "norm_eps": 1e-6, "head_bias": False,
    "initialisation.kind": "normal", "attention.kind": "dense",
    "feed_forward.kind": "experts", "feed_forward.activation": "swiglu",
    "feed_forward.dense_bias": False, "feed_forward.router.kind": "token_choice",
}  # fmt: skip
_RENORMALISED: dict[str, Any] = _DECODER | {"feed_forward.router.renormalise": True}
_MIXTRAL = _RENORMALISED | {"norm_eps": 1e-5, "feed_forward.router.balance": 0.02}
_OLMOE = _DECODER | {
    "norm_eps": 1e-5, "attention.qk_norm": "all_heads", "feed_forward.router.z_loss": 0.001,
}  # fmt: skip
_QWEN2 = _DECODER | {
    "attention.bias": "qkv", "feed_forward.shared_gate": True, "feed_forward.router.balance": 0.001,
}  # fmt: skip
_QWEN3 = _RENORMALISED | {
    "attention.qk_norm": "per_head", "feed_forward.router.balance": 0.001,
    "feed_forward.router.balance_scope": "global_batch",
}  # fmt: skip
_GRANITE = _RENORMALISED | {
    "scale_embedding": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0,
}  # fmt: skip
_GPT_OSS = _RENORMALISED | {
    "norm_eps": 1e-5, "attention.bias": "qkvo", "attention.sinks": True, "attention.window": 128,
    "attention.positions.yarn": {"factor": 32.0, "truncate": False},
    "attention.positions.amplitude": 0.1 * math.log(32) + 1,
    "feed_forward.activation": "clamped_swiglu", "feed_forward.expert_bias": True,
    "feed_forward.router.bias": True,
}  # fmt: skip
_V3_GATE: dict[str, Any] = {"feed_forward.router.kind": "deepseek"}
_GLM = _DECODER | _V3_GATE | {
    "norm_eps": 1e-5, "attention.bias": "qkv", "attention.qk_norm": "per_head",
}  # fmt: skip
_ERNIE = _DECODER | _V3_GATE | {
    "norm_eps": 1e-5, "attention.positions.pairs": "neighbours",
    "feed_forward.router.scores": "softmax", "feed_forward.router.balance": 0.001,
    "feed_forward.router.balance_scope": "micro_batch",
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "attention.kind": "mla", "attention.positions.width": None,
    "attention.positions.pairs": "neighbours", "nope": 128, "rotary": 64, "d_value": 128,
    "kv_rank": 512,
}  # fmt: skip
_V2 = _DECODER | _LATENT | _V3_GATE | {
    "feed_forward.router.scores": "softmax", "feed_forward.router.group_score": "max",
    "feed_forward.router.renormalise": False, "feed_forward.router.bias_rate": 0.0,
    "feed_forward.router.balance": 0.001,
}  # fmt: skip
_V3 = _DECODER | _LATENT | _V3_GATE


# fmt: off
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mixtral": ("Mixtral", _MIXTRAL, {
        "mixtral_8x7b": dict(
            layers=32, width=4096, heads=32, kv=8, d_head=128, experts=8, top_k=2, d_expert=14336,
            vocab=32000, base=1e6,
        ),
        "mixtral_8x22b": dict(
            layers=56, width=6144, heads=48, kv=8, d_head=128, experts=8, top_k=2, d_expert=16384,
            vocab=32000, base=1e6,
        ),
    }),
    "olmoe": ("OLMoE", _OLMOE, {
        "olmoe_1b_7b": dict(
            layers=16, width=2048, heads=16, kv=16, d_head=128, experts=64, top_k=8, d_expert=1024,
            vocab=50304,
        ),
    }),
    "qwen2_moe": ("Qwen1.5-MoE and Qwen2-MoE", _QWEN2, {
        "qwen1_5_moe_a2_7b": dict(
            layers=24, width=2048, heads=16, kv=16, d_head=128, experts=60, top_k=4, d_expert=1408, shared=1,
            d_shared=5632, vocab=151936, base=1e6,
        ),
        "qwen2_57b_a14b": dict(
            layers=28, width=3584, heads=28, kv=4, d_head=128, experts=64, top_k=8, d_expert=2560, shared=1,
            d_shared=20480, vocab=151936, base=1e6,
        ),
    }),
    "qwen3_moe": ("Qwen3-MoE", _QWEN3, {
        "qwen3_30b_a3b": dict(
            layers=48, width=2048, heads=32, kv=4, d_head=128, experts=128, top_k=8, d_expert=768,
            vocab=151936, base=1e6,
        ),
        "qwen3_235b_a22b": dict(
            layers=94, width=4096, heads=64, kv=4, d_head=128, experts=128, top_k=8, d_expert=1536,
            vocab=151936, base=5e6,
        ),
        "qwen3_coder_480b_a35b": dict(
            layers=62, width=6144, heads=96, kv=8, d_head=128, experts=160, top_k=8, d_expert=2560,
            vocab=151936, base=1e7,
        ),
    }),
    "deepseek_v2": ("DeepSeek-V2", _V2, {
        "deepseek_v2_lite": dict(
            layers=27, width=2048, heads=16, experts=64, top_k=6, d_expert=1408, shared=2, first=1,
            dense=10944, vocab=102400, stretched=(40, 0.707),
        ),
        "deepseek_v2": dict(
            layers=60, width=5120, heads=128, q_rank=1536, experts=160, top_k=6, groups=8, kept=3,
            scale=16.0, d_expert=1536, shared=2, first=1, dense=12288, vocab=102400, stretched=(40, 0.707),
        ),
    }),
    "deepseek_v3": ("DeepSeek-V3, Moonlight, Kimi-K2", _V3, {
        "deepseek_v3": dict(
            layers=61, width=7168, heads=128, q_rank=1536, experts=256, top_k=8, groups=8, kept=4, scale=2.5,
            d_expert=2048, shared=1, first=3, dense=18432, vocab=129280, stretched=(40, 1.0),
        ),
        "moonlight_16b_a3b": dict(
            layers=27, width=2048, heads=16, experts=64, top_k=6, scale=2.446, d_expert=1408, shared=2,
            first=1, dense=11264, vocab=163840, base=5e4,
        ),
        "kimi_k2": dict(
            layers=61, width=7168, heads=64, q_rank=1536, experts=384, top_k=8, scale=2.827, d_expert=2048,
            shared=1, first=1, dense=18432, vocab=163840, base=5e4, stretched=(32, 1.0),
        ),
    }),
    "glm4_moe": ("GLM-4.5", _GLM, {
        "glm_4_5_air": {"attention.qk_norm": False} | dict(
            layers=46, width=4096, heads=96, kv=8, d_head=128, rotated=64, experts=128, top_k=8,
            d_expert=1408, shared=1, first=1, dense=10944, vocab=151552, base=1e6,
        ),
        "glm_4_5": dict(
            layers=92, width=5120, heads=96, kv=8, d_head=128, rotated=64, experts=160, top_k=8, scale=2.5,
            d_expert=1536, shared=1, first=3, dense=12288, vocab=151552, base=1e6,
        ),
    }),
    "gpt_oss": ("gpt-oss", _GPT_OSS, {
        "gpt_oss_20b": dict(
            layers=24, width=2880, heads=64, kv=8, d_head=64, experts=32, top_k=4, d_expert=2880,
            vocab=201088, base=1.5e5, every_second=True,
        ),
        "gpt_oss_120b": dict(
            layers=36, width=2880, heads=64, kv=8, d_head=64, experts=128, top_k=4, d_expert=2880,
            vocab=201088, base=1.5e5, every_second=True,
        ),
    }),
    "granitemoe": ("Granite 3 MoE", _GRANITE, {
        "granite_1b_a400m": dict(
            layers=24, width=1024, heads=16, kv=8, d_head=64, experts=32, top_k=8, d_expert=512, vocab=49155,
            tied=True, softmax=0.015625,
        ),
        "granite_3b_a800m": dict(
            layers=32, width=1536, heads=24, kv=8, d_head=64, experts=40, top_k=8, d_expert=512, vocab=49155,
            tied=True, softmax=0.015625,
        ),
    }),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", _ERNIE, {
        "ernie_4_5_21b_a3b": dict(
            layers=28, width=2560, heads=20, kv=4, d_head=128, experts=64, top_k=6, d_expert=1536, shared=2,
            first=1, dense=12288, vocab=103424, base=5e5, tied=True,
        ),
    }),
}
# fmt: on
_SMALL: dict[str, Any] = {
    "layers": 3,
    "width": 128,
    "heads": 4,
    "kv": 2,
    "d_head": 32,
    "experts": 8,
    "top_k": 2,
    "d_expert": 64,
    "dense": 256,
    "vocab": 4096,
}  # fmt: skip
_SMALL_LATENT: dict[str, Any] = {
    key: value for key, value in _SMALL.items() if key not in ("kv", "d_head")
} | {"nope": 16, "rotary": 16, "d_value": 32, "kv_rank": 64}  # fmt: skip
# What a family has at its small size beside it.
_SMALL_OF: dict[str, dict[str, Any]] = {
    "olmoe": {"kv": 4},
    "qwen2_moe": {"shared": 1, "d_shared": 96},
    "deepseek_v2": {"first": 1, "shared": 2},
    "deepseek_v3": {
        "q_rank": 48, "first": 1, "shared": 1, "groups": 4, "kept": 2, "scale": 2.5,
    },
    "glm4_moe": {"rotated": 16, "first": 1, "shared": 1, "scale": 2.5},
    "gpt_oss": {"every_second": True, "attention.window": 32},
    "granitemoe": {"tied": True, "softmax": 0.03},
    "ernie4_5_moe": {"first": 1, "shared": 1, "tied": True},
}  # fmt: skip

# How most of these families were trained.
_AS_USUAL: dict[str, Any] = {"beta2": 0.95, "weight_decay": 0.1, "weight_decay_on": "matrices"}


def _model(settings: dict[str, Any]) -> ModelConfig:
    """Builds a model from a table's short names and dotted keys."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= dict.fromkeys(_KEYS.get(name, (name,)), value)
    layers = settings["layers"]
    if values.pop("every_second", False):  # layers that see a window
        values["attention.window_layers"] = tuple(range(0, layers, 2))
    if (rotated := values.pop("rotated", None)) is not None:
        values["attention.positions.width"] = rotated
    if (scale := values.pop("softmax", None)) is not None:
        values["attention.scale"] = scale
    if (stretched := values.pop("stretched", None)) is not None:
        # DeepSeek's YaRN from 4096 positions multiplies the softmax's scale by (0.1·mscale·ln s + 1)²
        factor, mscale = stretched
        values["attention.positions.yarn"] = {"factor": float(factor)}
        channels = values["attention.d_head"] + values["attention.d_rotary"]
        values["attention.scale"] = channels**-0.5 * (0.1 * mscale * math.log(factor) + 1) ** 2
    if (first := values.pop("first", None)) is not None:  # layers with experts, after dense ones
        values["feed_forward.sparse_layers"] = tuple(range(first, layers))
    return ModelConfig.from_dotted(values)


def _published(name: str, settings: dict[str, Any]) -> Config:
    return Config(
        model=_model(settings),
        data=DataConfig(seq_len=4096),
        prepare=PrepareConfig(vocab_size=32_000),
        mesh=MeshConfig(sharding="fsdp"),
        optim=OptimConfig(
            learning_rate=3e-4, warmup_steps=0.02, clip_norm=1.0, **_AS_USUAL
        ),
        train=TrainConfig(
            steps=100_000, global_batch=1024, micro_batch=1, precision="bfloat16",
            recompute="selective", log_every=10, eval_every=2000, eval_rows=1024,
        ),
        checkpoint=CheckpointConfig(every=1000),
        job=JobConfig(name=name, start_timeout_s=1800),
    )  # fmt: skip


def _small(name: str, settings: dict[str, Any]) -> Config:
    return Config(
        model=_model(settings),
        data=DataConfig(seq_len=128),
        prepare=PrepareConfig(vocab_size=4096, validation_fraction=0.05),
        mesh=MeshConfig(ep=2, dp_replicate=2),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=20, clip_norm=1.0, **_AS_USUAL),
        train=TrainConfig(
            steps=200,
            global_batch=16,
            micro_batch=4,
            log_every=4,
            eval_every=50,
            eval_rows=256,
            device="cpu",  # four ranks on one machine, which may lack four GPUs
        ),
        checkpoint=CheckpointConfig(every=50, keep_last=2),
        job=JobConfig(name=name, ranks_per_node=4),
    )


def _small_sizes(family: str) -> dict[str, Any]:
    is_latent = family.startswith("deepseek")
    return (_SMALL_LATENT if is_latent else _SMALL) | _SMALL_OF.get(family, {})


Table = dict[str, tuple[str, Callable[[], Config]]]
HUB: Table = {
    name: (f"{title}, a published size", partial(_published, name, settings | sizes))
    for title, settings, table in _FAMILIES.values()
    for name, sizes in table.items()
}
HUB_SMALL: Table = {
    f"{family}_small": (
        f"{title}, at the small size",
        partial(_small, f"{family}_small", settings | _small_sizes(family)),
    )
    for family, (title, settings, _) in _FAMILIES.items()
}

_CONTINUED_STEPS, _CONTINUED_EVERY = 1000, 100


def continuation(
    model: ModelConfig, longest: int, recipes: Mapping[str, Callable[[], Config]]
) -> tuple[str, str, Config]:
    """Returns the recipe with whose settings published weights train on, words about it, and those.

    They are those of the first recipe with the model's sizes, or else of OLMoE's, with a tenth of the
    rate, because the weights' own has decayed, and at most 1,000 steps on the user's text.

    Args:
        model: that of the weights.
        longest: tokens of a sequence that it was trained for.
        recipes: by name.
    """
    sizes = _sizes(model)
    found = next((name for name, build in recipes.items() if _sizes(build().model) == sizes), "")
    name = found or "olmoe_1b_7b"
    values = recipes[name]().model_dump(mode="json")
    values["optim"]["learning_rate"] /= 10
    values["train"]["micro_batch"] = max(values["train"]["micro_batch"], model.group_sequences)
    values["train"]["steps"] = min(values["train"]["steps"], _CONTINUED_STEPS)
    values["train"]["eval_every"] = values["checkpoint"]["every"] = _CONTINUED_EVERY
    values["data"]["seq_len"] = min(values["data"]["seq_len"], longest)
    values["prepare"]["input"] = [OWN_TEXTS]
    values["job"] |= {"rehearse_failure_at_step": None, "name": found or "continued"}
    why = "" if found else ", because no recipe has this size"
    words = f"those of {name} with a tenth of its rate{why}"
    return name, words, Config.model_validate(values)


def settings_words(config: Config, whose: str) -> str:
    """Says in one line whose training settings a run has, and those that matter most."""
    train, optim = config.train, config.optim
    tokens = train.global_batch * config.data.seq_len
    return (
        f"settings: {whose}: learning rate {optim.learning_rate:g}, {tokens:,} tokens a step, "
        f"{train.precision}, sharding {config.mesh.sharding}, weight decay on {optim.weight_decay_on}"
    )


def _sizes(model: ModelConfig) -> list[Any]:
    """Returns what tells one published size from another: not the vocabulary, which may be padded."""
    plain = model.model_dump()
    attention, forward = plain["attention"], plain["feed_forward"]
    wanted = (
        (plain, "num_layers layers_per_group d_model norm halting order"),
        (attention, "kind num_heads d_head num_experts kv_rank bias qk_norm sinks"),
        (forward, "kind num_experts d_expert num_shared_experts d_shared_expert"),
        (forward if forward.get("kind") == "dense" else {}, "d_feed_forward"),
        (forward.get("router", {}), "kind top_k scores renormalise"),
    )
    return [values.get(key) for values, keys in wanted for key in keys.split()]
