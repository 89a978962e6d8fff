"""Shared by the tasks: seeded draws, and the split of all possible items into training and test.

A hash of the question assigns an item to its side, independently of where it was drawn. No test
item can therefore be in the training data, for any seeds, sizes and numbers of splits.
"""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

Record = dict[str, str]
"""The prompt and the answer of one item, as `prepare.prompt_field` and `prepare.answer_field` name them."""

PROMPT, ANSWER = "prompt", "answer"

NUM_SPLITS = 4
"""Parts of the training data that workers read independently of each other."""

_HELD_OUT = 16  # of 256 values of the hash
_FRUITLESS = 50  # chunks in a row without a new item: there are no more


def is_held_out(question: str) -> bool:
    """Tells whether an item is for testing, by a hash of its question; one in 16 is."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < _HELD_OUT


def share_of(count: int, split_index: int, num_splits: int) -> int:
    """Returns how many of `count` items a split yields."""
    return count // num_splits + (split_index < count % num_splits)


def draw_train(
    chunk: Callable[[np.random.Generator], Iterator[tuple[str, Record]]],
    count: int,
    *,
    seed: int,
    split_index: int,
    num_splits: int,
) -> Iterator[Record]:
    """Yields a split's share of `count` training items, possibly with duplicates.

    Args:
        chunk: draws some items, each a question (which decides the side) and its record.
        count: items of all splits together.
        seed: of the draws.
        split_index: number of the split.
        num_splits: number of splits.

    Raises:
        ValueError: every item is held out.
    """
    rng = np.random.default_rng([seed, 0, split_index, num_splits])
    wanted, fruitless = share_of(count, split_index, num_splits), 0
    while wanted > 0:
        fruitless += 1
        for question, record in chunk(rng):
            if not is_held_out(question) and wanted > 0:
                wanted, fruitless = wanted - 1, 0
                yield record
        _check_draws(fruitless, "training")


def draw_held_out(
    chunk: Callable[[np.random.Generator], Iterator[tuple[str, Record]]], count: int, *, seed: int
) -> Iterator[Record]:
    """Yields `count` test items with different questions.

    Raises:
        ValueError: there are fewer.
    """
    rng = np.random.default_rng([seed, 1])
    seen: set[str] = set()
    fruitless = 0
    while len(seen) < count:
        fruitless += 1
        for question, record in chunk(rng):
            if is_held_out(question) and question not in seen and len(seen) < count:
                seen.add(question)
                fruitless = 0
                yield record
        _check_draws(fruitless, f"test item number {len(seen) + 1}")


def check_sizes(**sizes: tuple[int, int, int]) -> None:
    """Checks that each value lies within its limits: name=(value, minimum, maximum).

    Raises:
        ValueError: a value does not.
    """
    for name, (value, least, most) in sizes.items():
        if not least <= value <= most:
            raise ValueError(f"{name}={value}: it must be from {least} to {most}")


def _check_draws(fruitless: int, what: str) -> None:
    if fruitless > _FRUITLESS:
        raise ValueError(
            f"no {what} item was found in {_FRUITLESS} draws: the task has too few different items; "
            "ask for fewer or for longer ones"
        )
