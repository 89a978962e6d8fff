"""Makes a mixture of experts out of a dense model: `mixture=E/G` (upcycling, arXiv 2212.05055).

Every feed-forward is cut into G parts, and the parts are repeated E/G times. The G experts of one
copy get the same drawn router row (virtual groups, arXiv 2410.07524, §3.2), so a token takes whole
copies:

    gates     softmax over the K = k·G chosen: a part of copy c weighs g_c, and Σ_c G·g_c = 1
    w_down    times G, so Σ_c g_c·G·FFN(x) = FFN(x), for any activation and any draw of the router

The parts of a copy separate by their own gradients. `drop=r` redraws the share r of each expert's
hidden units from the mean and the deviation of the layer's weights (Drop-Upcycling, arXiv
2502.19261): copies then differ from the start, and the function changes. Published is a random set
of units for each expert; here it is a window that moves from copy to copy. Units have no order, and
so each unit of the dense model survives in equally many copies.

Legend: E experts, K of them for a token, F hidden units of the feed-forward, F/G of an expert.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ...distributed.checkpoint.format import blake2b
from ...distributed.checkpoint.grown import Take
from ...kernels.reference import columns_of
from ...model.config.model_config import ModelConfig
from ..config.errors import ConfigError
from ..families.table import shapes_of
from .growth import Given, Growth

_ROUTER_STD = 0.02  # where the model's initialisation has no number of its own
_NUMBER = re.compile(r"[1-9]\d{0,5}")


@dataclass(frozen=True)
class _Sizes:
    """Holds the numbers of a mixture, which fit the model and each other."""

    num_experts: int
    parts: int  # G
    top_k: int
    d_expert: int
    redrawn: int  # hidden units of an expert; 0: the function is kept


def mixture(model: ModelConfig, words: Mapping[str, str], given: Given) -> Growth:
    """Returns a dense model as a mixture.

    Args:
        model: without experts in its feed-forwards.
        words: `mixture`, E/G; `top`, K (by default G, and 2 for G = 1); `drop`, the share r, or
            `exact`, which is the default.
        given: draws the router's rows, and reads the weights whose deviation `drop` needs.

    Raises:
        ConfigError: the model has experts, or the numbers do not fit it or each other.
    """
    sizes = _sizes_of(model, words)
    values = {"num_experts": sizes.num_experts, "d_expert": sizes.d_expert, "kind": "experts"}
    values |= {"router.kind": "token_choice", "router.top_k": sizes.top_k}
    values |= {"router.renormalise": True, "expert_bias": model.feed_forward.dense_bias}
    grown = model.changed({f"feed_forward.{key}": value for key, value in values.items()})
    layers = range(model.layers_per_group)
    takes = [take for layer in layers for take in _layer_takes(model, sizes, given, layer)]
    redrawn = f"{sizes.redrawn} of each expert's {sizes.d_expert} hidden units are redrawn"
    used = sizes.top_k // sizes.parts
    cost = "the dense model's FLOPs" if used == 1 else f"{used} times the dense model's FLOPs"
    note = f"{sizes.num_experts} experts of {sizes.d_expert} hidden units, {sizes.top_k} for a token: {cost}"
    return Growth(
        grown,
        (*takes, *_new_norms(model, grown)),
        f"{redrawn}; the loss may change" if sizes.redrawn else "the logits stay equal to 1e-5",
        is_exact=not sizes.redrawn,
        notes=(note,),
    )


def _sizes_of(model: ModelConfig, words: Mapping[str, str]) -> _Sizes:
    given = words.get("mixture", "")
    numbers = given.split("/")
    if len(numbers) != 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise ConfigError(
            "write mixture=E/G, E experts that are copies of feed-forwards cut "
            "into G parts, for example mixture=8/4"
        )
    if model.experts is not None:
        raise ConfigError(
            "the model's feed-forwards have experts already; split=2 makes them finer, and experts=x2 "
            "makes more of them"
        )
    num_experts, parts = map(int, numbers)
    width = model.feed_forward.d_feed_forward
    if width % parts or num_experts % parts:
        most = min(width, num_experts)
        fitting = [n for n in range(1, most + 1) if width % n == num_experts % n == 0]
        raise ConfigError(
            f"G must divide the {num_experts} experts and the {width} hidden units "
            f"of a feed-forward; choose G = {_any(fitting)}"
        )
    top_k, d_expert = _top_k(words, num_experts, parts), width // parts
    return _Sizes(num_experts, parts, top_k, d_expert, _redrawn(words, d_expert))


def _top_k(words: Mapping[str, str], num_experts: int, parts: int) -> int:
    """Returns K. One expert alone would have the gate weight 1, which teaches the router nothing."""
    given = words.get("top", str(2 if parts == 1 else parts))
    fitting = [n for n in range(parts, num_experts + 1, parts) if n > 1]
    if not _NUMBER.fullmatch(given) or int(given) not in fitting:
        advice = f"top={_any(fitting)}" if fitting else "more experts, for example mixture=8/1"
        raise ConfigError(
            f"a token takes whole copies of {parts} experts, at least two experts and at most "
            f"{num_experts}; choose {advice}"
        )
    return int(given)


def _redrawn(words: Mapping[str, str], d_expert: int) -> int:
    given = words.get("drop")
    if given is None:
        return 0
    redrawn = round(float(given) * d_expert) if re.fullmatch(r"0?\.\d+", given) else 0
    if "exact" in words or not 0 < redrawn < d_expert:
        raise ConfigError(
            f"drop is the share of each expert's {d_expert} hidden units that are redrawn, above 0 and "
            "below 1, for example drop=0.5, and excludes exact"
        )
    return redrawn


def _any(numbers: list[int]) -> str:
    *first, last = map(str, numbers[:8])
    return f"{', '.join(first)} or {last}" if first else last


# Takes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """Locates one of a feed-forward's matrices, as a block of a dense weight and of a bank."""

    name: str  # of the bank
    source: str
    dim: int  # of the bank that counts hidden units; in the dense weight it is 2 - dim
    first: int  # hidden unit in the bank
    source_first: int
    factor: float
    mean: float = 0.0  # of its weights, if some are redrawn, and their deviation
    std: float = 0.0

    def take(
        self, expert: int, units: range, part_first: int, width: int, seed: int | None
    ) -> Take:
        """Returns hidden units of an expert: a copy, or with a seed redrawn."""
        start, sizes, at = [expert, 0, 0], [1, width, width], [0, 0]
        start[self.dim], sizes[self.dim] = self.first + units.start, len(units)
        region = self.name, tuple(start), tuple(sizes)
        if seed is not None:
            mean, std = self.factor * self.mean, self.factor * self.std
            return Take(*region, plus=mean, std=std, seed=seed)
        at[2 - self.dim] = self.source_first + part_first + units.start
        return Take(*region, self.source, tuple(at), axes=(2, 1), factor=self.factor)


