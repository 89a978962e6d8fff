"""The papers' sizes, with their protocols.

MoEUT (arXiv 2405.16039), its dense baselines, σ-MoE controls and SUT baselines: sizes as in the
authors' training code. SUT has the corrected sign of its mutual-information loss;
model.feed_forward.router.mi_sign=as_published reproduces theirs. Corrections of the published
release profiles, which as shipped do not run or do not match the paper:
  * 728M: d_model 1280, as trained; the released profile says 1024 and gives 581.9M parameters.
  * 44M: d_head 82 rotates 40 channels; the release computes 41, an odd number, and stops.
  * 319M and 728M are called 318M and 727M in the release.

Mixture of Tokens (arXiv 2310.15961): experts in the last half of the blocks, E = g·m experts of
width f/m. Base/64E/16 follows that rule with E = 1024, which also gives the reported 1.95B
parameters; the authors' file has E = 2048, so m = 32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import PrepareConfig
from ...model.config.model_config import ModelConfig
from ..config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig

# The short names of the tables below.
_KEYS = {
    "layers": "num_layers",
    "group": "layers_per_group",
    "heads": "attention.num_heads",
    "d_head": "attention.d_head",
    "attention_experts": "attention.num_experts",
    "attention_top_k": "attention.top_k",
    "attention_balance": "attention.balance",
    "sampled": "attention.sampled",
    "d_feed_forward": "feed_forward.d_feed_forward",
    "experts": "feed_forward.num_experts",
    "d_expert": "feed_forward.d_expert",
    "top_k": "feed_forward.router.top_k",
    "mi_loss": "feed_forward.router.mi_loss",
    "sparse_layers": "feed_forward.sparse_layers",
    "init_scale": "initialisation.scale",
}
_MOEUT: dict[str, Any] = {
    "attention.kind": "switchhead",
    "attention.top_k": 2,
    "attention.single_expert": "gated_experts",
    "feed_forward.kind": "experts",
    "feed_forward.d_expert": 128,
    "feed_forward.router.kind": "sigmoid",
    "initialisation.expert_axis_norm": True,
}
_DENSE: dict[str, Any] = {"norm": "pre", "attention.kind": "dense", "feed_forward.kind": "dense"}
_SUT: dict[str, Any] = {
    "layers_per_group": 1,
    "norm": "post",
    "attention.kind": "momha",
    "attention.top_k": 2,
    "attention.max_distance": 64,
    "feed_forward.kind": "experts",
    "feed_forward.expert_bias": True,
    "feed_forward.router.kind": "sut",
    "initialisation.kind": "sut",
}
_MIXTURE_MODEL: dict[str, Any] = {
    "vocab_size": 50257,
    "norm": "pre",
    "attention.kind": "dense",
    "attention.d_head": 64,
    "attention.positions": {"kind": "learned", "max_positions": 256},
    "feed_forward.kind": "dense",
    "final_norm": False,
    "head_bias": False,
    "initialisation.kind": "scaled",
    "initialisation.scale": 0.1,
    "initialisation.head": "scaled",
}


def _run(
    name: str, model: ModelConfig, *, seq_len: int, optim: OptimConfig, **train: Any
) -> Config:
    return Config(
        model=model,
        data=DataConfig(seq_len=seq_len),
        prepare=PrepareConfig(vocab_size=model.vocab_size),
        optim=optim,
        train=TrainConfig(precision="bfloat16", log_every=10, eval_every=2000, **train),
        checkpoint=CheckpointConfig(every=2000),
        job=JobConfig(name=name, start_timeout_s=1800),
    )


def _moeut_run(name: str, common: dict[str, Any], sizes: dict[str, Any]) -> Config:
    """Returns a run by the MoEUT paper's protocol: 64 × 1024 tokens a step, 100,000 steps."""
    small = "_44m" in name
    own = {_KEYS.get(key, key): value for key, value in sizes.items()}
    if small:
        own["initialisation.expert_axis_norm"] = False
    optim = OptimConfig(
        warmup_steps=0 if small else 0.04,
        decay_steps="auto" if small else 1.0,  # the last rate is a little above the floor
        clip_norm=0.1 if small else 0.25,
    )
    train = {"steps": 100_000, "global_batch": 64, "micro_batch": 8, "eval_rows": 1008}
    return _run(name, ModelConfig.from_dotted(common | own), seq_len=1024, optim=optim, **train)


