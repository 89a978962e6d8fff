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
