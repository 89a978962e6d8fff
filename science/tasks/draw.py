"""What the tasks share: seeded draws, and which of all possible items are kept for testing.

An item belongs to one side by a hash of what is asked, never by where it was drawn: so no test item
can be among the training data, whatever seeds, sizes and numbers of splits are chosen.
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
    """Returns whether an item is for testing, by a hash of its question: one of 16 is."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < _HELD_OUT


def share_of(count: int, split_index: int, num_splits: int) -> int:
    """Returns how many of `count` items a split gives."""
    return count // num_splits + (split_index < count % num_splits)


def draw_train(
    chunk: Callable[[np.random.Generator], Iterator[tuple[str, Record]]],
    count: int,
    *,
    seed: int,
    split_index: int,
    num_splits: int,
) -> Iterator[Record]:
    """Yields a split's share of `count` training items; some may be equal.

    Args:
        chunk: draws some items, each a question (what decides the side) and its record.
        count: of all splits together.
        seed: of the draws; another one gives other items.
        split_index: which split.
        num_splits: how many splits there are.

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
    """Yields `count` test items, no two with the same question.

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
    """Checks that each value lies within its limits: name=(value, least, most).

    Raises:
        ValueError: one does not.
    """
    for name, (value, least, most) in sizes.items():
        if not least <= value <= most:
            raise ValueError(f"{name}={value}: it must be from {least} to {most}")


def _check_draws(fruitless: int, what: str) -> None:
    if fruitless > _FRUITLESS:
        raise ValueError(
            f"no {what} item was found in {_FRUITLESS} draws: the task is too small for so many "
            "items, ask for fewer or for longer ones"
        )
