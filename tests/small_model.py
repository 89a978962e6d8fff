"""MoEUTs with millisecond steps: experts in the feed-forward and in attention, repeated."""

from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig

MODEL = ModelConfig(
    vocab_size=257,
    d_model=24,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=12, num_experts=4, top_k=2),
    feed_forward=ExpertsConfig(num_experts=8, router=SigmoidConfig(top_k=3), d_expert=16),
)

TINY = ModelConfig(
    vocab_size=257,
    d_model=16,
    num_layers=2,
    layers_per_group=1,
    attention=SwitchHeadConfig(num_heads=2, d_head=8, num_experts=2, top_k=1),
    feed_forward=ExpertsConfig(num_experts=4, router=SigmoidConfig(top_k=2), d_expert=8),
)

# Odd sizes, and deeper than its group by more than two repeats.
ODD = ModelConfig(
    vocab_size=61,
    d_model=24,
    num_layers=6,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=3, d_head=10, num_experts=5, top_k=2),
    feed_forward=ExpertsConfig(num_experts=11, router=SigmoidConfig(top_k=4), d_expert=6),
)

# ODD with one thing changed
VARIANTS = {
    "moeut": ODD,
    "pre-norm": ODD.changed({"norm": "pre"}),
    "no sharing": ODD.changed({"layers_per_group": 6}),
    "one shared layer": ODD.changed({"layers_per_group": 1}),
    "one attention expert, release": ODD.changed({"attention.num_experts": 1}),
    "one attention expert, gated": ODD.changed(
        {
            "attention.num_experts": 1,
            "attention.top_k": 1,
            "attention.single_expert": "gated_experts",
        }
    ),
    "norms of outputs": ODD.changed({"norm": "output"}),
    "post-norm": ODD.changed({"norm": "post"}),
    "aabb": ODD.changed({"order": "aabb"}),
    "learned positions": ODD.changed(
        {"attention.positions.kind": "learned", "attention.positions.max_positions": 61}
    ),
    "sub-tokens": ODD.changed({"norm": "pre", "feed_forward.sub_tokens": 3}),
    "shared experts": ODD.changed(
        {"feed_forward.num_shared_experts": 2, "feed_forward.output_norm": True}
    ),
    "experts in the last half": ODD.changed(
        {"layers_per_group": 6, "feed_forward.sparse_layers": "last_half"}
    ),
    "naive universal transformer": ODD.changed(
        {
            "norm": "pre",
            "attention.kind": "dense",
            "feed_forward.kind": "dense",
            "layers_per_group": 1,
        }
    ),
    "dense": ODD.changed({"norm": "pre", "attention.kind": "dense", "feed_forward.kind": "dense"}),
    "sub-tokens, peri-norm": ODD.changed({"feed_forward.sub_tokens": 3}),
    "sub-tokens, post-norm": ODD.changed({"norm": "post", "feed_forward.sub_tokens": 3}),
    "gated shared experts": ODD.changed(
        {"feed_forward.num_shared_experts": 2, "feed_forward.activation": "swiglu"}
    ),
    "biases": ODD.changed({"feed_forward.expert_bias": True, "feed_forward.activation": "gelu"}),
    "one member of two": ODD.changed({"feed_forward.sparse_layers": 1, "order": "aabb"}),
    "a dense gated layer": ODD.changed(
        {"feed_forward.kind": "dense", "feed_forward.activation": "geglu"}
    ),
}
