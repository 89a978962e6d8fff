"""Makes two arms equal in parameters, or in the FLOPs of a whole training run.

One whole-number field of an arm is scaled until the arm is as large as the target: the number of
experts, their width, the dense width, or the steps. Size grows with such a field, so bisection
finds its value without allocating anything.
"""

from collections.abc import Callable

import moebius

from .file import CompareError, Match

_LARGEST = 1 << 30  # of a field that is scaled


def matched_size(config: moebius.Config, match: Match) -> float:
    """Returns the number to match: parameters, or training FLOPs of the whole run."""
    size = moebius.size_of(config)
    return size.parameters.total if match == "parameters" else size.training_flops


def fit(
    build: Callable[[int], moebius.Config],
    start: int,
    *,
    match: Match,
    target: float,
    multiple: int = 1,
) -> int:
    """Returns the value of a field whose arm comes closest to the target.

    Args:
        build: makes the arm with a value of the field.
        start: the arm's own value, which is valid.
        match: what must be equal.
        target: its value.
        multiple: the value must be a multiple of it.

    Raises:
        ConfigError: not even the values next to the best one can be built.
        CompareError: the size does not grow with the field.
    """
    sizes: dict[int, float] = {}

    def size(number: int) -> float | None:
        """Returns the size with that many multiples; None if there is no such arm."""
        if number not in sizes:
            try:
                sizes[number] = matched_size(build(number * multiple), match)
            except moebius.ConfigError:
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
    return min(sizes, key=lambda number: abs(sizes[number] - target)) * multiple


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
