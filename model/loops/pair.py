"""The unlooped partner of a looped model, at an equal budget.

    flops        as many layers as the looped model has depth steps, none shared
    cache        the same, without a change of widths: equal bytes of keys and values per token
    parameters   the distinct layers, each applied once

For FLOPs and parameters the feed-forward's width is then the one that comes closest, which also
makes up for what the injection costs. Layers keep their place: one that is sparse stays sparse.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..config.model_config import ModelConfig
from ..cost import count_parameters, forward_flops

Budget = Literal["flops", "parameters", "cache"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)


@dataclass(frozen=True)
class Budgets:
    """Counts what two arms can be equal in."""

    flops: float  # of training, per token
    parameters: int  # of the distinct layers and of what belongs to loops: no embeddings
    cache: int  # keys and values per token, in elements

    def difference(self, other: "Budgets", budget: Budget) -> float:
        """Returns how much more the other has, as a share."""
        return getattr(other, budget) / getattr(self, budget) - 1


def budgets(model: ModelConfig, seq_len: int) -> Budgets:
    """Counts a model's budgets, in sequences of `seq_len` positions."""
    attention = model.attention
    return Budgets(
        forward_flops(model, seq_len).training,
        count_parameters(model, seq_len).in_layers,
        model.num_layers * attention.cached_numbers,
    )


def unlooped(model: ModelConfig, seq_len: int, budget: Budget = "flops") -> ModelConfig:
    """Returns a model without loops that is equal in one budget, as far as integers allow.

    Raises:
        ValueError: the model has no loops, or cannot be without them.
    """
    if model.num_repeats == 1 and model.loops.is_plain:
        raise ValueError("the model applies no layer twice, so it has no unlooped partner")
    steps = model.schedule_of(1) if budget == "parameters" else model.schedule
    values: dict[str, Any] = {
        "num_layers": len(steps),
        "layers_per_group": len(steps),
        "order": "abab",
        "loops": {},
        "halting": None,
    }
    if model.experts is not None:
        sparse = tuple(step.index for step in steps if model.has_experts(step.member))
        values["feed_forward.sparse_layers"] = "all" if len(sparse) == len(steps) else sparse
    plain = model.changed(values)
    return plain if budget == "cache" else _fitted(plain, model, seq_len, budget)


def _fitted(plain: ModelConfig, model: ModelConfig, seq_len: int, budget: Budget) -> ModelConfig:
    """Returns the model with the width whose budget comes closest; budgets are linear in it."""
    key = "d_feed_forward" if plain.experts is None else "d_expert"
    width = getattr(plain.feed_forward, key)

    def with_width(width: int) -> ModelConfig:
        return plain.changed({f"feed_forward.{key}": max(1, width)})

    def of(width: int) -> float:
        return getattr(budgets(with_width(width), seq_len), budget)

    wanted, own = getattr(budgets(model, seq_len), budget), of(width)
    guess = width + round((wanted - own) / (of(width + 1) - own))
    return with_width(min((guess - 1, guess, guess + 1), key=lambda each: abs(of(each) - wanted)))