def _mixture(
    name: str,
    *,
    blocks: int,
    width: int,
    group: int,
    experts: int,
    rate: float,
    steps: int = 150_000,
    **sizes: Any,
) -> Config:
    """Returns a run on C4 with 256 sequences of 256 tokens a step, so groups of 128 fit two ranks.

    `experts` 0: the dense baseline.
    """
    own = {_KEYS.get(key, key): value for key, value in sizes.items()}
    own |= {"num_layers": blocks, "layers_per_group": blocks}
    own["feed_forward.d_feed_forward"] = width
    experts_keys: dict[str, Any] = {
        "feed_forward.kind": "experts",
        "feed_forward.sparse_layers": "last_half",
        "feed_forward.num_experts": experts,
        "feed_forward.d_expert": width * group // max(1, experts),
        "feed_forward.router": {"kind": "mixture_of_tokens", "sequences_per_group": group},
    }
    model = ModelConfig.from_dotted(_MIXTURE_MODEL | (experts_keys if experts else {}) | own)
    optim = OptimConfig(
        learning_rate=rate, warmup_steps=2500 / steps, clip_norm=0.5, weight_decay=0.1
    )
    train = {"global_batch": 256, "micro_batch": max(32, group), "eval_rows": 1024}
    return _run(name, model, seq_len=256, optim=optim, steps=steps, **train)


