"""Named runs. A recipe is a function that returns a whole Config; `moebius train NAME key=value …` changes single values.

The six published MoEUT sizes and their dense baselines (arXiv 2405.16039, appendix; sizes as in the authors' training code).
Corrections of the published release profiles, which do not run or do not match the paper as shipped:
  * 728M: d_model 1280, as trained; the released profile says 1024 and gives 581.9M parameters.
  * 44M: d_head 82 rotates 40 channels; the release computes 41, an odd number, and stops.
  * 319M and 728M are called 318M and 727M in the release.
"""

from collections.abc import Callable

from ..data_pipeline.config import DataConfig
from ..distributed.layout import MeshConfig
from ..model.config import ModelConfig
from ..model.router_sigmoid import SigmoidConfig
from .config import CheckpointConfig, Config, JobConfig, TrainConfig
from .optim import OptimConfig


def smoke() -> Config:
    """The main job: a tiny MoEUT on the embedded corpus, 2 pretended nodes × 2 ranks, EP 2 × DP 2, one rank killed."""
    return Config(
        model=ModelConfig(
            vocab_size=4096, d_model=128, num_layers=4, group_size=2, num_heads=4, d_head=32,
            num_attention_experts=4, attention_top_k=2, router=SigmoidConfig(top_k=4), num_experts=16, d_expert=64,
        ),
        data=DataConfig(vocab_size=4096, seq_len=128, validation_fraction=0.05),
        mesh=MeshConfig(ep=2, dp_replicate=2),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=20, decay_steps=160, clip_norm=1.0),
        train=TrainConfig(
            steps=160, global_batch=16, micro_batch=4, log_every=4, eval_every=40, eval_rows=256,
        ),
        checkpoint=CheckpointConfig(every=40, keep_last=2),
        job=JobConfig(name="smoke", num_nodes=2, ranks_per_node=2, rehearse_failure_at_step=90),
    )  # fmt: skip


def own_text() -> Config:
    """A MoEUT of 7M parameters for some thousand steps on a CPU: give data.input your text."""
    return Config(
        model=ModelConfig(
            vocab_size=8000, d_model=192, num_layers=6, group_size=2, num_heads=4, d_head=48,
            num_attention_experts=4, attention_top_k=2, router=SigmoidConfig(top_k=6), num_experts=32, d_expert=128,
        ),
        data=DataConfig(vocab_size=8000, seq_len=256),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=200, decay_steps=3000),
        train=TrainConfig(steps=3000, global_batch=8, micro_batch=4, eval_every=250, eval_rows=256),
        checkpoint=CheckpointConfig(every=250, keep_last=2),
        job=JobConfig(name="own_text", ranks_per_node=2),
    )  # fmt: skip


def _published(name: str, model: ModelConfig, *, warmup_steps: int, clip_norm: float) -> Config:
    """The protocol that all published runs share: 64 × 1024 tokens a step, 100,000 steps."""
    return Config(
        model=model,
        data=DataConfig(vocab_size=8000, seq_len=1024),
        optim=OptimConfig(warmup_steps=warmup_steps, clip_norm=clip_norm),
        train=TrainConfig(
            steps=100_000, global_batch=64, micro_batch=8, precision="bfloat16", log_every=10, eval_every=2000, eval_rows=1008,
        ),
        checkpoint=CheckpointConfig(every=2000),
        job=JobConfig(name=name, start_timeout_s=1800),
    )  # fmt: skip


def _moeut(
    name: str, *, layers: int, group: int, d_model: int, heads: int, attention_experts: int, d_head: int,
    experts: int, top_k: int,
) -> Config:  # fmt: skip
    small = name == "moeut_44m"
    model = ModelConfig(
        vocab_size=8000, num_layers=layers, group_size=group, d_model=d_model, num_heads=heads, d_head=d_head,
        num_attention_experts=attention_experts, attention_top_k=2, num_experts=experts,
        router=SigmoidConfig(top_k=top_k), d_expert=128,
        single_expert="gated_experts", initialisation="paper", expert_axis_norm=not small,
    )  # fmt: skip
    return _published(name, model, warmup_steps=0 if small else 4000, clip_norm=0.1 if small else 0.25)


def _dense(name: str, *, layers: int, d_model: int, d_feed_forward: int, heads: int, d_head: int) -> Config:
    small = name == "dense_44m"
    model = ModelConfig(
        vocab_size=8000, num_layers=layers, group_size=layers, d_model=d_model, num_heads=heads, d_head=d_head,
        d_feed_forward=d_feed_forward, norm="pre", attention="dense", feed_forward="dense",
    )  # fmt: skip
    return _published(name, model, warmup_steps=0 if small else 4000, clip_norm=0.1 if small else 0.25)


# fmt: off
_MOEUT_SIZES = {
    "moeut_44m":  dict(layers=16, group=2, d_model=412,  heads=4, attention_experts=8,  d_head=82,  experts=155, top_k=12),
    "moeut_126m": dict(layers=18, group=2, d_model=768,  heads=4, attention_experts=10, d_head=96,  experts=254, top_k=12),
    "moeut_244m": dict(layers=18, group=2, d_model=1024, heads=4, attention_experts=10, d_head=128, experts=387, top_k=16),
    "moeut_319m": dict(layers=24, group=3, d_model=1024, heads=4, attention_experts=10, d_head=128, experts=338, top_k=16),
    "moeut_728m": dict(layers=36, group=4, d_model=1280, heads=5, attention_experts=13, d_head=128, experts=467, top_k=20),
    "moeut_1b":   dict(layers=36, group=4, d_model=1536, heads=6, attention_experts=12, d_head=128, experts=565, top_k=24),
}
_DENSE_SIZES = {
    "dense_44m":  dict(layers=16, d_model=412,  d_feed_forward=2053, heads=10, d_head=41),
    "dense_126m": dict(layers=16, d_model=768,  d_feed_forward=3072, heads=16, d_head=48),
    "dense_244m": dict(layers=18, d_model=1024, d_feed_forward=4110, heads=16, d_head=64),
    "dense_319m": dict(layers=24, d_model=1024, d_feed_forward=4110, heads=16, d_head=64),
    "dense_728m": dict(layers=36, d_model=1280, d_feed_forward=5120, heads=20, d_head=64),
    "dense_1b":   dict(layers=36, d_model=1536, d_feed_forward=6144, heads=24, d_head=64),
}
# fmt: on

RECIPES: dict[str, Callable[[], Config]] = {
    "smoke": smoke,
    "own_text": own_text,
    **{name: lambda name=name, sizes=sizes: _moeut(name, **sizes) for name, sizes in _MOEUT_SIZES.items()},
    **{name: lambda name=name, sizes=sizes: _dense(name, **sizes) for name, sizes in _DENSE_SIZES.items()},
}
