"""Which steps are spikes, what a run does without them, and that a resumed run judges alike."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from made_folder import MadeFolder, documents
from pairwise import slow_but
from parts import make_config
from trained import column, lines
from world import RankFailed, run_ranks

from moebius.train import loop
from moebius.train import run as run_module
from moebius.train.config.run_config import Config
from moebius.train.metrics.spikes import NOT_FINITE, SPIKE, SkipPolicy, Spike

BATCH, STEPS = 8, 10
POISON = range(5 * BATCH, 7 * BATCH)  # the samples of steps 6 and 7


def judged(judge: SkipPolicy, loss: float, norm: float) -> Spike | None:
    return judge.why_skipped(norm, None, [loss])[1]


def noisy(number: int, seed: int = 0) -> list[tuple[float, float]]:
    """Returns slowly falling losses, and gradient norms with a long tail."""
    draw = random.Random(seed)
    return [
        (3.0 - step / 1000 + draw.gauss(0, 0.05), draw.lognormvariate(-1, 0.3))
        for step in range(number)
    ]


def test_neither_noise_nor_a_falling_loss_is_a_spike() -> None:
    judge = SkipPolicy(8.0)
    assert not any(judged(judge, *values) for values in noisy(3000))
    judge = SkipPolicy(8.0, window=16)
    assert not any(judged(judge, 10.0 * 0.9**step, 0.9**step) for step in range(1, 200))


@pytest.mark.parametrize("spike", [(6.0, 0.4), (3.0, 20.0), (math.nan, 0.4), (3.0, math.inf)])
def test_a_large_loss_or_norm_is_one_and_does_not_raise_the_limits(
    spike: tuple[float, float],
) -> None:
    judge = SkipPolicy(8.0, window=16)
    for values in noisy(40):
        assert judged(judge, *values) is None
    (why, first), second = judge.why_skipped(spike[1], None, [spike[0]]), judged(judge, *spike)
    assert why == (NOT_FINITE if spike[1] == math.inf else SPIKE)
    assert first is not None
    assert second is not None
    assert (first.in_a_row, second.in_a_row) == (1, 2)
    assert first.loss_limit == second.loss_limit < 4.5
    assert judged(judge, 3.0, 0.4) is None


def test_values_that_hardly_differ_are_not_held_to_their_own_noise() -> None:
    """8 deviations of at least 1 % for the loss, and 16 for the norm."""
    judge = SkipPolicy(8.0, window=16)
    for _ in range(20):
        assert judged(judge, 2.0, 1.0) is None
    assert judged(judge, 2.15, 1.15) is None
    assert judged(judge, 2.17, 1.0) is not None
    assert judged(judge, 2.0, 1.17) is not None


def test_a_step_needs_a_whole_window_to_be_judged() -> None:
    judge = SkipPolicy(8.0, window=4)
    for loss in (3.0, 1e9, 3.0, 3.0):
        assert judged(judge, loss, 1.0) is None
    assert judged(judge, 1e10, 1.0) is not None


@pytest.mark.parametrize("stop", [5, 17, 33])
def test_a_resumed_run_judges_alike(stop: int) -> None:
    values = noisy(60, seed=stop)
    values[32] = values[33] = values[40] = (9.0, 9.0)
    whole, first, second = (SkipPolicy(8.0, window=16) for _ in range(3))
    expected = [judged(whole, *one) for one in values]
    found = [judged(first, *one) for one in values[:stop]]
    second.restore(json.loads(json.dumps(first.as_dict())))
    found += [judged(second, *one) for one in values[stop:]]
    assert found == expected
    assert second.as_dict() == whole.as_dict()


# Runs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    return folder.seal("text", documents(0, 60), documents(2, 16)).complete()


def config_of(made: MadeFolder, skip_spikes: float | None = 8.0) -> Config:
    return make_config(
        data=made.config(),
        checkpoint={"every": 2},
        train={"steps": STEPS, "eval_rows": 4, "skip_spikes": skip_spikes},
    )


def train(
    config: Config, run_dir: Path, scale: float = 1e3, poison: range = POISON, die_at: int = 0
) -> str:
    """Trains with a window of 4, and rank 0's part of the loss multiplied for some samples.

    The run dies before the step number `die_at`, once earlier checkpoints are written.
    """
    make_step, make_loss, first = loop.step, loop.micro_batch_loss, [0]

    def step(run, batch, rate, **options):
        first[0] = batch.first_sample
        if run.progress.step + 1 == die_at:
            run.checkpoints.wait()
            raise KeyboardInterrupt("the machine is gone")
        return make_step(run, batch, rate, **options)

    def loss(*arguments, **options):
        found = make_loss(*arguments, **options)
        if torch.distributed.get_rank() or first[0] not in poison:
            return found
        return replace(found, loss=found.loss * scale, cross_entropy=found.cross_entropy * scale)

    run_dir.mkdir(exist_ok=True)
    run_module.SkipPolicy = partial(SkipPolicy, window=4)  # type: ignore[misc]
    loop.step, loop.micro_batch_loss = step, loss
    return loop.train(config, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("scale", slow_but([1e3, math.nan], 1e3))
def test_the_updates_of_spikes_are_skipped_also_by_a_run_that_resumes_between_them(
    made: MadeFolder, tmp_path: Path, scale: float
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(train, 2, config_of(made), whole, scale, timeout_s=240)
    assert column(whole, "skipped") == [0] * 5 + [1, 2, 2, 2, 2]
    spikes = [(line["step"], line["in_a_row"]) for line in lines(whole, "spike")]
    assert spikes == [(6, 1), (7, 2)]
    with pytest.raises(RankFailed):
        run_ranks(train, 2, config_of(made), resumed, scale, POISON, 7, timeout_s=240)
    run_ranks(train, 2, config_of(made), resumed, scale, timeout_s=240)
    for name in ("loss", "digest", "skipped"):
        assert column(resumed, name) == column(whole, name)


@pytest.mark.slow
def test_a_run_without_spikes_computes_the_same_as_one_that_looks_for_none(
    made: MadeFolder, tmp_path: Path
) -> None:
    for name, deviations in (("off", None), ("on", 8.0)):
        config = config_of(made, deviations)
        run_ranks(train, 1, config, tmp_path / name, 1.0, range(0), timeout_s=240)
    assert column(tmp_path / "off") == column(tmp_path / "on")
