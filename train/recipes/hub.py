"""Other people's models: their published sizes, and each family at one small size for this machine.

A published size is for the planner (`moebius simulate`), for runs that start from nothing, and, with a
lower rate, for runs that start from published weights: `moebius train --from FOLDER`. Sizes are keys
of the models' own config.json, where they differ from the defaults of transformers' class; the family
reads them (train/families/). The protocol (batch, rate, decay) is common to all and not theirs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import OWN_TEXTS, PrepareConfig
from ...distributed.layout import MeshConfig
from ...model.config.model_config import ModelConfig
from ..config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig

Keys = Mapping[str, Any]  # of config.json


@dataclass(frozen=True)
class _Published:
    """Holds the published sizes of a family, and how its models are trained."""

    title: str
    sizes: Mapping[str, Keys]
    small: Keys
    balance: float = 0.0  # of a mixture
    common: Keys = field(default_factory=dict)  # of all sizes
    training: Mapping[str, Any] = field(default_factory=dict)  # dotted, below feed_forward.router


def _dense(layers: int, width: int, hidden: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Returns the sizes of a dense model."""
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden}
    return attention | sizes


def _yarn(factor: float, mscale: float) -> dict[str, Any]:
    """Returns DeepSeek's YaRN, from 4,096 positions."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}


_LEARNED_BIAS = {"bias_rate": 0.001}
# fmt: off
_DENSE = dict(
    vocab_size=4096, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, rope_theta=1e4, intermediate_size=256,
)
_SMALL = _DENSE | dict(num_experts=8, num_experts_per_tok=2)
_EXPERTS_ALONE = _SMALL | dict(intermediate_size=64)
_WITH_DENSE = _SMALL | dict(moe_intermediate_size=64)
_LATENT = _WITH_DENSE | dict(
    num_key_value_heads=4, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
    kv_lora_rank=64, first_k_dense_replace=1,
)
_TIED = dict(tie_word_embeddings=True)
_STRETCHED = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA3 = dict(vocab_size=128256, rope_theta=5e5, rope_scaling=_STRETCHED)
_LLAMA3_2 = _LLAMA3 | _TIED | dict(rope_scaling=_STRETCHED | dict(factor=32.0))
_UNLIMITED = dict(rope_theta=1e6, sliding_window=None)
_FAMILIES = {
    "mixtral": _Published("Mixtral", balance=0.02, small=_EXPERTS_ALONE, sizes={
        "mixtral_8x7b": {},
        "mixtral_8x22b": dict(
            hidden_size=6144, num_hidden_layers=56, num_attention_heads=48,
            intermediate_size=16384,
        ),
    }),
    "olmoe": _Published(
        "OLMoE", balance=0.01, training={"z_loss": 0.001},
        small=_EXPERTS_ALONE | dict(num_key_value_heads=4),
        sizes={"olmoe_1b_7b": dict(num_key_value_heads=16, intermediate_size=1024)},
    ),
    "qwen2_moe": _Published(
        "Qwen1.5-MoE and Qwen2-MoE", balance=0.001,
        small=_WITH_DENSE | dict(shared_expert_intermediate_size=96),
        common=dict(rope_theta=1e6), sizes={
        "qwen1_5_moe_a2_7b": {},
        "qwen2_57b_a14b": dict(
            hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
            moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
        ),
    }),
    "qwen3_moe": _Published(
        "Qwen3-MoE", balance=0.001, training={"balance_scope": "global_batch"},
        small=_WITH_DENSE, common=dict(norm_topk_prob=True), sizes={
        "qwen3_30b_a3b": dict(num_hidden_layers=48, head_dim=128, rope_theta=1e6),
        "qwen3_235b_a22b": dict(
            hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, head_dim=128,
            moe_intermediate_size=1536, rope_theta=5e6,
        ),
        "qwen3_coder_480b_a35b": dict(
            hidden_size=6144, num_hidden_layers=62, num_attention_heads=96,
            num_key_value_heads=8, head_dim=128, num_experts=160, moe_intermediate_size=2560,
            rope_theta=1e7,
        ),
    }),
    "deepseek_v2": _Published(
        "DeepSeek-V2", balance=0.001, small=_LATENT | dict(q_lora_rank=None),
        common=dict(first_k_dense_replace=1), sizes={
        "deepseek_v2_lite": dict(
            hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, q_lora_rank=None,
            num_experts_per_tok=6, moe_intermediate_size=1408, intermediate_size=10944,
            rope_scaling=_yarn(40.0, 0.707),
        ),
        "deepseek_v2": dict(
            hidden_size=5120, num_hidden_layers=60, num_attention_heads=128,
            n_routed_experts=160, topk_method="group_limited_greedy", n_group=8, topk_group=3,
            routed_scaling_factor=16.0, num_experts_per_tok=6, moe_intermediate_size=1536,
            intermediate_size=12288, rope_scaling=_yarn(40.0, 0.707),
        ),
    }),
    "deepseek_v3": _Published(
        "DeepSeek-V3, Moonlight, Kimi-K2", balance=0.0001, training=_LEARNED_BIAS,
        small=_LATENT | dict(q_lora_rank=48, n_group=4, topk_group=2), sizes={
        "deepseek_v3": dict(rope_scaling=_yarn(40.0, 1.0)),
        "moonlight_16b_a3b": dict(
            vocab_size=163840, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
            q_lora_rank=None, rope_theta=5e4, n_routed_experts=64, num_experts_per_tok=6,
            n_group=1, topk_group=1, routed_scaling_factor=2.446, moe_intermediate_size=1408,
            n_shared_experts=2, first_k_dense_replace=1, intermediate_size=11264,
        ),
        "kimi_k2": dict(
            vocab_size=163840, num_attention_heads=64, rope_theta=5e4, n_routed_experts=384,
            n_group=1, topk_group=1, routed_scaling_factor=2.827, first_k_dense_replace=1,
            rope_scaling=_yarn(32.0, 1.0),
        ),
    }),
    "glm4_moe": _Published(
        "GLM-4.5", balance=0.0001, training=_LEARNED_BIAS,
        small=_WITH_DENSE | dict(use_qk_norm=True, routed_scaling_factor=2.5),
        common=dict(attention_bias=True), sizes={
        "glm_4_5_air": dict(head_dim=128, rope_theta=1e6),
        "glm_4_5": dict(
            hidden_size=5120, num_hidden_layers=92, head_dim=128, use_qk_norm=True,
            rope_theta=1e6, n_routed_experts=160, routed_scaling_factor=2.5,
            moe_intermediate_size=1536, first_k_dense_replace=3, intermediate_size=12288,
        ),
    }),
    "gpt_oss": _Published(
        "gpt-oss", balance=0.01, small=_EXPERTS_ALONE | dict(sliding_window=32), sizes={
        "gpt_oss_20b": dict(num_hidden_layers=24, num_local_experts=32),
        "gpt_oss_120b": {},
    }),
    "granitemoe": _Published(
        "Granite 3 MoE", balance=0.01,
        small=_EXPERTS_ALONE | dict(attention_multiplier=0.03),
        common=dict(
            tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
            logits_scaling=6.0,
        ), sizes={
        "granite_1b_a400m": dict(
            vocab_size=49155, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            num_key_value_heads=8, num_experts_per_tok=8, num_local_experts=32,
            intermediate_size=512, attention_multiplier=0.015625,
        ),
        "granite_3b_a800m": dict(
            vocab_size=49155, hidden_size=1536, num_attention_heads=24, num_key_value_heads=8,
            num_experts_per_tok=8, num_local_experts=40, intermediate_size=512,
            attention_multiplier=0.015625,
        ),
    }),
    "ernie4_5_moe": _Published(
        "ERNIE 4.5 MoE", balance=0.001, training=_LEARNED_BIAS,
        small=_WITH_DENSE | dict(moe_num_shared_experts=1), sizes={"ernie_4_5_21b_a3b": {}},
    ),
    "llama": _Published(
        "Llama", common=dict(rms_norm_eps=1e-5),
        small=_DENSE | dict(rope_scaling=_STRETCHED | dict(original_max_position_embeddings=64)),
        sizes={
        "llama2_7b": _dense(32, 4096, 11008, 32, 32),
        "llama3_1_8b": _LLAMA3 | _dense(32, 4096, 14336, 32, 8),
        "llama3_1_70b": _LLAMA3 | _dense(80, 8192, 28672, 64, 8),
        "llama3_2_1b": _LLAMA3_2 | _dense(16, 2048, 8192, 32, 8),
        "llama3_2_3b": _LLAMA3_2 | _dense(28, 3072, 8192, 24, 8),
    }),
    "mistral": _Published(
        "Mistral", small=_DENSE | dict(sliding_window=32), common=dict(rms_norm_eps=1e-5), sizes={
        "mistral_7b_v0_1": {},
        "mistral_7b_v0_3": dict(vocab_size=32768) | _UNLIMITED,
        "mistral_nemo_12b": dict(vocab_size=131072, head_dim=128) | _UNLIMITED
        | _dense(40, 5120, 14336, 32, 8),
    }),
    "qwen2": _Published("Qwen2.5", small=_DENSE, common=dict(rope_theta=1e6), sizes={
        "qwen2_5_0_5b": _TIED | _dense(24, 896, 4864, 14, 2),
        "qwen2_5_1_5b": _TIED | _dense(28, 1536, 8960, 12, 2),
        "qwen2_5_7b": dict(vocab_size=152064) | _dense(28, 3584, 18944, 28, 4),
        "qwen2_5_32b": dict(vocab_size=152064) | _dense(64, 5120, 27648, 40, 8),
    }),
    "qwen3": _Published("Qwen3", small=_DENSE, common=dict(rope_theta=1e6), sizes={
        "qwen3_0_6b": _TIED | _dense(28, 1024, 3072, 16, 8),
        "qwen3_1_7b": _TIED | _dense(28, 2048, 6144, 16, 8),
        "qwen3_4b": _TIED | _dense(36, 2560, 9728, 32, 8),
        "qwen3_8b": _dense(36, 4096, 12288, 32, 8),
        "qwen3_32b": _dense(64, 5120, 25600, 64, 8),
    }),
    "olmo2": _Published(
        "OLMo 2", small=_DENSE,
        common=dict(vocab_size=100352, rope_theta=5e5, rms_norm_eps=1e-6), sizes={
        "olmo2_1b": _dense(16, 2048, 8192, 16, 16),
        "olmo2_7b": {},
        "olmo2_13b": _dense(40, 5120, 13824, 40, 40),
    }),
}
# fmt: on
# How most of these families were trained.
_AS_USUAL: dict[str, Any] = {"beta2": 0.95, "weight_decay": 0.1, "weight_decay_on": "matrices"}


def _model(family: str, keys: Keys) -> ModelConfig:
    """Returns the model of a size, with its family's losses."""
    from ..families.table import FAMILY  # a second of torch, which no other recipe needs

    published = _FAMILIES[family]
    model = FAMILY.get(family).read({**published.common, **keys})[0]
    if model.experts is None:
        return model
    training = {"balance": published.balance, "balance_pool": False, **published.training}
    changes = {f"feed_forward.router.{key}": value for key, value in training.items()}
    is_everywhere = len(model.sparse_members) == model.num_layers
    changes["feed_forward.sparse_layers"] = "all" if is_everywhere else model.sparse_members
    return model.changed(changes)


