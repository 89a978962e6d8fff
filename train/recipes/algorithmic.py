"""Tasks where recurrence in depth shows (docs/tasks.md): dense, naive UT and MoEUT on each.

Of one task all arms have the same width, depth and multiply-accumulates of a token's experts or
feed-forward, and see the same items in the same order. The naive UT shares one layer among all depth
steps and so has few parameters; MoEUT shares two, whose experts make up for it: about as many
parameters as the dense arm. Small enough for one thread of a CPU.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from ...data_pipeline.algorithmic.draw import ANSWER, PROMPT
from ...data_pipeline.config import DataConfig, TestSet
from ...model.config import ModelConfig
from ..config import CheckpointConfig, Config, JobConfig, TrainConfig
from ..optim import OptimConfig

_ROOM = "python:moebius.data_pipeline.algorithmic"
_DENSE: dict[str, Any] = {
    "vocab_size": 257, "d_model": 64, "num_layers": 6, "layers_per_group": 6, "norm": "pre",
    "attention.kind": "dense", "attention.num_heads": 2, "attention.d_head": 32,
    "feed_forward.kind": "dense", "feed_forward.d_feed_forward": 128,
}  # fmt: skip
_MOEUT: dict[str, Any] = {
    "layers_per_group": 2, "norm": "peri",
    "attention.kind": "switchhead", "attention.num_experts": 3, "attention.top_k": 2,
    "attention.single_expert": "gated_experts",
    "feed_forward.kind": "experts", "feed_forward.num_experts": 12, "feed_forward.d_expert": 32,
    "feed_forward.router": {"kind": "sigmoid", "top_k": 4},
}  # fmt: skip
_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("6 dense layers", {}),
    "naive_ut": ("one dense layer, 6 times", {"layers_per_group": 1}),
    "moeut": ("MoEUT: two layers of experts, 3 times", _MOEUT),
}


def input_of(task: str, function: str, **settings: Any) -> str:
    """Returns the name of an input: one of a task's functions with its settings."""
    query = f"?{urlencode(settings)}" if settings else ""
    return f"{_ROOM}.{task}:{function}{query}"


def p_hop(model: ModelConfig, name: str) -> Config:
    """Returns a run on p-hop induction at half the published size: 48 of 4 letters, up to 8 hops."""
    sizes = {"letters": 4, "hops": 8}
    same = input_of("p_hop", "held_out", sequences=512, length=48, **sizes)
    hard = input_of("p_hop", "held_out", sequences=512, length=48, least_hops=8, **sizes)
    longer = input_of("p_hop", "held_out", sequences=512, length=96, **sizes)
    return Config(
        model=model,
        data=DataConfig(
            input=(input_of("p_hop", "train", sequences=80_000, length=48, **sizes),),
            validation_input=(same,),
            tokenizer=input_of("p_hop", "words", **sizes),
            vocab_size=257,
            targets="paired",
            seq_len=2 * (48 + 2),
            test_sets=(
                TestSet(name="in_distribution", input=(same,)),
                TestSet(name="in_distribution_8_hops", input=(hard,)),
                TestSet(name="out_of_distribution_length_96", input=(longer,)),
            ),
            prompt_field=PROMPT,
            answer_field=ANSWER,
        ),
        **_training(name, steps=2500),
    )


def _training(name: str, *, steps: int) -> dict[str, Any]:
    """Returns the sections that all tasks have in common."""
    return {
        "optim": OptimConfig(
            learning_rate=3e-3, warmup_steps=50, decay_steps=steps, clip_norm=1.0, beta2=0.98
        ),
        "train": TrainConfig(
            steps=steps,
            global_batch=32,
            micro_batch=32,
            eval_batch=128,
            log_every=20,
            eval_every=500,
        ),
        "checkpoint": CheckpointConfig(every=1000, keep_last=1),
        "job": JobConfig(name=name),
    }


_TASKS: dict[str, tuple[str, Callable[[ModelConfig, str], Config]]] = {
    "p_hop": ("p-hop induction", p_hop),
}


def _config(task: str, arm: str) -> Config:
    return _TASKS[task][1](ModelConfig.from_dotted(_DENSE | _ARMS[arm][1]), f"{task}_{arm}")


ALGORITHMIC: dict[str, tuple[str, Callable[[], Config]]] = {
    f"{task}_{arm}": (
        f"{_TASKS[task][0]}: {_ARMS[arm][0]}",
        lambda task=task, arm=arm: _config(task, arm),
    )
    for task in _TASKS
    for arm in _ARMS
}
