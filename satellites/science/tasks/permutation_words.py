"""Words over a permutation group: predict the product of all elements so far, at every position.

A model that keeps a state, one element at a time, is correct at any length. If the group is not
solvable, a model of fixed depth cannot be correct at all lengths (Barrington 1989: such word
problems are complete for NC¹), unless its depth grows with the length, as with more loops.

Source: Merrill, Petty, Sabharwal, "The illusion of state in state-space models" (arXiv 2404.08819),
section 5: words of A5, S5 and of the abelian Z60, with all elements as symbols, a label at every
position, and how many layers a length needs. Barrington, "Bounded-width polynomial-size branching
programs recognize exactly those languages in NC¹", JCSS 38 (1989).

    prompt   start p_01234                 the identity, which is not learned
    answer   p_10234 p_10234 p_02134 … end pairs of an element and the product up to it

Use `data.targets="paired"`: a document is 2·(length + 2) tokens with its own end. An element is
written as the images of 0 … n−1; a product applies the element to the left first. S3, S4 and Z60
are solvable, so a model of fixed depth can learn all lengths in principle.

Chance: from the first element on, 1 / (number of elements). No test word equals a training word;
longer words are out of distribution.
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import permutations

import numpy as np

from .draw import NUM_SPLITS, Record, check_sizes, draw_held_out, draw_train

_CHUNK = 256
_CYCLIC = 60
_SIZES = {"s3": 3, "s4": 4, "a4": 4, "s5": 5, "a5": 5, "z60": _CYCLIC}
"""The groups, and on how many points they act."""

Permutation = tuple[int, ...]


def words(*, group: str = "a5") -> list[str]:
    """Returns the task's words: the group's elements, "start", "end"."""
    return [*map(name_of, elements(group)), "start", "end"]


def train(
    split_index: int,
    num_splits: int,
    *,
    sequences: int = 100_000,
    length: int = 16,
    group: str = "a5",
    seed: int = 0,
) -> Iterator[Record]:
    """Yields training words of independent, uniform elements.

    Raises:
        ValueError: the group is unknown, or the length makes no task.
    """
    chunk = partial(_chunk, length=length, group=group)
    yield from draw_train(
        chunk, sequences, seed=seed, split_index=split_index, num_splits=num_splits
    )


train.num_splits = NUM_SPLITS  # type: ignore[attr-defined]


def held_out(
    *, sequences: int = 1000, length: int = 16, group: str = "a5", seed: int = 0
) -> Iterator[Record]:
    """Yields test words, like `train`.

    Raises:
        ValueError: the group is unknown, or the length makes no task.
    """
    yield from draw_held_out(partial(_chunk, length=length, group=group), sequences, seed=seed)


@cache
def elements(group: str) -> tuple[Permutation, ...]:
    """Returns the elements of a group as permutations, the identity first.

    Raises:
        ValueError: the group is unknown.
    """
    if group not in _SIZES:
        raise ValueError(f"group={group!r} must be one of {', '.join(_SIZES)}")
    points = range(_SIZES[group])
    if group == "z60":
        return tuple(tuple((point + turn) % _CYCLIC for point in points) for turn in points)
    found = permutations(points)
    return tuple(one for one in found if group[0] == "s" or _is_even(one))


def name_of(element: Permutation) -> str:
    """Returns an element's word: its images, or its rotation for Z60."""
    return f"z_{element[0]}" if len(element) == _CYCLIC else f"p_{''.join(map(str, element))}"


def _is_even(element: Permutation) -> bool:
    pairs = [(a, b) for place, a in enumerate(element) for b in element[place + 1 :]]
    return sum(a > b for a, b in pairs) % 2 == 0


@cache
def _names(group: str) -> list[str]:
    return [name_of(element) for element in elements(group)]


@cache
def _table(group: str) -> np.ndarray:
    """Returns the product table of element numbers; the row's element is applied first."""
    found = elements(group)
    number = {element: index for index, element in enumerate(found)}
    return np.array(
        [[number[tuple(then[point] for point in first)] for then in found] for first in found]
    )


def _chunk(rng: np.random.Generator, *, length: int, group: str) -> Iterator[tuple[str, Record]]:
    check_sizes(length=(length, 1, 2**20))
    names, table = _names(group), _table(group)
    given_BS = rng.integers(len(names), size=(_CHUNK, length))
    product_B = np.zeros(_CHUNK, dtype=np.int64)  # the identity
    products_BS = np.empty_like(given_BS)
    for place in range(length):
        product_B = table[product_B, given_BS[:, place]]
        products_BS[:, place] = product_B
    for given, products in zip(given_BS.tolist(), products_BS.tolist(), strict=True):
        pairs = (f"{names[a]} {names[b]}" for a, b in zip(given, products, strict=True))
        answer = f" {' '.join(pairs)} end"
        question = " ".join(names[a] for a in given)
        yield question, {"prompt": f"start {names[0]}", "answer": answer}
