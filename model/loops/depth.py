"""How many loops a training step makes: fixed, growing, or drawn from the seed and the step alone.

Every rank draws the same numbers without a message. They come from a hash by inverse distribution
functions, so no version of a library changes them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ..config.loops_config import DepthConfig
from ..config.model_config import ModelConfig

_SIGMA = 0.5  # of the log-normal (Huginn)
_POINTS = 4096  # at which a distribution is measured
_MOST = 10_000  # loops; a probability that rounds to 1 would ask for more


@dataclass(frozen=True)
class PassDepth:
    """Holds the loops of one pass.

    Where every sequence has its own depth, the pass first makes the loops that keep no gradient, of
    all sequences, and then the others. A sequence takes part in as many of either as it needs.
    """

    num_loops: int  # of the pass, the same on all ranks
    no_gradient: int = 0  # of these, counted from the first
    of_sequence: tuple[int, ...] | None = None  # on this rank; None: all make `num_loops`
    kept: int | None = None  # loops of a sequence that have a gradient; None: all
    # Of the step's sequences that make each loop; (): as in the pass
    shares: tuple[float, ...] = ()

    def live(self, loop: int) -> list[int] | None:
        """Returns the sequences that take part in a loop of the pass; None: all."""
        if self.of_sequence is None:
            return None
        live = [index for index in range(len(self.of_sequence)) if self.place(loop, index) >= 0]
        return None if len(live) == len(self.of_sequence) else live

    def place(self, loop: int, sequence: int) -> int:
        """Returns which of its own loops a sequence makes in a loop of the pass; −1: none."""
        if self.of_sequence is None:
            return loop
        own = self.of_sequence[sequence]
        without = 0 if self.kept is None else max(0, own - self.kept)
        place = loop if loop < self.no_gradient else loop - self.no_gradient + without
        return place if place < (without if loop < self.no_gradient else own) else -1

    def places(self, loop: int, sequences: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns each sequence's own loop, and of how many; one of each stands for all."""
        if self.of_sequence is None:
            return [loop], [self.num_loops]
        own = [self.place(loop, sequence) for sequence in sequences]
        return own, [self.of_sequence[sequence] for sequence in sequences]


def own_depth(config: ModelConfig, num_loops: int | None = None) -> PassDepth:
    """Returns the same number of loops for all sequences; None: the model's own."""
    num_loops = config.num_repeats if num_loops is None else num_loops
    return PassDepth(num_loops, config.loops.depth.first_with_gradient(num_loops))


def depths_of_step(
    model: ModelConfig, seed: int, step: int, *, rank: int, num_ranks: int, passes: int, rows: int
) -> list[PassDepth]:
    """Returns the loops of each pass that a rank makes in a step.

    Args:
        model: gives R and the distribution.
        seed: `train.seed`.
        step: optimizer steps done.
        rank: of this process, of `num_ranks`.
        passes: micro-batches of a rank.
        rows: sequences of a micro-batch.
    """
    depth, mean, kept = model.loops.depth, model.num_repeats, model.loops.depth.gradient_loops
    if depth.per == "step":
        return [own_depth(model, loops_of(depth, mean, seed, step, 0))] * passes
    drawn = [
        loops_of(depth, mean, seed, step, sequence) for sequence in range(num_ranks * passes * rows)
    ]
    found, shares = [], shares_making(drawn)
    for index in range(passes):
        by_rank = [
            drawn[first * rows : (first + 1) * rows]
            for first in range(index, num_ranks * passes, passes)
        ]
        together = [each for own in by_rank for each in own]
        without = max(map(depth.first_with_gradient, together))
        with_gradient = max(each - depth.first_with_gradient(each) for each in together)
        own = tuple(by_rank[rank])
        found.append(PassDepth(without + with_gradient, without, own, kept, shares))
    return found


def shares_making(depths: Sequence[int]) -> tuple[float, ...]:
    """Returns the share of sequences that make each loop, from the first to the last one made."""
    return tuple(sum(depth > loop for depth in depths) / len(depths) for loop in range(max(depths)))


def loops_of(depth: DepthConfig, mean: int, seed: int, step: int, sequence: int) -> int:
    """Returns the loops of a step, or of one sequence in it; `mean` is the model's own R.

    "lognormal_poisson" is 1 + Poisson(τ), τ log-normal of mean R, and so has mean R + 1 (Huginn,
    arXiv 2502.05171, §3.3); "poisson" is max(1, Poisson(R)) (Parcae, arXiv 2604.12946).
    """
    if depth.kind == "growing":
        return depth.values[min(step // depth.stage_steps, len(depth.values) - 1)]
    return _drawn(depth, mean, *_uniform(f"{seed}/{step}/{sequence}/loops"))


def shares_of_depths(depth: DepthConfig, mean: int) -> dict[int, float]:
    """Returns each number of loops, and how often training makes it; "growing" counts as R."""
    if depth.kind in ("fixed", "growing"):
        return {mean: 1.0}
    golden = (math.sqrt(5) - 1) / 2  # spreads the second number evenly beside the first
    found = Counter(
        _drawn(depth, mean, (index + 0.5) / _POINTS, (index * golden + 0.5) % 1)
        for index in range(_POINTS)
    )
    return {loops: count / _POINTS for loops, count in found.items()}


def _drawn(depth: DepthConfig, mean: int, first: float, second: float) -> int:
    """Returns the loops that belong to two numbers in (0, 1)."""
    if depth.kind == "fixed":
        return mean
    if depth.values:
        return depth.reached[int(first * len(depth.reached))]
    if depth.kind == "poisson":
        return max(1, _poisson(first, mean))
    normal = NormalDist(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return 1 + _poisson(first, math.exp(normal.inv_cdf(second)))


def _uniform(key: str) -> tuple[float, float]:
    """Returns two numbers in (0, 1) that depend on the key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    halves = (digest[:8], digest[8:])
    first, second = ((int.from_bytes(half, "little") >> 12) + 0.5 for half in halves)
    return first / 2**52, second / 2**52


def _poisson(uniform: float, mean: float) -> int:
    """Returns the smallest n whose cumulative probability is above `uniform`."""
    count, log_probability, cumulative = 0, -mean, 0.0
    while count < _MOST:
        cumulative += math.exp(log_probability)
        if cumulative > uniform:
            break
        count += 1
        log_probability += math.log(mean / count)
    return count
