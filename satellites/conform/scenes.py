"""Defines the scenes: extreme rows and routes, the same on every rank and every machine.

Rows steer the routes. The kit sets the first columns of the router's weight to the identity and the
others to small numbers, so that a row's first columns are its logits: chosen experts get 1 to 2,
the others -1 to -2. The next column is a constant 1, which the router ignores until the diagnosis
uses it.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """Holds what scenes need to know about a layer."""

    width: int
    num_experts: int
    top_k: int
    steered: bool  # the kit sets the router's weight, or routes are given
    given: bool  # the layer is called with routes


@dataclass(frozen=True)
class Batch:
    """Holds the rows of all ranks in order; `counts` says how many each rank has."""

    x_TD: Floats
    experts_TK: Ints
    gates_TK: Floats
    gradient_TD: Floats  # of the output
    counts: tuple[int, ...]

    def rows_of(self, rank: int) -> slice:
        """Returns the place of a rank's rows."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


Choose = Callable[[np.random.Generator, int, Facts, int], Ints]


@dataclass(frozen=True)
class Scene:
    """Describes the ranks' numbers of rows (up to 4, then repeated), and the experts they choose."""

    name: str
    tokens: tuple[int, ...]
    choose: Choose
    spoil: bool = False  # one row is NaN
    redraw: bool = False  # all rows but rank 0's are drawn anew
    needs_steering: bool = False
    needs_given: bool = False
    seed: str = field(default="")


def _random(draw: np.random.Generator, count: int, facts: Facts, ranks: int) -> Ints:
    del ranks
    return draw.random((count, facts.num_experts)).argsort(-1)[:, : facts.top_k]


def _first(draw: np.random.Generator, count: int, facts: Facts, ranks: int) -> Ints:
    """Chooses the same experts for all rows, so that expert 0 gets every row."""
    del draw, ranks
    return np.tile(np.arange(facts.top_k), (count, 1))


def _last_rank(draw: np.random.Generator, count: int, facts: Facts, ranks: int) -> Ints:
    """Chooses experts of the last rank, as far as it has enough."""
    scores = draw.random((count, facts.num_experts))
    scores[:, facts.num_experts - facts.num_experts // ranks :] -= 1
    return scores.argsort(-1)[:, : facts.top_k]


def _not_first_rank(draw: np.random.Generator, count: int, facts: Facts, ranks: int) -> Ints:
    scores = draw.random((count, facts.num_experts))
    scores[:, : facts.num_experts // ranks] += 1
    return scores.argsort(-1)[:, : facts.top_k]


def _repeated(draw: np.random.Generator, count: int, facts: Facts, ranks: int) -> Ints:
    """Names one expert several times in every row."""
    return np.repeat(_random(draw, count, facts, ranks)[:, :1], facts.top_k, axis=1)


SCENES = {
    scene.name: scene
    for scene in (
        Scene("even", (8, 8, 8, 8), _random),
        Scene("uneven", (5, 17, 1, 9), _random),
        Scene("other samples elsewhere", (5, 17, 1, 9), _random, redraw=True, seed="uneven"),
        Scene("a rank without tokens", (6, 0, 5, 3), _random),
        Scene("only one rank has tokens", (0, 11, 0, 0), _random),
        Scene("one token in all", (0, 1, 0, 0), _random),
        Scene("no token at all", (0, 0, 0, 0), _random),
        Scene("all to one expert", (6, 7, 4, 8), _first, needs_steering=True),
        Scene("all to the last rank", (6, 7, 4, 8), _last_rank, needs_steering=True),
        Scene("nothing for rank 0", (6, 7, 4, 8), _not_first_rank, needs_steering=True),
        Scene("repeated experts", (6, 7, 4, 8), _repeated, needs_given=True),
        Scene("NaN in one token", (6, 7, 4, 8), _random, spoil=True),
    )
}


def fitting(facts: Facts) -> list[Scene]:
    """Returns the scenes that can be played with such a layer."""
    return [
        scene
        for scene in SCENES.values()
        if (facts.steered or not scene.needs_steering) and (facts.given or not scene.needs_given)
    ]


def batch(scene: Scene, ranks: int, facts: Facts) -> Batch:
    """Returns the rows of all ranks, drawn rank by rank so that a rank's rows depend only on it."""
    counts = tuple(scene.tokens[rank % len(scene.tokens)] for rank in range(ranks))
    parts = [_rows(scene, rank, counts[rank], ranks, facts) for rank in range(ranks)]
    x_TD, experts_TK, gates_TK, gradient_TD = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    if scene.spoil and len(x_TD):
        x_TD[spoiled_row(counts)] = np.nan
    return Batch(x_TD, experts_TK, gates_TK, gradient_TD, counts)


def spoiled_row(counts: tuple[int, ...]) -> int:
    """Returns the second row of the last rank."""
    return sum(counts[:-1]) + min(1, counts[-1] - 1)


def _rows(
    scene: Scene, rank: int, count: int, ranks: int, facts: Facts
) -> tuple[Floats, Ints, Floats, Floats]:
    anew = "again" if scene.redraw and rank > 0 else ""
    seed = zlib.crc32(f"{scene.seed or scene.name}/{rank}{anew}".encode())
    draw = np.random.default_rng(seed)
    x_TD = draw.standard_normal((count, facts.width))
    experts_TK = scene.choose(draw, count, facts, ranks)
    gates_TK = draw.uniform(0.2, 1.0, (count, facts.top_k))
    gradient_TD = draw.standard_normal((count, facts.width))
    if facts.steered and not facts.given:
        logits_TE = draw.uniform(-2.0, -1.0, (count, facts.num_experts))
        np.put_along_axis(logits_TE, experts_TK, draw.uniform(1.0, 2.0, experts_TK.shape), axis=1)
        x_TD[:, : facts.num_experts] = logits_TE
        x_TD[:, facts.num_experts] = 1.0
    return x_TD, experts_TK.astype(np.int64), gates_TK, gradient_TD