def _config_of(name: str, family: str) -> Config:
    return Config(
        model=_model(family, _FAMILIES[family].sizes[name]),
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


def _small(family: str) -> Config:
    model = _model(family, _FAMILIES[family].small)
    split = MeshConfig(ep=2, dp_replicate=2)
    return Config(
        model=model,
        data=DataConfig(seq_len=128),
        prepare=PrepareConfig(vocab_size=4096, validation_fraction=0.05),
        mesh=split if model.experts else MeshConfig(dp_shard=2, dp_replicate=2, sharding="fsdp"),
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
        job=JobConfig(name=f"{family}_small", ranks_per_node=4),
    )


Table = dict[str, tuple[str, Callable[[], Config]]]
HUB: Table = {
    name: (f"{published.title}, a published size", partial(_config_of, name, family))
    for family, published in _FAMILIES.items()
    for name in published.sizes
}
HUB_SMALL: Table = {
    f"{family}_small": (f"{published.title}, at the small size", partial(_small, family))
    for family, published in _FAMILIES.items()
}

_CONTINUED_STEPS, _CONTINUED_EVERY = 1000, 100


def continuation(
    model: ModelConfig, longest: int, recipes: Mapping[str, Callable[[], Config]]
) -> tuple[str, str, Config]:
    """Returns the recipe with whose settings published weights train on, words about it, and those.

    They are those of a recipe with the model's sizes, at best also its base of positions, or else of
    OLMoE's, with a tenth of the rate, because the weights' own has decayed, and at most 1,000 steps
    on the user's text.

    Args:
        model: that of the weights.
        longest: tokens of a sequence that it was trained for.
        recipes: by name.
    """
    sizes, base = _sizes(model), model.attention.rotary.base
    same = {name: each for name, each in recipes.items() if _sizes(each().model) == sizes}
    found = max(same, key=lambda name: same[name]().model.attention.rotary.base == base, default="")
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
