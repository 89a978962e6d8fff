"""Makes a mixture of experts out of a dense model: `mixture=E/G` (upcycling, arXiv 2212.05055).

Every feed-forward is cut into G parts, and the parts are repeated E/G times. The G experts of one
copy get the same drawn router row (virtual groups, arXiv 2410.07524, §3.2), so a token takes whole
copies:

    gates     softmax over the K = k·G chosen: a part of copy c weighs g_c, and Σ_c G·g_c = 1;
              k = 1, and 2 of whole copies (G = 1), which a router can otherwise not learn to choose
    w_down    times G, so Σ_c g_c·G·FFN(x) = FFN(x), for any activation and any draw of the router

The parts of a copy separate by their own gradients. `drop=r` redraws the share r of each expert's
hidden units from the mean and the deviation of what they replace (Drop-Upcycling, arXiv
2502.19261): copies then differ from the start, and the function changes. Published is a random set
of units for each expert; here it is a window that moves from copy to copy. Units have no order, and
so each unit of the dense model survives in equally many copies.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...distributed.checkpoint.format import blake2b
from ...distributed.checkpoint.grown import Take
from ...distributed.local_shard import block_of
from ...model.config.model_config import ModelConfig
from ..config.errors import ConfigError
from ..families.table import shapes_of
from .growth import Given, Growth, expert_tensors, part_takes

_ROUTER_STD = 0.02  # where the model's initialisation has no number of its own
_SOURCES = {  # of a bank's tensors: those of a dense layer, and the bank's dims of theirs
    "w_up": ("up.weight", (2, 1)),
    "b_up": ("up.bias", (1,)),
    "w_down": ("down.weight", (2, 1)),
    "b_down": ("down.bias", (1,)),
}


def mixture(model: ModelConfig, words: Mapping[str, str], given: Given) -> Growth:
    """Returns a dense model as a mixture.

    Args:
        model: without experts in its feed-forwards.
        words: `mixture`, E/G; `drop`, the share r, or `exact`, which is the default.
        given: draws the router's rows, and reads the weights whose deviation `drop` needs.

    Raises:
        ConfigError: the model has experts, or the numbers do not fit it or each other.
    """
    num_experts, parts = _sizes(model, words["mixture"])
    d_expert = model.feed_forward.d_feed_forward // parts
    redrawn, top_k = _redrawn(words, d_expert), parts if parts > 1 else 2
    router = {"kind": "token_choice", "top_k": top_k, "renormalise": True}
    values = {"kind": "experts", "num_experts": num_experts, "d_expert": d_expert}
    values |= {f"router.{key}": value for key, value in router.items()}
    values["expert_bias"] = model.feed_forward.dense_bias
    grown = model.changed({f"feed_forward.{key}": value for key, value in values.items()})
    promise = f"{redrawn} of each expert's {d_expert} hidden units are redrawn; the loss may change"
    note = f"{num_experts} experts of {d_expert} hidden units, {top_k} for a token"
    return Growth(
        grown,
        (*_takes(grown, parts, redrawn, given), *_new_norms(model, grown)),
        promise if redrawn else "the logits stay equal, up to rounding",
        is_exact=not redrawn,
        notes=(f"{note}: {top_k // parts} × the dense model's FLOPs",),
    )


def _sizes(model: ModelConfig, given: str) -> tuple[int, int]:
    """Returns E and G."""
    match = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", given)
    if match is None:
        raise ConfigError(
            "write mixture=E/G, E experts that are copies of feed-forwards cut into G parts, for "
            "example mixture=8/4"
        )
    if model.experts is not None:
        raise ConfigError(
            "the model's feed-forwards have experts already; split=2 makes them finer, and experts=x2 "
            "makes more of them"
        )
    num_experts, parts = map(int, match.groups())
    width = model.feed_forward.d_feed_forward
    if width % parts or num_experts % parts:
        most = min(width, num_experts)
        fitting = [str(n) for n in range(1, most + 1) if width % n == num_experts % n == 0]
        raise ConfigError(
            f"G must divide the {num_experts} experts and the {width} hidden units of a feed-forward, "
            f"as {', '.join(fitting[:8])} would"
        )
    return num_experts, parts


def _redrawn(words: Mapping[str, str], d_expert: int) -> int:
    """Returns how many hidden units of an expert are redrawn; 0: the function is kept."""
    if (given := words.get("drop")) is None:
        return 0
    redrawn = round(float(given) * d_expert) if re.fullmatch(r"0?\.[0-9]{1,9}", given) else 0
    if "exact" in words or not 0 < redrawn < d_expert:
        raise ConfigError(
            f"drop is the share of each expert's {d_expert} hidden units that are redrawn, above 0 and "
            "below 1, for example drop=0.5, and excludes exact"
        )
    return redrawn


def _takes(grown: ModelConfig, parts: int, redrawn: int, given: Given) -> Iterator[Take]:
    """Yields what routers draw and experts copy; a token's gates sum to 1, so b_down stays whole."""
    experts, std = grown.experts, getattr(grown.initialisation, "std", _ROUTER_STD)
    assert experts is not None
    width, places = experts.d_expert, range(experts.num_experts)
    for _, name, last, shape in expert_tensors(grown):
        if last == "weight":  # a router's, whose rows are equal in a copy
            for place in places:
                seed = _seed(given, place // parts)
                yield Take(name, (place, 0), (1, shape[1]), std=std, seed=seed)
            continue
        source, axes = _SOURCES[last]
        copied = f"{name.partition('.sparse.')[0]}.{source}", axes
        weight = given.tensor(copied[0]) if redrawn and last in ("w_up", "w_down") else None
        cut: dict[str, Any] = {
            "parts": parts,
            "d_expert": width,
            "factor": parts if last == "w_down" else 1.0,
        }
        for place in places:
            first = place // parts * width * parts // experts.num_experts  # of the copy's window
            for take in part_takes((name, shape), place, copied, part=place % parts, **cut):
                if weight is None:
                    yield take
                else:
                    yield from _dropped(take, weight, range(first, first + redrawn), given)


def _dropped(take: Take, weight: Tensor, window: range, given: Given) -> Iterator[Take]:
    """Yields a take in runs of hidden units, of which those in the window are redrawn."""
    cut = 2 if take.name.endswith("w_up") else 1
    width = take.sizes[cut]
    around = max(0, window.stop - width)  # the window goes on at the start
    kept = (around, window.start, False), (window.stop, width, False)
    drawn = (0, around, True), (window.start, min(window.stop, width), True)
    for first, end, is_redrawn in (*kept, *drawn):
        if first >= end:
            continue
        start, sizes, at = list(take.start), list(take.sizes), list(take.at)
        start[cut], sizes[cut] = start[cut] + first, end - first
        at[take.axes.index(cut)] += first
        run = take._replace(start=tuple(start), sizes=tuple(sizes), at=tuple(at))
        if is_redrawn:
            std, mean = torch.std_mean(block_of(weight, run.at, run.counts).double())
            plus, spread = take.factor * mean.item(), take.factor * std.item()
            seed = _seed(given, *start)
            run = Take(run.name, run.start, run.sizes, plus=plus, std=spread, seed=seed)
        yield run


def _seed(given: Given, *place: int) -> int:
    return int(blake2b(repr((given.seed, *place)).encode())[:12], 16)


def _new_norms(model: ModelConfig, grown: ModelConfig) -> Iterator[Take]:
    """Yields the norms that routers read under peri-layernorm, which dense layers lack."""
    before = shapes_of(model)
    for name, shape in shapes_of(grown).items():
        if name not in before and name.endswith(("_norm.weight", "_norm.bias")):
            yield Take(name, (0,) * len(shape), shape, plus=float(name.endswith("weight")))
