"""Covers every pair of values of several factors with few combinations.

Three factors of ten values have a thousand combinations, but almost every bug needs only one value
or a pair. So `make test` covers all pairs, `make test-all` a third of the other combinations too, and
`make nightly` the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, cycle, product
from typing import Any

import pytest


def every_pair(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations of one value per factor that cover all pairs of values of two factors.

    Greedy and deterministic: the combination with most new pairs comes next, the first of equals.
    """
    left = {chosen: set(combinations(enumerate(chosen), 2)) for chosen in product(*factors)}
    wanted = set().union(*left.values())
    found = []
    while wanted:
        best = max(left, key=lambda combination: len(left[combination] & wanted))
        wanted -= left.pop(best)
        found.append(best)
    return [chosen for chosen in product(*factors) if chosen in found]


def parametrize_pairs(
    factors: Mapping[str | tuple[str, ...], Iterable[Any]],
) -> pytest.MarkDecorator:
    """Parametrizes a test with the factors' full product, all but `every_pair` marked slow or nightly.

    A key that is a tuple of names takes values with as many parts: tuples, or `pytest.param`s.
    """
    values = [[_as_param(value) for value in column] for column in factors.values()]
    places = [range(len(column)) for column in values]
    quick = every_pair(*places)
    params, seldom = [], cycle((pytest.mark.nightly, pytest.mark.slow, pytest.mark.nightly))
    for place in product(*places):
        combination = [column[number] for column, number in zip(values, place, strict=True)]
        marks = () if place in quick else (next(seldom),)
        flat = [part for param in combination for part in param.values]
        name = "-".join(str(param.id) for param in combination)
        params.append(pytest.param(*flat, marks=marks, id=name))
    names = [name for key in factors for name in ((key,) if isinstance(key, str) else key)]
    return pytest.mark.parametrize(names, params)


def _as_param(value: Any) -> Any:
    """Returns a value as pytest keeps it, with an id. `ParameterSet` has no public name."""
    if hasattr(value, "marks"):
        return value
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), id=str(value))


def slow_but(every: Iterable[Any], *fast: Any, names: int = 1) -> list[Any]:
    """Marks all values slow except those in `fast`.

    With several `names` a value is a tuple with as many parts.
    """
    values = list(every)
    assert set(fast) <= set(values), set(fast) - set(values)
    return [
        value if value in fast else pytest.param(*_parts(value, names), marks=pytest.mark.slow)
        for value in values
    ]


def _parts(value: Any, names: int) -> tuple[Any, ...]:
    return value if names > 1 else (value,)
