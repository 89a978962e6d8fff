"""Every architecture of the family, small enough to test all of them."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.precision import forward_in
from moebius.model.initialise import initialise
from moebius.model.loops.depth import PassDepth
from moebius.model.loops.steps import PassOptions
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss
from moebius.train.micro_batches import MicroBatch
from moebius.train.recipes.family import FAMILY
from moebius.train.recipes.hub import HUB_SMALL

# Of other people's models those that together have every block
OTHERS = ("olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "olmo2")
MODELS = FAMILY | {f"{name}_small": HUB_SMALL[f"{name}_small"] for name in OTHERS}
NAMES = tuple(MODELS)
VOCABULARY = 61
NOTHING: Mapping[str, Any] = {}
# Norms in every loop make more of rounding where sums have another order: compared in the same order
# in float32, and in another order in float64.
MAGNIFIES = ("ouro_moe",)

# Every key of a loop program
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "add from zero": ("huginn_moe", {"loops.inject": "add", "loops.start": "zero"}),
    "linear from the embedding": ("huginn_moe", {"loops.start": "embedding"}),
    "linear, every gradient": ("huginn_moe", {"loops.depth.gradient_loops": None}),
    "decay, one gradient": ("parcae_moe", {"loops.depth.gradient_loops": 1}),
    "a vector per loop": ("moeut_sandwich", {"loops.condition": "embedding"}),
    "scale and shift per loop": ("huginn_moe", {"loops.condition": "scale_shift"}),
    "scaled residuals": ("moeut_sandwich", {"loops.residual_scale": 0.5}),
    "scaled sandwich": ("huginn_moe", {"loops.residual_scale": 0.5}),
    "norm in every loop": ("moeut_sandwich", {"loops.final_norm": "every_loop"}),
    "norm around the coda": ("middle_half_twice", {"loops.final_norm": "around_coda"}),
    "no coda": (
        "ouro_moe",
        {
            "num_layers": 7,
            "layers_per_group": 3,
            "loops.prelude": 1,
            "loops.inject": "add",
            "loops.exit_entropy": None,
        },
    ),
    "losses of three loops": (
        "huginn_moe",
        {"loops.read_out": (1, 3), "loops.depth": {}},
    ),
    "losses of every loop": ("ouro_moe", {"loops.exit_entropy": 0.1}),
    "each loop balanced": ("moeut_sandwich", {"loops.balance": "each"}),
    "dense prelude": ("moeut_sandwich", {"feed_forward.sparse_layers": (1, 2, 3)}),
}
LEAVING = [  # the others are refused: R is no sequence's own, or every loop has a loss
    name for name in PROGRAMS if not name.startswith(("scaled", "losses", "each loop"))
]


def some_tokens(*shape: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Draws tokens, the same for the same seed."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def set_options(model: Transformer, **changes: Any) -> None:
    """Changes the options of all further passes of a model."""
    if model not in _OPTIONS:
        model.register_forward_pre_hook(
            lambda module, args, given: (args, given | {"options": _OPTIONS[module]}),
            with_kwargs=True,
            prepend=True,
        )
    _OPTIONS[model] = replace(_OPTIONS.get(model, PassOptions()), **changes)


_OPTIONS: MutableMapping[Any, PassOptions] = WeakKeyDictionary()


def micro_batch_of(rows_BS1: Tensor, **given: Any) -> MicroBatch:
    """Returns the micro-batch of rows of tokens, each the target of the one before it."""
    return MicroBatch(rows_BS1[:, :-1], rows_BS1[:, 1:], **given)


def gradients_of(
    model: Transformer,
    dtype: torch.dtype,
    rows: Tensor,
    *,
    global_targets: int | None = None,
    **given: Any,
) -> dict[str, Tensor]:
    """Returns the loss of a micro-batch that is a whole batch, and all its gradients, by name."""
    model.before_step(0)
    torch.manual_seed(0)
    forward = partial(forward_in, model, dtype)
    result = micro_batch_loss(
        forward,
        micro_batch_of(rows, **given),
        global_sequences=len(rows),
        global_targets=global_targets,
    )
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": result.loss.detach()} | found


def without_draws(name: str) -> dict[str, Any]:
    """Changes by which loops do not start from noise, which differs from row to row in training."""
    return {} if tiny_config(name).loops.start != "drawn" else {"loops.start": "zero"}


def tiny_config(name: str, changes: Mapping[str, Any] = NOTHING) -> ModelConfig:
    """Returns the recipe's model with small widths and all its features.

    `changes` have dotted keys.
    """
    model = MODELS[name][1]().model
    small = {
        "vocab_size": VOCABULARY,
        "d_model": 24,
        "attention.d_head": 6,
        "feed_forward.d_feed_forward": 20,
    }
    if model.attention.kind == "mla":
        small |= {"attention.d_rotary": 4, "attention.d_value": 10, "attention.kv_rank": 8}
        small["attention.q_rank"] = 12
    if getattr(model.attention, "window", None) is not None:
        small["attention.window"] = 3
    if getattr(getattr(model.attention, "positions", None), "width", None) is not None:
        small["attention.positions.width"] = 6
    if model.experts is not None:
        small["feed_forward.d_expert"] = 8
        if model.experts.d_shared_expert is not None:
            small["feed_forward.d_shared_expert"] = 12
    return model.changed({**small, **changes})


def tiny_model(
    name: str,
    changes: Mapping[str, Any] = NOTHING,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Transformer:
    """Builds and initialises a tiny model."""
    model = Transformer(tiny_config(name, changes))
    initialise(model, seed)
    return model.to(dtype)


@torch.no_grad()
def make_uneven(model: Transformer, *, common: float = 1.0, seed: int = 0) -> Transformer:
    """Makes routers opinionated, so that loads are uneven, capacities overflow and tokens halt
    anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "router" in name or "halting" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype))
    shared = (
        common
        * model.embedding.std().double()
        * torch.randn(model.config.d_model, generator=generator, dtype=torch.float64)
    )
    model.embedding.add_(shared.to(model.embedding.dtype))
    return model


def program(name: str) -> Transformer:
    """Builds one of PROGRAMS with a condition that does something, in float64."""
    recipe, changes = PROGRAMS[name]
    model = make_uneven(tiny_model(recipe, changes)).double()
    generator = torch.Generator().manual_seed(4)
    for key, value in model.named_parameters():
        if "condition" in key or "injection" in key:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.data.add_(0.1 * noise)
    return model


def own_depths(model: Transformer, *depths: int, others: tuple[int, ...] = ()) -> PassDepth:
    """Returns a pass in which every sequence has its depth, beside those of other ranks."""
    depth = model.config.loops.depth
    first = [depth.first_with_gradient(each) for each in (*depths, *others)]
    kept = [each - own for each, own in zip((*depths, *others), first, strict=True)]
    return PassDepth(max(first) + max(kept), max(first), depths, depth.gradient_loops)
