"""How many loops a step makes is drawn from the seed and the step, equal on all ranks, and around R."""

import math
from statistics import fmean
from typing import Any

import pytest

from moebius.model.config.loops_config import DepthConfig
from moebius.model.loops.depth import depths_of_step, loops_of
from moebius.train.recipes.family import FAMILY

STEPS = 20_000


def drawn(kind: str, mean: int, *, steps: int = STEPS, **given: Any) -> list[int]:
    depth = DepthConfig.model_validate({"kind": kind, **given})
    return [loops_of(depth, mean, 7, step, 0) for step in range(steps)]


@pytest.mark.parametrize("mean", [1, 4, 32])
def test_poisson_has_its_distribution(mean):
    found = drawn("poisson", mean)
    for count in (1, mean, mean + 2):
        expected = math.exp(-mean) * mean**count / math.factorial(count)
        expected += math.exp(-mean) * (count == 1)  # no loop at all is made one
        assert found.count(count) / STEPS == pytest.approx(expected, abs=0.015)


def test_lognormal_poisson_has_the_mean_and_spread_of_huginn():
    found = drawn("lognormal_poisson", 32)
    assert fmean(found) == pytest.approx(33, rel=0.02)  # 1 + E τ
    variance = fmean((each - 33) ** 2 for each in found)
    assert variance == pytest.approx(32 + 32**2 * (math.exp(0.25) - 1), rel=0.06)
    assert min(found) >= 1


def test_uniform_list_fixed_and_growing():
    found = drawn("uniform", 4, values=(2, 5))
    assert set(found) == {2, 3, 4, 5}
    for loops in set(found):
        assert found.count(loops) / STEPS == pytest.approx(0.25, abs=0.02)
    assert set(drawn("list", 4, values=(1, 4, 9))) == {1, 4, 9}
    assert set(drawn("fixed", 4, steps=9)) == {4}
    assert drawn("growing", 4, steps=7, values=(1, 2, 4), stage_steps=2) == [1, 1, 2, 2, 4, 4, 4]


def test_a_draw_depends_on_seed_step_and_sequence_alone():
    depth = DepthConfig(kind="poisson", per="sequence")

    def numbers(seed: int, step: int) -> list[int]:
        return [loops_of(depth, 4, seed, step, sequence) for sequence in range(8)]

    # A recorded draw: another one would make a resumed run another run.
    assert numbers(7, 3) == [4, 2, 5, 5, 6, 6, 3, 6]
    assert numbers(7, 3) not in (numbers(8, 3), numbers(7, 4))


def test_the_sequences_of_a_step_have_the_same_depths_on_any_number_of_ranks():
    model = FAMILY["parcae_moe"][1]().model
    sizes = {"passes": 2, "rows": 4}
    by_rank = [depths_of_step(model, 0, 5, rank=rank, num_ranks=2, **sizes) for rank in (0, 1)]
    alone = depths_of_step(model, 0, 5, rank=0, num_ranks=1, passes=4, rows=4)
    both = [*by_rank[0], *by_rank[1]]
    assert [each.of_sequence for each in both] == [each.of_sequence for each in alone]
    for own, other in zip(*by_rank, strict=True):  # passes that ranks make together
        assert (own.num_loops, own.no_gradient) == (other.num_loops, other.no_gradient)
        assert own.num_loops >= max((own.of_sequence or ()) + (other.of_sequence or ()))
    every = [depth for each in alone for depth in each.of_sequence or ()]
    shares = [sum(depth >= loop for depth in every) / 16 for loop in range(1, max(every) + 1)]
    assert all(list(each.shares) == shares for each in (*alone, *both))
