"""The fit of φ against made-up losses, and that the arms of the loop comparisons are equal."""

import json
import math

import numpy as np
import pytest

from moebius_science.compare.results import RunResult
from moebius_science.loops.fit import fit
from moebius_science.loops.study import kept_experts, measures_of
from moebius_science.loops.tasks import RATES, TASKS, TaskStudy, steps_of

LOOPS = np.array([1, 2, 4] * 3)
LAYER = np.repeat([12e3, 28e3, 77e3], 3)  # parameters of one layer, three sizes


def made_up(phi: float, noise: float, seed: int) -> np.ndarray:
    """Returns losses of nine arms with five seeds; a seed also shifts all arms together."""
    random = np.random.default_rng(seed)
    mean_A = 2.0 + 60.0 * (2 * LAYER + LOOPS**phi * 4 / LOOPS * LAYER) ** -0.35
    shift_S = random.normal(0, 0.05, 5)
    return mean_A[:, None] + shift_S + random.normal(0, noise, (9, 5))


@pytest.mark.parametrize("phi", [0.0, 0.46, 1.0])
def test_fit_returns_the_exponent_of_losses_without_noise(phi):
    found = fit(LAYER, LOOPS, made_up(phi, 0.0, 0), draws=10)
    assert found.phi == pytest.approx(phi, abs=0.03)
    assert found.alpha == pytest.approx(0.35, rel=0.1)
    assert found.misfit < 1e-3


def test_interval_covers_as_often_as_it_says():
    """A 95 % interval covers fewer than 34 of 40 with a probability of 1 in 300."""
    fits = [fit(LAYER, LOOPS, made_up(0.46, 0.01, seed), draws=200) for seed in range(40)]
    assert sum(low <= 0.46 <= high for low, high in (each.interval for each in fits)) >= 34
    widths = [high - low for low, high in (each.interval for each in fits)]
    assert 0.02 < np.median(widths) < 1.0


def test_interval_is_wide_where_losses_are_noise():
    found = fit(LAYER, LOOPS, made_up(0.46, 0.3, 1), draws=400)
    low, high = found.interval
    assert high - low > 1.0


def test_fit_refuses_too_few_arms():
    with pytest.raises(ValueError, match="3 arms with 5 seeds"):
        fit(LAYER[:3], LOOPS[:3], made_up(0.46, 0.01, 0)[:3])


@pytest.mark.parametrize(("task", "fewer"), [("p_hop", 0.0), ("permutation_words", 0.0107)])
def test_arms_on_tasks_are_as_equal_as_the_protocol_says(task, fewer, tmp_path):
    assert task in TASKS
    study = TaskStudy(task, tmp_path, (), 1)
    arms = {arm.name: arm.size for arm in study.sweep()[RATES[0]].arms}
    fixed = arms.pop("fixed")
    flops = arms.pop("dense_flops").flops.forward
    assert flops == pytest.approx(
        (1 - fewer) * fixed.flops.forward, rel=0.01 if not fewer else 1e-3
    )
    for size in arms.values():
        assert size.parameters.total == pytest.approx(fixed.parameters.total, rel=0.01)


def test_steps_are_of_the_first_evaluation_at_the_threshold():
    def run(seed: int, *losses: float) -> RunResult:
        curve = [(50 * index, loss) for index, loss in enumerate(losses)]
        return RunResult("fixed", seed, 100, losses[-1], curve, 0.1, 1.0, {}, ("c",))

    found = steps_of("fixed", [run(0, 5.0, 0.2, 0.3), run(1, 5.0, 1.0, 0.21)])
    assert found.by_seed == {0: 50, 1: None}
    assert found.doublings == {0: math.log2(50), 1: math.log2(100)}


def test_kept_experts_are_means_over_the_last_tenth_of_steps_and_over_seeds(tmp_path):
    for seed, last in enumerate((0.5, 0.7)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        shares = [0.1] * 9 + [last]  # only the last of ten counts
        losses = [{"kept_experts/2": share, "routing_divergence/2": 0.02} for share in shares]
        lines = [
            {"kind": "train", "time": 1.0, "step": step, "loss": 1.0, "auxiliary_losses": each}
            for step, each in enumerate(losses)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measures = [measures_of(tmp_path / str(seed)) for seed in (0, 1)]
    found = kept_experts([("looped", 3, measures), ("dense", 1, [{}, {}])]).rows
    assert [(*row[:4], row[5]) for row in found] == [("looped", "2", "2", "0.600", "0.0200")]
