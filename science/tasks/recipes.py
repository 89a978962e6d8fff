"""Tasks where recurrence in depth shows (science/docs/tasks.md): dense, naive UT and MoEUT on each.

Of one task all arms have the same width, depth and multiply-accumulates of a token's experts or
feed-forward, and see the same items in the same order. The naive UT shares one layer among all depth
steps and so has few parameters; MoEUT shares two, whose experts make up for it: about as many
parameters as the dense arm. Small enough for one thread of a CPU, but for the published size of
composition: 8 layers of GPT-2's width, and as the naive UT that paper's 4 layers, twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from moebius.data_pipeline.data_config import DataConfig, TestSet
from moebius.model.config.model_config import ModelConfig
from moebius.train.config.run_config import CheckpointConfig, Config, JobConfig, TrainConfig
from moebius.train.optim import OptimConfig

from .draw import ANSWER, PROMPT

_ROOM = "python:moebius_science.tasks"


@dataclass(frozen=True)
class _Size:
    """Holds the sizes that the arms of a task have in common."""

    d_model: int = 64
    heads: int = 2
    layers: int = 6  # depth steps
    d_feed_forward: int = 128
    d_expert: int = 32
    vocab_size: int = 257
    unshared: int = 1  # distinct layers of the naive UT

    def model(self, arm: str) -> ModelConfig:
        """Returns the model of an arm: `dense`, `naive_ut` or `moeut`."""
        dense = {
            "vocab_size": self.vocab_size, "d_model": self.d_model, "norm": "pre",
            "num_layers": self.layers, "layers_per_group": self.layers,
            "attention.kind": "dense", "attention.num_heads": self.heads,
            "attention.d_head": self.d_model // self.heads,
            "feed_forward.kind": "dense", "feed_forward.d_feed_forward": self.d_feed_forward,
        }  # fmt: skip
        changes = {"naive_ut": {"layers_per_group": self.unshared}, "moeut": self._experts}
        return ModelConfig.from_dotted(dense | changes.get(arm, {}))

    @property
    def _experts(self) -> dict[str, Any]:
        """Two layers, with as many columns in their experts as all dense layers have."""
        return {
            "layers_per_group": 2, "norm": "peri",
            "attention.kind": "switchhead", "attention.num_experts": self.layers // 2,
            "attention.top_k": 2, "attention.single_expert": "gated_experts",
            "feed_forward.kind": "experts", "feed_forward.d_expert": self.d_expert,
            "feed_forward.num_experts": self.layers * self.d_feed_forward // (2 * self.d_expert),
            "feed_forward.router": {
                "kind": "sigmoid", "top_k": self.d_feed_forward // self.d_expert,
            },
        }  # fmt: skip


def input_of(task: str, function: str, **settings: Any) -> str:
    """Returns the name of an input: one of a task's functions with its settings."""
    query = f"?{urlencode(settings)}" if settings else ""
    return f"{_ROOM}.{task}:{function}{query}"


def p_hop() -> dict[str, Any]:
    """Returns data and training of p-hop induction at half the published size."""
    sizes = {"letters": 4, "hops": 8}
    same = input_of("p_hop", "held_out", sequences=512, length=48, **sizes)
    hard = input_of("p_hop", "held_out", sequences=512, length=48, least_hops=8, **sizes)
    longer = input_of("p_hop", "held_out", sequences=512, length=96, **sizes)
    data = DataConfig(
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
    )
    return {"data": data, **_training(steps=2500)}


def addition() -> dict[str, Any]:
    """Returns data and training of addition: 2, 4 or 8 numbers of two digits."""
    sizes = {"digits": 2}
    tests = {
        f"{side}_{count}_operands": input_of(
            "addition", "held_out", sums=512, operands=count, **sizes
        )
        for side, count in (
            ("in_distribution", 4),
            ("in_distribution", 8),
            ("out_of_distribution", 6),
            ("out_of_distribution", 12),
        )
    }
    data = DataConfig(
        input=(input_of("addition", "train", sums=200_000, operands="2,4,8", **sizes),),
        validation_input=(tests["in_distribution_8_operands"],),
        tokenizer=input_of("addition", "words"),
        vocab_size=257,
        packing="best_fit",
        document_attention=True,
        seq_len=8 * 3 + 3,  # 8 operands, the answer's three digits, its end
        test_sets=tuple(TestSet(name=name, input=(test,)) for name, test in tests.items()),
        prompt_field=PROMPT,
        answer_field=ANSWER,
    )
    return {"data": data, **_training(steps=4000)}


def permutation_words() -> dict[str, Any]:
    """Returns data and training of words over A5: 12 elements, and 24 and 36 in the tests."""
    tests = {
        name: input_of("permutation_words", "held_out", sequences=512, length=length, group="a5")
        for name, length in (
            ("in_distribution", 12),
            ("out_of_distribution_length_24", 24),
            ("out_of_distribution_length_36", 36),
        )
    }
    train = input_of("permutation_words", "train", sequences=200_000, length=12, group="a5")
    data = DataConfig(
        input=(train,),
        validation_input=(tests["in_distribution"],),
        tokenizer=input_of("permutation_words", "words", group="a5"),
        vocab_size=257,
        targets="paired",
        seq_len=2 * (12 + 2),
        test_sets=tuple(TestSet(name=name, input=(test,)) for name, test in tests.items()),
        prompt_field=PROMPT,
        answer_field=ANSWER,
    )
    return {"data": data, **_training(steps=10_000, batch=128)}


