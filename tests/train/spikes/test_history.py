"""Which steps are spikes, and that a resumed run judges alike."""

import json
import math
import random
from typing import Any

import pytest

from moebius.distributed.checkpoint.checkpoint_folder import CheckpointConfig
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.config.train_config import SpikeConfig
from moebius.train.config.validation import validated
from moebius.train.spikes.history import SpikeDetector


def detector(**changes: Any) -> SpikeDetector:
    values = {"action": "rollback", "window": 16, "warmup_steps": 0}
    return SpikeDetector(SpikeConfig.model_validate(values | changes))


def noisy(number: int, seed: int = 0) -> list[tuple[float, float]]:
    """Returns slowly falling losses, and gradient norms with a long tail."""
    draw = random.Random(seed)
    return [
        (3.0 - step / 1000 + draw.gauss(0, 0.05), draw.lognormvariate(-1, 0.3))
        for step in range(number)
    ]


def test_ordinary_noise_is_no_spike() -> None:
    watch = detector(window=128)
    assert not any(watch.judge(step, *values) for step, values in enumerate(noisy(3000), start=1))


@pytest.mark.parametrize("spike", [(6.0, 0.4), (3.0, 20.0), (math.nan, 0.4), (3.0, math.inf)])
def test_a_large_loss_or_norm_is_one_and_does_not_raise_the_limits(
    spike: tuple[float, float],
) -> None:
    watch = detector()
    for step, values in enumerate(noisy(40), start=1):
        assert watch.judge(step, *values) is None
    first, second = watch.judge(41, *spike), watch.judge(42, *spike)
    assert first is not None
    assert second is not None
    assert (first.in_a_row, second.in_a_row) == (1, 2)
    assert first.loss_limit == second.loss_limit < 4.5
    assert watch.judge(43, 3.0, 0.4) is None


def test_a_loss_that_falls_is_none() -> None:
    watch = detector()
    assert not any(watch.judge(step, 10.0 * 0.9**step, 0.9**step) for step in range(1, 200))


def test_values_that_hardly_differ_are_not_held_to_their_own_noise() -> None:
    watch = detector()
    for step in range(1, 30):
        assert watch.judge(step, 2.0, 1.0) is None
    assert watch.judge(30, 2.1, 1.1) is None
    assert watch.judge(31, 2.2, 1.1) is not None  # 8 deviations of at least 1 %


def test_the_first_steps_are_not_judged() -> None:
    watch = detector(warmup_steps=20)
    for step in range(1, 20):
        assert watch.judge(step, 3.0, 1.0) is None
    assert watch.judge(20, math.nan, 1e9) is None
    assert watch.judge(21, 1e9, 1.0) is not None


def test_so_many_within_so_many_steps_are_enough() -> None:
    watch = detector(rollback_after=3, rollback_within=10)
    for step in range(1, 20):
        watch.judge(step, 3.0, 1.0)
    for step in (20, 25, 31):
        assert not watch.rollback_is_due
        assert watch.judge(step, 9.0, 1.0) is not None
    assert not watch.rollback_is_due  # the first has been too long ago
    watch.judge(34, 9.0, 1.0)
    assert watch.rollback_is_due
    assert watch.recent == (25, 31, 34)
    watch.forget_spikes()
    assert not watch.rollback_is_due


def test_a_policy_that_skips_never_goes_back() -> None:
    watch = detector(action="skip", rollback_after=1)
    assert watch.judge(1, math.nan, 1.0) is not None
    assert not watch.rollback_is_due


@pytest.mark.parametrize("stop", [5, 17, 33])
def test_a_resumed_run_judges_alike(stop: int) -> None:
    values = noisy(60, seed=stop)
    values[32] = values[33] = values[40] = (9.0, 9.0)
    whole, first = detector(), detector()
    expected = [whole.judge(step, *one) for step, one in enumerate(values, start=1)]
    found = [first.judge(step, *one) for step, one in enumerate(values[:stop], start=1)]
    second = detector()
    second.restore(json.loads(json.dumps(first.as_dict())))
    found += [second.judge(step, *one) for step, one in enumerate(values[stop:], start=stop + 1)]
    assert found == expected
    assert second.as_dict() == whole.as_dict()


def test_a_run_that_goes_back_keeps_a_checkpoint_that_is_old_enough() -> None:
    policy = {"action": "rollback", "rollback_within": 20, "rollback_steps": 100}
    values = Config().model_dump(mode="json")
    values["train"]["spikes"] = policy
    values["checkpoint"] = CheckpointConfig(every=40, keep_last=3).model_dump()
    with pytest.raises(ConfigError, match=r"119 steps old .* reaches back only 80"):
        validated(Config, values, origin="test")
    values["checkpoint"]["keep_last"] = 4
    assert validated(Config, values, origin="test").train.spikes.action == "rollback"
    values["train"]["spikes"] = policy | {"rollback_after": 21}
    with pytest.raises(ConfigError, match=r"rollback_after=21 spikes cannot happen within"):
        validated(Config, values, origin="test")