def _layer_takes(model: ModelConfig, sizes: _Sizes, given: Given, layer: int) -> Iterator[Take]:
    """Yields the router and the experts of one layer."""
    path, width = f"group.{layer}.feed_forward.", model.d_model
    std = getattr(model.initialisation, "std", _ROUTER_STD)
    matrices = _matrices(model, sizes, given, path)
    for expert in range(sizes.num_experts):
        copy, part = divmod(expert, sizes.parts)
        first, row = part * sizes.d_expert, _seed(given, copy)  # a copy's rows are equal
        yield Take(f"{path}router.weight", (expert, 0), (1, width), std=std, seed=row)
        for units, is_redrawn in _runs(sizes, copy):
            for number, matrix in enumerate(matrices):
                seed = _seed(given, expert, units.start, number) if is_redrawn else None
                yield matrix.take(expert, units, first, width, seed)
        if model.feed_forward.dense_bias:
            bank, size = f"{path}sparse.experts.", (1, sizes.d_expert)
            for up in matrices[:-1]:
                start, at = (expert, up.first), (up.source_first + first,)
                yield Take(f"{bank}b_up", start, size, f"{path}up.bias", at, (1,))
            # a token's gates sum to 1, so every expert has the whole output bias
            yield Take(f"{bank}b_down", (expert, 0), (1, width), f"{path}down.bias", (0,), (1,))


def _matrices(model: ModelConfig, sizes: _Sizes, given: Given, path: str) -> list[_Matrix]:
    """Returns gate and content, or only the latter, and last the output's."""
    width, bank = model.feed_forward.d_feed_forward, f"{path}sparse.experts."
    up, down = f"{path}up.weight", f"{path}down.weight"
    found = [
        _Matrix(f"{bank}w_up", up, 2, half * sizes.d_expert, half * width, 1.0)
        for half in range(columns_of(1, model.feed_forward.activation))
    ]
    found.append(_Matrix(f"{bank}w_down", down, 1, 0, 0, float(sizes.parts)))
    for number, each in enumerate(found if sizes.redrawn else ()):
        weight = given.tensor(each.source).narrow(2 - each.dim, each.source_first, width)
        std, mean = torch.std_mean(weight.double())
        found[number] = replace(each, mean=mean.item(), std=std.item())
    return found


def _runs(sizes: _Sizes, copy: int) -> Iterator[tuple[range, bool]]:
    """Yields runs of the hidden units of a copy's experts, and whether they are redrawn."""
    width = sizes.d_expert
    first = copy * width // (sizes.num_experts // sizes.parts)
    end = first + sizes.redrawn
    around = max(0, end - width)  # the window goes on at the start
    ends = (range(around), True), (range(around, first), False)
    ends += (range(first, min(end, width)), True), (range(end, width), False)
    yield from ((units, is_redrawn) for units, is_redrawn in ends if units)


def _seed(given: Given, *place: int) -> int:
    return int(blake2b(repr((given.seed, *place)).encode())[:12], 16)


def _new_norms(model: ModelConfig, grown: ModelConfig) -> Iterator[Take]:
    """Yields the norms that routers read under peri-layernorm, which dense layers lack."""
    before = shapes_of(model)
    for name, shape in shapes_of(grown).items():
        if name not in before and name.endswith(("_norm.weight", "_norm.bias")):
            yield Take(name, (0,) * len(shape), shape, plus=float(name.endswith("weight")))
