"""Defines the tasks' recipes and test sets (satellites/science/docs/tasks.md): dense, naive UT and MoEUT for
each.

    moebius train moebius_science.tasks.recipes:p_hop_moeut

All arms of a task have equal width, depth and multiply-accumulates per token in experts or
feed-forward, and see the same items in the same order. The naive UT shares one layer among all
depth steps and has few parameters. MoEUT shares two, whose experts bring it to about the dense
arm's number of parameters. All are small enough for one CPU thread, except the published size of
composition: 8 layers of GPT-2's width, and for the naive UT that paper's 4 layers, applied twice.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

import moebius

from . import addition, composition, p_hop, permutation_words
from .draw import ANSWER, PROMPT, Record

Sections = dict[str, dict[str, Any]]
Tests = Mapping[str, Callable[[], Iterable[Record]]]


@dataclass(frozen=True)
class ModelSize:
    """Holds the sizes shared by the arms of a task."""

    d_model: int = 64
    heads: int = 2
    layers: int = 6  # depth steps
    d_feed_forward: int = 128
    d_expert: int = 32
    vocab_size: int = 257
    unshared: int = 1  # distinct layers of the naive UT

    def model(self, arm: str) -> dict[str, Any]:
        """Returns the section `model` of an arm: `dense`, `naive_ut` or `moeut`."""
        sizes = {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "num_layers": self.layers,
        }
        if arm == "moeut":
            return sizes | self._experts
        return sizes | {
            "norm": "pre",
            "layers_per_group": self.layers if arm == "dense" else self.unshared,
            "attention": {"kind": "dense", **self._heads},
            "feed_forward": {"kind": "dense", "d_feed_forward": self.d_feed_forward},
        }

    @property
    def _heads(self) -> dict[str, int]:
        return {"num_heads": self.heads, "d_head": self.d_model // self.heads}

    @property
    def _experts(self) -> dict[str, Any]:
        """Returns two layers whose experts have as many columns as all dense layers together."""
        attention = {
            "kind": "switchhead",
            "num_experts": self.layers // 2,
            "top_k": 2,
            "single_expert": "gated_experts",
        }
        feed_forward = {
            "kind": "experts",
            "d_expert": self.d_expert,
            "num_experts": self.layers * self.d_feed_forward // (2 * self.d_expert),
            "router": {"kind": "sigmoid", "top_k": self.d_feed_forward // self.d_expert},
        }
        return {
            "norm": "peri",
            "layers_per_group": 2,
            "attention": attention | self._heads,
            "feed_forward": feed_forward,
        }


@dataclass(frozen=True)
class Task:
    """Holds a task: the sizes of its models, the other sections of its recipes, its test sets."""

    size: ModelSize
    sections: Sections
    tests: Tests

    def recipe(self, name: str, arm: str) -> moebius.Config:
        """Returns the configuration of an arm."""
        values = self.sections | {"model": self.size.model(arm), "job": {"name": f"{name}_{arm}"}}
        return moebius.Config.model_validate(values)


def input_of(task: str, function: str, **settings: Any) -> str:
    """Returns the name of an input: one of a task's functions with its settings."""
    query = f"?{urlencode(settings)}" if settings else ""
    return f"python:moebius_science.tasks.{task}:{function}{query}"


def _prepare(**values: Any) -> dict[str, Any]:
    return {"prompt_field": PROMPT, "answer_field": ANSWER, "vocab_size": 257} | values


def _p_hop() -> Task:
    """Returns p-hop induction at half the published size."""
    sizes = {"letters": 4, "hops": 8}
    same = {"sequences": 512, "length": 48, **sizes}
    prepare = _prepare(
        input=[input_of("p_hop", "train", sequences=80_000, length=48, **sizes)],
        validation_input=[input_of("p_hop", "held_out", **same)],
        tokenizer=input_of("p_hop", "words", **sizes),
    )
    data = {
        "targets": "paired",
        "seq_len": 2 * (48 + 2),
    }
    tests = {
        "in_distribution": partial(p_hop.held_out, **same),
        "in_distribution_8_hops": partial(p_hop.held_out, **same, least_hops=8),
        "out_of_distribution_length_96": partial(p_hop.held_out, **same | {"length": 96}),
    }
    return Task(ModelSize(), {"data": data, "prepare": prepare, **_training(steps=2500)}, tests)


def _addition() -> Task:
    """Returns addition of 2, 4 or 8 numbers of two digits."""
    held_out = {"sums": 512, "digits": 2}
    prepare = _prepare(
        input=[input_of("addition", "train", sums=200_000, operands="2,4,8", digits=2)],
        validation_input=[input_of("addition", "held_out", operands=8, **held_out)],
        tokenizer=input_of("addition", "words"),
    )
    data = {
        "packing": "best_fit",
        "document_attention": True,
        "seq_len": 8 * 3 + 3,  # 8 operands, the answer's three digits, its end
    }
    tests = {
        f"{side}_{count}_operands": partial(addition.held_out, operands=count, **held_out)
        for side, count in (
            ("in_distribution", 4),
            ("in_distribution", 8),
            ("out_of_distribution", 6),
            ("out_of_distribution", 12),
        )
    }
    return Task(ModelSize(), {"data": data, "prepare": prepare, **_training(steps=4000)}, tests)


