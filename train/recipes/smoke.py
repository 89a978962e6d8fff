"""Named runs. A recipe is a function that returns a whole Config; `moebius train NAME key=value …`
changes single values.

This file has the runs to start with; family.py has every architecture at one small size,
published.py the papers' sizes, hub.py other people's models.
"""

from collections.abc import Callable

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import OWN_TEXTS, PrepareConfig
from ...distributed.layout import MeshConfig
from ...model.config.attention_config import SwitchHeadConfig
from ...model.config.feed_forward_config import ExpertsConfig
from ...model.config.model_config import ModelConfig
from ...model.routers.sigmoid import SigmoidConfig
from ..config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig
from .family import FAMILY
from .hub import HUB, HUB_SMALL
from .published import PUBLISHED


def smoke() -> Config:
    """The main job: a tiny MoEUT on the embedded corpus, 2 pretended nodes × 2 ranks, EP 2 × DP 2,
    one rank killed.
    """
    return Config(
        model=ModelConfig(
            vocab_size=4096,
            d_model=128,
            num_layers=4,
            layers_per_group=2,
            attention=SwitchHeadConfig(num_heads=4, d_head=32, num_experts=4, top_k=2),
            feed_forward=ExpertsConfig(num_experts=16, d_expert=64, router=SigmoidConfig(top_k=4)),
        ),
        data=DataConfig(seq_len=128),
        prepare=PrepareConfig(vocab_size=4096, validation_fraction=0.05),
        mesh=MeshConfig(ep=2, dp_replicate=2),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=20, clip_norm=1.0),
        train=TrainConfig(
            steps=160,
            global_batch=16,
            micro_batch=4,
            log_every=4,
            eval_every=40,
            eval_rows=256,
            device="cpu",  # four ranks on one machine, which may lack four GPUs
            eval_batch=16,
        ),
        checkpoint=CheckpointConfig(every=40, keep_last=2),
        job=JobConfig(name="smoke", num_nodes=2, ranks_per_node=2, rehearse_failure_at_step=90),
    )


def own_text() -> Config:
    """A MoEUT of 7M parameters for some thousand steps on a CPU, on the folder texts/ or the text
    that you name.
    """
    return Config(
        model=ModelConfig(
            vocab_size=8000,
            d_model=192,
            num_layers=6,
            layers_per_group=2,
            attention=SwitchHeadConfig(num_heads=4, d_head=48, num_experts=4, top_k=2),
            feed_forward=ExpertsConfig(num_experts=32, d_expert=128, router=SigmoidConfig(top_k=6)),
        ),
        data=DataConfig(seq_len=256),
        prepare=PrepareConfig(input=(OWN_TEXTS,), vocab_size=8000),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=200),
        train=TrainConfig(steps=3000, global_batch=8, micro_batch=4, eval_every=250, eval_rows=256),
        checkpoint=CheckpointConfig(every=250, keep_last=2),
        job=JobConfig(name="own_text", ranks_per_node=2),
    )


def _described(description: str, build: Callable[[], Config]) -> Callable[[], Config]:
    """Returns a recipe of a table, with its line in `moebius models`."""

    def recipe() -> Config:
        return build()

    recipe.__doc__ = description
    return recipe


RECIPES: dict[str, Callable[[], Config]] = {
    "smoke": smoke,
    "own_text": own_text,
    **{name: _described(*entry) for name, entry in FAMILY.items()},
    **{name: _described(*entry) for name, entry in (PUBLISHED | HUB_SMALL | HUB).items()},
}
