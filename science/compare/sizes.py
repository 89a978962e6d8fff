"""What of two arms is equal: parameters, or the FLOPs of a whole training run; and how it is made so.

One whole-number field of an arm is scaled until the arm is as large as the target: the number of
experts, their width, the dense width, the steps. A size grows with such a field, so a bisection
finds its value; nothing is allocated (model/cost.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import Flops, Parameters, count_parameters, forward_flops
from moebius.train.config.run_config import Config, ConfigError

from .file import CompareError, Match

_LARGEST = 1 << 30  # of a field that is scaled


@dataclass(frozen=True)
class Size:
    """Counts what one run of an arm has and does."""

    parameters: Parameters
    flops: Flops  # of one token's forward pass
    tokens: int  # of the whole run

    @property
    def training_flops(self) -> float:
        """Returns the FLOPs of the whole run, forward and backward."""
        return self.flops.training * self.tokens


def size_of(config: Config) -> Size:
    """Counts a run, without allocating its model."""
    seq_len = config.data.seq_len
    tokens = config.train.steps * config.train.global_batch * seq_len
    return Size(_parameters(config.model, seq_len), forward_flops(config.model, seq_len), tokens)


@lru_cache(maxsize=256)
def _parameters_of(text: str, seq_len: int) -> Parameters:
    return count_parameters(ModelConfig.model_validate_json(text), seq_len)


def _parameters(model: ModelConfig, seq_len: int) -> Parameters:
    return _parameters_of(model.model_dump_json(), seq_len)


def matched_size(config: Config, match: Match) -> float:
    """Returns the number that is to be equal: parameters, or training FLOPs of the whole run."""
    size = size_of(config)
    return size.parameters.total if match == "parameters" else size.training_flops


@dataclass(frozen=True)
class Fit:
    """Says which value of the scaled field is the best, and how far it is off."""

    value: int
    size: float
    deviation: float  # (size − target) ÷ target


def fit(
    build: Callable[[int], Config],
    start: int,
    *,
    match: Match,
    target: float,
    multiple: int = 1,
) -> Fit:
    """Finds the value of a field whose arm comes nearest to the target.

    Args:
        build: makes the arm with a value of the field.
        start: the value that the arm has by itself, which is valid.
        match: what is to be equal.
        target: how much of it.
        multiple: the value is a multiple of it.

    Raises:
        ConfigError: not even the values beside the best one can be built.
        CompareError: the size does not grow with the field.
    """
    sizes: dict[int, float] = {}

    def size(number: int) -> float | None:
        """Returns the size with that many multiples; None: there is no such arm."""
        if number not in sizes:
            try:
                sizes[number] = matched_size(build(number * multiple), match)
            except ConfigError:
                return None
        return sizes[number]

    begin = max(1, round(start / multiple))
    low, high = _bracket(size, begin, target)
    while high - low > 1:
        middle = (low + high) // 2
        found = size(middle)
        is_small = middle < begin if found is None else found < target
        low, high = (middle, high) if is_small else (low, middle)
    for number in (low, high):
        size(number)
    if not sizes:
        build(begin * multiple)  # raises what is wrong with it
        raise CompareError("no value of the scaled field can be built")
    best = min(sizes, key=lambda number: abs(sizes[number] - target))
    return Fit(best * multiple, sizes[best], sizes[best] / target - 1)


def _bracket(size: Callable[[int], float | None], begin: int, target: float) -> tuple[int, int]:
    """Returns numbers of which the first makes the arm too small and the second large enough."""
    high = begin
    while high < _LARGEST and ((found := size(high)) is None or found < target):
        if found is None and high > begin:
            break
        high *= 2
    if high >= _LARGEST:
        raise CompareError("the size does not grow with it")
    return 0, high


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Returns a configuration's value under a dotted key; None where there is none."""
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found
