"""The published schedule at its published points."""

import pytest

from moebius.train.config.schedule import learning_rate_at, schedule_notes
from moebius.train.optim import OptimConfig
from moebius.train.recipes.smoke import RECIPES


def test_the_published_rates() -> None:
    config = OptimConfig(warmup_steps=4000, decay_steps=100_000)
    expected = {0: 6.25e-8, 3999: 2.5e-4, 4000: 2.5e-4, 54000: 1.375e-4, 99999: 2.5888e-5}
    for step, rate in expected.items():
        assert learning_rate_at(config, step) == pytest.approx(rate, rel=1e-4), step


def test_without_warmup_it_starts_at_the_peak_and_never_falls_below_the_floor() -> None:
    config = OptimConfig(learning_rate=1e-3, decay_steps=10)
    rates = [learning_rate_at(config, step) for step in range(30)]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)


def test_the_cosine_ends_with_the_run_unless_a_recipe_means_a_number() -> None:
    for name, build in RECIPES.items():
        config = build()
        optim = config.optim.over(config.train.steps)
        last = learning_rate_at(optim, config.train.steps - 1) / optim.learning_rate
        assert last == pytest.approx(optim.final_fraction, rel=0.04), name
        assert not schedule_notes(config.optim, config.train.steps), name
    smoke = RECIPES["smoke"]().optim
    rates = [learning_rate_at(smoke.over(300), step) for step in range(20, 300)]
    assert len(set(rates)) == len(rates)
    large = RECIPES["moeut_244m"]().optim
    assert large.over(100_000) == large.over(50_000)
    assert (large.warmup_steps, large.decay_steps) == (4000, 100_000)


def test_a_cosine_that_does_not_end_with_the_run_is_told_in_one_line() -> None:
    optim = OptimConfig(learning_rate=1e-3, warmup_steps=20)
    early = optim.model_copy(update={"decay_steps": 160})
    assert schedule_notes(early, 300) == [
        "optim.decay_steps=160 ends the cosine at step 180, and train.steps=300: the last step's "
        "rate is 0.0001; optim.decay_steps=none ends it with the run"
    ]
    assert "the last step's rate is 0.000929;" in schedule_notes(early, 50)[0]
    assert schedule_notes(optim, 10) == [
        "optim.warmup_steps=20 is more than train.steps=10: the last step's rate is 0.0005"
    ]
    assert "set optim.decay_steps=140" in schedule_notes(optim, 300, 160)[0]
    own = early.model_copy(update={"schedule": "mine:constant"})
    for quiet in (
        schedule_notes(early, 180),
        schedule_notes(optim, 160, 160),
        schedule_notes(own, 9),
    ):
        assert not quiet