# fmt: off
_MOEUT_SIZES: dict[str, dict[str, Any]] = {
    "moeut_44m":  dict(layers=16, group=2, d_model=412,  heads=4, attention_experts=8,  d_head=82,  experts=155, top_k=12),
    "moeut_126m": dict(layers=18, group=2, d_model=768,  heads=4, attention_experts=10, d_head=96,  experts=254, top_k=12),
    "moeut_244m": dict(layers=18, group=2, d_model=1024, heads=4, attention_experts=10, d_head=128, experts=387, top_k=16),
    "moeut_319m": dict(layers=24, group=3, d_model=1024, heads=4, attention_experts=10, d_head=128, experts=338, top_k=16),
    "moeut_728m": dict(layers=36, group=4, d_model=1280, heads=5, attention_experts=13, d_head=128, experts=467, top_k=20),
    "moeut_1b":   dict(layers=36, group=4, d_model=1536, heads=6, attention_experts=12, d_head=128, experts=565, top_k=24),
}
# The group-size, order and norm ablations at 244M.
_ABLATIONS: dict[str, dict[str, Any]] = {
    f"moeut_244m_g{group}": _MOEUT_SIZES["moeut_244m"] | dict(
        group=group, experts=experts, attention_experts=attention, attention_top_k=min(2, attention)
    )
    for group, experts, attention in ((1, 779, 20), (3, 260, 6), (6, 128, 3), (9, 84, 2), (18, 40, 1))
} | {
    "moeut_244m_aabb": _MOEUT_SIZES["moeut_244m"] | dict(order="aabb"),
    "moeut_244m_pre":  _MOEUT_SIZES["moeut_244m"] | dict(norm="pre"),
    "moeut_244m_post": _MOEUT_SIZES["moeut_244m"] | dict(norm="post"),
}
# Nothing shared, one gated attention expert per head.
_SIGMA_SIZES: dict[str, dict[str, Any]] = {
    "sigma_moe_44m":  dict(layers=16, group=16, d_model=412,  heads=4, attention_experts=1, d_head=82,  experts=17, top_k=12),
    "sigma_moe_126m": dict(layers=18, group=18, d_model=768,  heads=4, attention_experts=1, d_head=96,  experts=26, top_k=12),
    "sigma_moe_244m": dict(layers=18, group=18, d_model=1024, heads=4, attention_experts=1, d_head=128, experts=40, top_k=16),
    "sigma_moe_319m": dict(layers=24, group=24, d_model=1024, heads=4, attention_experts=1, d_head=128, experts=40, top_k=16),
    "sigma_moe_728m": dict(layers=36, group=36, d_model=1280, heads=5, attention_experts=1, d_head=128, experts=50, top_k=20),
}
_DENSE_SIZES: dict[str, dict[str, Any]] = {
    "dense_44m":  dict(layers=16, group=16, d_model=412,  d_feed_forward=2053, heads=10, d_head=41),
    "dense_126m": dict(layers=16, group=16, d_model=768,  d_feed_forward=3072, heads=16, d_head=48),
    "dense_244m": dict(layers=18, group=18, d_model=1024, d_feed_forward=4110, heads=16, d_head=64),
    "dense_319m": dict(layers=24, group=24, d_model=1024, d_feed_forward=4110, heads=16, d_head=64),
    "dense_728m": dict(layers=36, group=36, d_model=1280, d_feed_forward=5120, heads=20, d_head=64),
    "dense_1b":   dict(layers=36, group=36, d_model=1536, d_feed_forward=6144, heads=24, d_head=64),
}
_SUT_44M = dict(
    layers=16, d_model=412, d_expert=256, heads=4, d_head=64, attention_experts=24, experts=152,
    top_k=2, mi_loss=0.001, attention_balance=0.001, sampled=0,
)
_SUT_244M = dict(
    layers=18, d_model=1024, d_expert=512, heads=4, d_head=128, attention_experts=21, experts=192,
    top_k=4, mi_loss=0.01, attention_balance=0.01, sampled=1,
)
_HALTING = dict(halting=dict(loss=0.01, loss_sum="all"))
_SUT_SIZES: dict[str, dict[str, Any]] = {
    "sut_44m": _SUT_44M | _HALTING, "sut_44m_no_act": _SUT_44M,
    "sut_244m": _SUT_244M | _HALTING, "sut_244m_no_act": _SUT_244M,
}
_MEDIUM, _BASE = dict(d_model=512, blocks=8, heads=8, width=2048), dict(d_model=768, blocks=12, heads=12, width=3072)
_MIXTURE_SIZES: dict[str, dict[str, Any]] = {
    "gpt_medium":         _MEDIUM | dict(group=1,   experts=0,    rate=7e-4),
    "mot_medium_8e":      _MEDIUM | dict(group=8,   experts=8,    rate=7e-4),
    "mot_medium_32e_1":   _MEDIUM | dict(group=32,  experts=32,   rate=7e-4),
    "mot_medium_32e_8":   _MEDIUM | dict(group=32,  experts=256,  rate=7e-4),
    "mot_medium_32e_16":  _MEDIUM | dict(group=32,  experts=512,  rate=7e-4),
    "mot_medium_32e_32":  _MEDIUM | dict(group=32,  experts=1024, rate=7e-4),
    "mot_medium_128e":    _MEDIUM | dict(group=128, experts=128,  rate=7e-4),
    "gpt_base":           _BASE | dict(group=1,  experts=0,    rate=4e-4),
    "mot_base_32e":       _BASE | dict(group=32, experts=32,   rate=2e-4),
    "mot_base_64e_16":    _BASE | dict(group=64, experts=1024, rate=2e-4),
    "mot_mini":           dict(
        d_model=256, blocks=4, heads=4, width=1024, group=32, experts=512, rate=2e-3, sparse_layers="all", steps=250_000,
        init_scale=1.0,
    ),
}
# fmt: on

_KINDS: tuple[tuple[str, dict[str, Any], dict[str, dict[str, Any]]], ...] = (
    ("MoEUT, a size of the paper", _MOEUT, _MOEUT_SIZES),
    ("MoEUT, an ablation of the paper", _MOEUT, _ABLATIONS),
    ("σ-MoE control of the MoEUT paper", _MOEUT | {"attention.top_k": 1}, _SIGMA_SIZES),
    ("dense baseline of the MoEUT paper", _DENSE, _DENSE_SIZES),
    ("SUT baseline of the MoEUT paper", _SUT, _SUT_SIZES),
)
_MIXTURE = "Mixture of Tokens, or its dense baseline"

PUBLISHED: dict[str, tuple[str, Callable[[], Config]]] = {
    name: (description, partial(_moeut_run, name, common, sizes))
    for description, common, table in _KINDS
    for name, sizes in table.items()
} | {name: (_MIXTURE, partial(_mixture, name, **sizes)) for name, sizes in _MIXTURE_SIZES.items()}
