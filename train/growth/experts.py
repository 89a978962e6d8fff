"""`experts=×m` or `experts=+n`: adds copies of experts, with their routers' rows, and keeps K.

All experts are copied m − 1 times, or the most useful ones, at most three times each: one after another, the expert
whose score divided by its number of copies is the largest (after arXiv 2604.19835). A copy is a twin of its expert
until something tells them apart:

    asleep   its selection bias lies so far below all others that it is never chosen. Loss-free balancing
             raises it by `bias_rate` a step, until the copy wakes.
    noise=s  its router's row gets normal noise of s times the router's root mean square. Twins among the best K
             displace others, so the loss changes at once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed.checkpoint.grown import Take
from ...model.config.feed_forward_config import ExpertsConfig
from ...model.config.model_config import ModelConfig
from ...model.routers.deepseek import DeepSeekConfig
from ..config.errors import ConfigError
from .growth import Given, Growth, count_of, expert_tensors, experts_of, part_takes, scores_of

_SCORES = ("load", "norm", "saliency")
_MOST = 3  # copies of an expert
_USUAL_RATE = 0.001  # of the bias, where it has not moved so far (DeepSeek-V3)
_MARGIN = 0.01  # of the gap between sleeping copies and all others


def copy_experts(model: ModelConfig, words: Mapping[str, str], given: Given) -> Growth:
    """Returns the growth of E experts by copies of some of them.

    Raises:
        ConfigError: there would be too many copies, or the router has nothing that lets them sleep.
    """
    experts = experts_of(model)
    more, noise = _number_of_copies(experts, words["experts"]), _noise(experts, words)
    scores = _scores(model, words, given)
    even = torch.ones(experts.num_experts)
    groups = getattr(experts.router, "num_groups", 1)
    takes, gap = list[Take](), 0.0
    for member, name, last, shape in expert_tensors(model):
        order, std, depth = _order(scores.get(member, even), more, groups), 0.0, 0.0
        if noise is None and last == "selection_bias":
            depth = _gap(given.tensor(name))
        elif noise and last == "weight":
            std = noise * given.tensor(name).double().square().mean().sqrt().item()
        gap = max(gap, depth)
        own = (name, range(len(shape)))
        for place, (expert, is_copy) in enumerate(order):
            found = part_takes((name, shape), place, own, expert=expert, d_expert=experts.d_expert)
            seed = given.seed + place if std else 0
            add = {"plus": -depth or 0.0, "std": std, "seed": seed} if is_copy else {}
            takes += [take._replace(**add) for take in found]
    changes: dict[str, Any] = {"feed_forward.num_experts": experts.num_experts + more}
    sizes = f"E={experts.num_experts + more}, of which {more} are copies"
    if noise is not None:
        promise = f"{sizes}; the loss may change" if noise else f"{sizes}, which stay equal"
        return Growth(model.changed(changes), tuple(takes), promise, is_exact=False)
    router: Any = experts.router
    rate = changes["feed_forward.router.bias_rate"] = router.bias_rate or _USUAL_RATE
    note = f"copies sleep for at most {math.ceil(gap / rate):,} steps of router.bias_rate={rate:g}"
    if router.bias_until_step is not None:  # which copies might never wake before
        changes["feed_forward.router.bias_until_step"] = None
        note += ", which no longer ends"
    grown = model.changed(changes)
    return Growth(grown, tuple(takes), f"the logits stay equal; {sizes}", notes=(note,))


def _scores(model: ModelConfig, words: Mapping[str, str], given: Given) -> dict[int, Tensor]:
    """Returns the usefulness of every expert by layer; empty: all are equally useful."""
    by = words.get("by", "norm")
    if by not in _SCORES:
        raise ConfigError(f"by={by} is no measure of usefulness; {', '.join(_SCORES)} are")
    if "by" not in words and not words["experts"].startswith("+"):
        return {}
    try:
        return scores_of(by, model, given)
    except ConfigError as error:
        raise ConfigError(f"{error}; by=norm reads weights alone") from None


def _gap(bias_E: Tensor) -> float:
    """Returns how far below its expert's the bias of a copy lies, that no score in [0, 1] makes good."""
    return (bias_E.max() - bias_E.min()).item() + 1 + _MARGIN


def _number_of_copies(experts: ExpertsConfig, word: str) -> int:
    """Returns how many experts ×m or +n adds."""
    sign, number, count = word[:1], word[1:], experts.num_experts
    groups = getattr(experts.router, "num_groups", 1)
    value = count_of(number)
    more = value if sign == "+" else count * (value - 1)
    if sign not in ("x", "×", "+") or not 0 < more <= _MOST * count:
        raise ConfigError(
            f"{word!r:.40} of {count} experts: write ×2 to ×{_MOST + 1}, or +1 to +{_MOST * count}, for at most "
            f"{_MOST} copies of each"
        )
    if more % groups:
        raise ConfigError(
            f"{more} copies cannot be shared evenly by router.num_groups={groups}; +{-(-more // groups) * groups} can"
        )
    return more


def _noise(experts: ExpertsConfig, words: Mapping[str, str]) -> float | None:
    """Returns the noise on the copies' rows, relative to the router's; None: they sleep."""
    router = experts.router
    can_sleep = isinstance(router, DeepSeekConfig) and router.scores == "sigmoid"
    if "asleep" in words and "noise" in words:
        raise ConfigError("asleep and noise exclude each other: a copy that sleeps needs no noise")
    if "asleep" in words and not can_sleep:
        raise ConfigError(
            f"nothing wakes a copy of router.kind={router.kind!r} as configured: asleep needs kind=deepseek with "
            'scores="sigmoid"; write noise=0.01'
        )
    if "noise" not in words:
        return None if can_sleep else 0.01
    try:
        noise = float(words["noise"])
    except ValueError:
        noise = -1.0
    if not 0 <= noise <= 1:
        raise ConfigError(
            f"noise={words['noise']:.40} is not a share of the router's rows, as 0.01 is"
        )
    return noise


def _order(scores_E: Tensor, more: int, groups: int) -> list[tuple[int, bool]]:
    """Returns the expert that each grown one has been, and whether it is a copy.

    Copies follow their experts, so that groups stay, and a rank has no more copies that sleep than another.
    """
    size, found = len(scores_E) // groups, list[tuple[int, bool]]()
    for first in range(0, len(scores_E), size):
        own = chosen(scores_E[first : first + size].tolist(), more // groups)
        found += [(first + expert, False) for expert in range(size)]
        found += [(first + expert, True) for expert in own]
    return sorted(found)


def chosen(scores: Sequence[float], more: int) -> list[int]:
    """Returns the experts to copy, in their order: the most useful first, each at most three times."""
    copies = [0] * len(scores)
    found = []
    for _ in range(more):
        open_ones = [expert for expert, count in enumerate(copies) if count < _MOST]
        best = max(open_ones, key=lambda expert: scores[expert] / (1 + copies[expert]))
        copies[best] += 1
        found.append(best)
    return found