def _permutation_words() -> Task:
    """Returns words over A5: 12 elements, and 24 and 36 in the tests."""
    held_out = {"sequences": 512, "group": "a5"}
    prepare = _prepare(
        input=[input_of("permutation_words", "train", sequences=200_000, length=12, group="a5")],
        validation_input=[input_of("permutation_words", "held_out", length=12, **held_out)],
        tokenizer=input_of("permutation_words", "words", group="a5"),
    )
    data = {
        "targets": "paired",
        "seq_len": 2 * (12 + 2),
    }
    tests = {
        name: partial(permutation_words.held_out, length=length, **held_out)
        for name, length in (
            ("in_distribution", 12),
            ("out_of_distribution_length_24", 24),
            ("out_of_distribution_length_36", 36),
        )
    }
    return Task(
        ModelSize(), {"data": data, "prepare": prepare, **_training(steps=10_000, batch=128)}, tests
    )


_COMPOSITION_TESTS: dict[str, dict[str, Any]] = {
    "in_distribution": {"split": "in_distribution"},
    "out_of_distribution": {"split": "out_of_distribution"},
    "trained_on_two_hops": {"split": "trained", "most": 1000},
    "trained_on_atomic": {"split": "atomic_in_distribution", "most": 1000},
    "trained_on_atomic_for_out_of_distribution": {
        "split": "atomic_out_of_distribution",
        "most": 1000,
    },
}


def _composition(size: ModelSize, training: Sections, *, entities: int, relations: int) -> Task:
    """Returns composition over a knowledge graph, with 12.6 two-hop facts per fact."""
    words = {"entities": entities, "relations": relations}
    graph = {"ratio": 12.6, **words}
    prepare = _prepare(
        input=[input_of("composition", "train", **graph)],
        validation_input=[input_of("composition", "held_out", split="in_distribution", **graph)],
        tokenizer=input_of("composition", "words", **words),
        vocab_size=max(257, entities + relations + 1),
    )
    data = {
        "packing": "best_fit",
        "seq_len": 4,
    }
    tests = {
        name: partial(composition.held_out, **settings, **graph)
        for name, settings in _COMPOSITION_TESTS.items()
    }
    return Task(size, {"data": data, "prepare": prepare, **training}, tests)


def _composition_tenth() -> Task:
    """Returns composition with a tenth of the published entities."""
    training = _training(steps=40_000, batch=512, weight_decay=0.3)
    training["optim"]["learning_rate"] = 1e-3
    return _composition(ModelSize(layers=8), training, entities=200, relations=40)


def _composition_published() -> Task:
    """Returns composition at the published size, by its protocol."""
    size = ModelSize(
        d_model=768,
        heads=12,
        layers=8,
        d_feed_forward=3072,
        d_expert=128,
        vocab_size=2201,
        unshared=4,
    )
    optim = {
        "learning_rate": 1e-4,
        "final_fraction": 1.0,
        "warmup_steps": 2000,
        "weight_decay": 0.3,
        "clip_norm": 1.0,
    }
    train = {
        "steps": 1_500_000,
        "global_batch": 512,
        "micro_batch": 512,
        "precision": "bfloat16",
        "log_every": 100,
        "eval_every": 10_000,
    }
    checkpoint = {"every": 10_000, "keep_last": 2}
    training = {"optim": optim, "train": train, "checkpoint": checkpoint}
    return _composition(size, training, entities=2000, relations=200)


def _training(*, steps: int, batch: int = 32, weight_decay: float = 0.01) -> Sections:
    """Returns the sections shared by small runs."""
    optim = {
        "learning_rate": 3e-3,
        "warmup_steps": 50,
        "decay_steps": steps,
        "clip_norm": 1.0,
        "beta2": 0.98,
        "weight_decay": weight_decay,
    }
    train = {
        "steps": steps,
        "global_batch": batch,
        "micro_batch": batch,
        "eval_batch": max(batch, 128),
        "log_every": 20,
        "eval_every": max(500, steps // 20),
    }
    return {"optim": optim, "train": train, "checkpoint": {"every": 1000, "keep_last": 1}}


TASKS: dict[str, Callable[[], Task]] = {
    "p_hop": _p_hop,
    "addition": _addition,
    "permutation_words": _permutation_words,
    "composition": _composition_tenth,
    "composition_published": _composition_published,
}
ARMS = ("dense", "naive_ut", "moeut")


def task_of(config: moebius.Config) -> str | None:
    """Returns the task whose training data a run reads, or None."""
    for name, make in TASKS.items():
        if tuple(config.prepare.input) == tuple(make().sections["prepare"]["input"]):
            return name
    return None


def __getattr__(name: str) -> Callable[[], moebius.Config]:
    """Returns a recipe, TASK_ARM: `p_hop_moeut`, `composition_published_dense`, …"""
    for arm in ARMS:
        task = name.removesuffix(f"_{arm}")
        if task != name and task in TASKS:
            return partial(TASKS[task]().recipe, task, arm)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