def composition(entities: int, relations: int) -> DataConfig:
    """Returns the data of composition over a knowledge graph, with 12.6 two-hop facts a fact."""
    sizes: dict[str, Any] = {"entities": entities, "relations": relations}
    tests = {
        name: input_of("composition", "held_out", split=name, ratio=12.6, **sizes)
        for name in ("in_distribution", "out_of_distribution")
    }
    known = {
        f"trained_on_{name}": input_of(
            "composition", "held_out", split=split, most=1000, ratio=12.6, **sizes
        )
        for name, split in (
            ("two_hops", "trained"),
            ("atomic", "atomic_in_distribution"),
            ("atomic_for_out_of_distribution", "atomic_out_of_distribution"),
        )
    }
    return DataConfig(
        input=(input_of("composition", "train", ratio=12.6, **sizes),),
        validation_input=(tests["in_distribution"],),
        tokenizer=input_of("composition", "words", **sizes),
        vocab_size=max(257, entities + relations + 1),
        packing="best_fit",
        seq_len=4,
        test_sets=tuple(
            TestSet(name=name, input=(test,)) for name, test in (tests | known).items()
        ),
        prompt_field=PROMPT,
        answer_field=ANSWER,
    )


def composition_tenth() -> dict[str, Any]:
    """Returns data and training of composition with a tenth of the published entities."""
    training = _training(steps=40_000, batch=512, weight_decay=0.3)
    training["optim"] = training["optim"].model_copy(update={"learning_rate": 1e-3})
    return {"data": composition(200, 40), **training}


def composition_published() -> dict[str, Any]:
    """Returns data and training of composition at the published size, by its protocol."""
    return {
        "data": composition(2000, 200),
        "optim": OptimConfig(
            learning_rate=1e-4,
            final_fraction=1.0,
            warmup_steps=2000,
            weight_decay=0.3,
            clip_norm=1.0,
        ),
        "train": TrainConfig(
            steps=1_500_000,
            global_batch=512,
            micro_batch=512,
            precision="bfloat16",
            log_every=100,
            eval_every=10_000,
        ),
        "checkpoint": CheckpointConfig(every=10_000, keep_last=2),
    }


def _training(*, steps: int, batch: int = 32, weight_decay: float = 0.01) -> dict[str, Any]:
    """Returns the sections that small runs have in common."""
    return {
        "optim": OptimConfig(
            learning_rate=3e-3,
            warmup_steps=50,
            decay_steps=steps,
            clip_norm=1.0,
            beta2=0.98,
            weight_decay=weight_decay,
        ),
        "train": TrainConfig(
            steps=steps,
            global_batch=batch,
            micro_batch=batch,
            eval_batch=max(batch, 128),
            log_every=20,
            eval_every=max(500, steps // 20),
        ),
        "checkpoint": CheckpointConfig(every=1000, keep_last=1),
    }


_PUBLISHED = _Size(
    d_model=768, heads=12, layers=8, d_feed_forward=3072, d_expert=128, vocab_size=2201, unshared=4
)
_TASKS: dict[str, tuple[str, _Size, Callable[[], dict[str, Any]]]] = {
    "p_hop": ("p-hop induction", _Size(), p_hop),
    "addition": ("addition of many numbers", _Size(), addition),
    "permutation_words": ("words over the group A5", _Size(), permutation_words),
    "composition": (
        "composition over a knowledge graph, a tenth of the published size",
        _Size(layers=8),
        composition_tenth,
    ),
    "composition_published": (
        "composition over a knowledge graph, as published",
        _PUBLISHED,
        composition_published,
    ),
}


def _config(task: str, arm: str) -> Config:
    _, size, sections = _TASKS[task]
    job = JobConfig(name=f"{task}_{arm}")
    return Config(model=size.model(arm), job=job, **sections())


def _arm(size: _Size, arm: str) -> str:
    shared = {"dense": size.layers, "naive_ut": size.unshared, "moeut": 2}[arm]
    if arm == "dense":
        return f"{size.layers} dense layers"
    layers = "one dense layer" if shared == 1 else f"{shared} dense layers"
    layers = "MoEUT, two layers of experts" if arm == "moeut" else layers
    return f"{layers}, {size.layers // shared} times"


ALGORITHMIC: dict[str, tuple[str, Callable[[], Config]]] = {
    f"{task}_{arm}": (
        f"{text}: {_arm(size, arm)}",
        lambda task=task, arm=arm: _config(task, arm),
    )
    for task, (text, size, _) in _TASKS.items()
    for arm in ("dense", "naive_ut", "moeut")
}
