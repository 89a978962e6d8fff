"""Adds a source of text from one file: made-up text whose lowest possible loss is known.

    cd examples && python add_a_source.py        # one run on 2 ranks, and add_a_source.png

A document walks over the letters of the alphabet. With probability `stay` the next letter is the one
after this one, and otherwise any of the 26. So a perfect model has the loss `entropy(stay)`, and the
picture shows how far a run still is from it.
"""

import math
import random
from collections.abc import Iterator

import matplotlib.pyplot as plt

import moebius

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def walks(
    split_index: int, num_splits: int, *, stay: float = 0.8, documents: int = 2000
) -> Iterator[str]:
    """Yields the documents of one split; the same split always yields the same documents."""
    for number in range(split_index, documents, num_splits):
        chance = random.Random(number)
        place, text = chance.randrange(26), ""
        for _ in range(255):
            text += LETTERS[place]
            follows = chance.random() < stay
            place = (place + 1) % 26 if follows else chance.randrange(26)
        yield text


# Read by up to so many workers, in any process.
walks.num_splits = 8  # pyright: ignore[reportFunctionMemberAccess]


def entropy(stay: float) -> float:
    """Returns the entropy of the next letter, in nats."""
    other = (1 - stay) / 26
    return -(stay + other) * math.log(stay + other) - 25 * other * math.log(other)


def main(stay: float = 0.8) -> None:
    """Trains on the walks, and draws the loss above the lowest possible one."""
    source = f"prepare.input=python:add_a_source:walks?stay={stay}"
    moebius.fit(moebius.recipe("small.toml", source), "runs/walks")
    steps = [r for r in moebius.history("runs/walks").records() if r["kind"] == "train"]
    print(f"loss {steps[-1]['loss']:.3f}, at best {entropy(stay):.3f} nats per letter")
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    axis.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="training loss")
    axis.axhline(entropy(stay), color="black", linestyle="--", label="entropy of the source")
    axis.set(xlabel="step", ylabel="nats per letter", ylim=(0, None))
    axis.legend()
    figure.savefig("add_a_source.png", dpi=120)


if __name__ == "__main__":
    main()
