"""Addition of k operands: more operands in the test than in training need more steps, not more
knowledge.

Source: Saunshi et al., "Reasoning with latent thoughts" (arXiv 2502.17416), section 2.1: up to 32
numbers of three digits, for looped models against models with as many different layers.

    prompt   3 1 5 + 1 2 0 + 8 2 4 =
    answer   1 2 5 9                       without leading zeros

Each operand has `digits` digits, including leading zeros, uniform and independent. An item of k
operands has a prompt of k·(digits + 1) tokens. Use `data.targets="next"` and, since lengths differ,
`data.packing="best_fit"` with `data.document_attention=true`.

Chance: for k operands of d digits the likeliest sum has a probability of about 1 / (10^d ·
√(2πk/12)) for large k; a model that is right more often has learned something. No test item has the
operands of a training item in the same order.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from .draw import NUM_SPLITS, Record, check_sizes, draw_held_out, draw_train

_CHUNK = 256


def words() -> list[str]:
    """Returns the task's words: digits, "+" and "="."""
    return [*"0123456789", "+", "="]


def train(
    split_index: int,
    num_splits: int,
    *,
    sums: int = 100_000,
    operands: str | int = "2,4,8,16,32",
    digits: int = 3,
    seed: int = 0,
) -> Iterator[Record]:
    """Yields training sums.

    Args:
        split_index: number of the split.
        num_splits: number of splits.
        sums: of all splits together.
        operands: possible numbers of operands, separated by commas.
        digits: of each number.
        seed: of the draws.

    Raises:
        ValueError: a size makes no task.
    """
    chunk = partial(_chunk, operands=_numbers(operands), digits=digits)
    yield from draw_train(chunk, sums, seed=seed, split_index=split_index, num_splits=num_splits)


train.num_splits = NUM_SPLITS  # type: ignore[attr-defined]


def held_out(
    *, sums: int = 1000, operands: str | int = 8, digits: int = 3, seed: int = 0
) -> Iterator[Record]:
    """Yields test sums; sizes as for `train`.

    Raises:
        ValueError: a size makes no task.
    """
    yield from draw_held_out(
        partial(_chunk, operands=_numbers(operands), digits=digits), sums, seed=seed
    )


def _numbers(text: str | int) -> list[int]:
    try:
        found = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"operands={text!r}: write whole numbers such as 2,4,8") from None
    for number in found:
        check_sizes(operands=(number, 2, 1024))
    return found


def _chunk(
    rng: np.random.Generator, *, operands: list[int], digits: int
) -> Iterator[tuple[str, Record]]:
    check_sizes(digits=(digits, 1, 15))
    for count in rng.choice(operands, size=_CHUNK).tolist():
        numbers = rng.integers(10**digits, size=count).tolist()
        spelled = (" ".join(f"{number:0{digits}d}") for number in numbers)
        prompt = f"{' + '.join(spelled)} ="
        yield prompt, {"prompt": prompt, "answer": f" {' '.join(str(sum(numbers)))}"}
