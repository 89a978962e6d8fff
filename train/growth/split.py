"""`split=m`: cuts the hidden units of every expert into m experts.

A hidden unit adds down_j · a(up_j · x) by itself, so the parts of an expert add up to it. They have its router's
row, and so its logit: the best m·K of them are the parts of the best K. A sigmoid's gate is that of the
expert. A softmax, over all or over the chosen, gives each part 1/m of it, which m times the down-projection makes
good. The parts separate by their own gradients.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ...distributed.checkpoint.grown import Take
from ...model.config.feed_forward_config import ExpertsConfig
from ...model.config.model_config import ModelConfig
from ...model.routers.capacity import CapacityConfig
from ...model.routers.deepseek import DeepSeekConfig
from ..config.errors import ConfigError
from .growth import Given, Growth, count_of, expert_tensors, experts_of, part_takes


def split(model: ModelConfig, words: Mapping[str, str], given: Given) -> Growth:
    """Returns the growth of E experts, K for a token, into m·E and m·K of a width of 1/m.

    Raises:
        ConfigError: m does not divide the width, or the router would not keep its choice.
    """
    experts = experts_of(model)
    parts = _checked(experts, words["split"])
    router: Any = experts.router
    changes: dict[str, Any] = {
        "num_experts": experts.num_experts * parts,
        "d_expert": experts.d_expert // parts,
        "router.top_k": router.top_k * parts,
    }
    if experts.num_shared_experts and experts.d_shared_expert is None:  # as wide as the parts now
        changes["num_shared_experts"] = experts.num_shared_experts * parts
    is_softmax = getattr(router, "scores", "") == "softmax" or router.kind == "token_choice"
    # What makes good that the parts share their expert's gate; biases shrink with the scores.
    down = float(parts) if is_softmax or getattr(router, "renormalise", False) else 1.0
    factors = {"w_down": down, "b_down": down, "selection_bias": 1 / parts if is_softmax else 1.0}
    if getattr(router, "balance_pool", False):  # a sum over K choices, which are m times as many
        changes["router.balance"] = router.balance / parts
    grown = model.changed({f"feed_forward.{key}": value for key, value in changes.items()})
    takes = tuple(_takes(grown, parts, factors))
    sizes = f"E={changes['num_experts']}, K={changes['router.top_k']}"
    if isinstance(router, CapacityConfig) and _refuses_others(router):
        promise = f"{sizes}; where an expert is full, its parts refuse different rows"
        return Growth(grown, takes, promise, is_exact=False)
    return Growth(grown, takes, f"the logits stay equal, up to rounding; {sizes}")


def _refuses_others(router: CapacityConfig) -> bool:
    """Returns whether the parts of an expert may be full at other rows than it was."""
    is_limited = router.capacity_factor or router.evaluation_capacity_factor
    by_slot = router.drop_order in ("slot_major", "priority") or router.capacity_rounding == "rows"
    return bool(is_limited) and by_slot


def _takes(grown: ModelConfig, parts: int, factors: Mapping[str, float]) -> Iterator[Take]:
    """Yields what every part copies; the first one has its expert's whole output bias."""
    for _, name, last, shape in expert_tensors(grown):
        own, factor = (name, range(len(shape))), factors.get(last, 1.0)
        width = experts_of(grown).d_expert
        for place in range(shape[0]):
            expert, part = divmod(place, parts)
            given = {"expert": expert, "part": part, "parts": parts}
            if last == "b_down" and part:
                yield Take(name, (place, 0), (1, shape[1]))
            else:
                yield from part_takes(
                    (name, shape), place, own, d_expert=width, factor=factor, **given
                )


def _checked(experts: ExpertsConfig, word: str) -> int:
    """Returns m; raises ConfigError if the experts cannot be cut into so many."""
    parts, width, router = count_of(word), experts.d_expert, experts.router
    fitting = [str(m) for m in range(2, width + 1) if width % m == 0][:4]
    if parts < 2 or width % parts:
        fit = f"{', '.join(fitting)} would fit" if fitting else "it has one hidden unit"
        raise ConfigError(f"d_expert={width} cannot be cut into {word!r:.40} parts; {fit}")
    if isinstance(router, DeepSeekConfig):
        is_limited = router.kept_groups < router.num_groups
        if is_limited and router.group_score == "top2":
            raise ConfigError(
                'router.group_score="top2" adds the two best experts of a group, which would then be parts '
                'of one; start from a model with group_score="max", or with kept_groups=num_groups'
            )
    return parts
