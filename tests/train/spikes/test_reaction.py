"""A run that rolls back past a spike equals, bit for bit, one started by hand at that checkpoint
without those samples.

A restart at any moment changes nothing.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folder import MadeFolder, documents
from parts import make_config
from trained import lines
from world import RankFailed
from world import run_ranks as run_ranks_for

from moebius.data_pipeline.read.skipped_samples import SkippedSamples
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.process.process import start_process
from moebius.train import loop
from moebius.train.config.run_config import Config
from moebius.train.config.train_config import SpikeConfig
from moebius.train.optim import learning_rate_at
from moebius.train.rank_data import open_loader
from moebius.train.run import Run, assemble
from moebius.train.spikes import reaction
from moebius.train.spikes.history import FILE, read_rollbacks
from moebius.train.state import TrainingProgress, set_updates, state_tensors

run_ranks = partial(run_ranks_for, timeout_s=240)  # a run syncs twenty files to the disk
BATCH, STEPS = 8, 10
POISON = range(5 * BATCH, 7 * BATCH)  # the samples of steps 6 and 7
LEFT_OUT = range(4 * BATCH, 7 * BATCH)  # since the checkpoint of step 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    return folder.seal("text", documents(0, 60), documents(2, 16)).complete()


def config_of(made: MadeFolder, *, keep_last: int = 4, **spikes: Any) -> Config:
    policy = {
        "action": "rollback",
        "window": 4,
        "warmup_steps": 2,
        "rollback_after": 2,
        "rollback_within": 4,
        "rollback_steps": 1,
    }
    return make_config(
        data=made.config(),
        checkpoint={"every": 2, "keep_last": keep_last},
        train={"steps": STEPS, "eval_rows": 4, "spikes": policy | spikes},
    )


def train(
    config: Config,
    run_dir: Path,
    die_before: int = 0,
    poison: range = POISON,
    scale: float = 1e3,
    damage: str = "",
    most_rollbacks: int = 10,
) -> str:
    """Trains with rank 0's part of the loss multiplied by `scale` for some samples.

    The run dies before step number `die_before`, counting repeated steps. `damage`: a checkpoint to
    damage before step 7.
    """
    make_step, make_loss, made = loop.step, loop.micro_batch_loss, []

    def step(run, batch, rate, **options):
        made.append(batch.first_sample)
        if len(made) == die_before:
            raise KeyboardInterrupt("the machine is gone")
        if len(made) == 7 and damage:
            (run_dir / "checkpoints" / damage / "index.json").write_text("{}")
        return make_step(run, batch, rate, **options)

    def loss(*arguments, **options):
        found = make_loss(*arguments, **options)
        if torch.distributed.get_rank() or made[-1] not in poison:
            return found
        return replace(found, loss=found.loss * scale, cross_entropy=found.cross_entropy * scale)

    loop.step, loop.micro_batch_loss = step, loss
    reaction.MOST_ROLLBACKS = most_rollbacks
    return loop.train(config, run_dir)


def by_hand(config: Config, final: Path) -> bool:
    """Returns whether a run's weights equal those of a run from its checkpoint of step 4 with the
    samples after the poison.
    """
    with start_process("cpu", timeout_s=30) as process:
        off = config.train.model_copy(update={"spikes": SpikeConfig()})
        run = assemble(config.model_copy(update={"train": off}), final / "by hand", process)
        tensors, shards = state_tensors(run.model, run.optimizer)
        path = final / "checkpoints" / "step_00000004"
        meta = load(path, tensors, shards, mesh=run.mesh)
        run.progress = TrainingProgress(4, 4, POISON.stop, meta["progress"]["tokens"])
        set_updates(run.model, run.optimizer, 4)
        with open_loader(run, None) as loader:
            while run.progress.step < STEPS:
                loop.step(run, next(loader), learning_rate_at(config.optim, run.progress.step))
        hand = {name: tensor.clone() for name, tensor in tensors.items()}
        meta = load(final / "checkpoints" / "step_00000010", tensors, shards, mesh=run.mesh)
        assert meta["progress"] == run.progress.as_dict()
        return all(torch.equal(tensors[name], hand[name]) for name in tensors)


def curve(run_dir: Path) -> dict[int, tuple[float, int]]:
    """Returns loss and digest by step; the last ones of a repeated step."""
    return {line["step"]: (line["loss"], line["digest"]) for line in lines(run_dir, "train")}


def digests(run_dir: Path) -> dict[int, int]:
    return {step: digest for step, (_, digest) in curve(run_dir).items()}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def rolled_back(made: MadeFolder, world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run that rolled back once, undisturbed otherwise."""
    run_dir = tmp_path_factory.mktemp(f"run{world}")
    config = config_of(made, keep_last=6)
    assert run_ranks(train, world, config, run_dir) == ["finished"] * world
    return run_dir


def test_the_weights_go_back_and_the_data_goes_on(rolled_back: Path) -> None:
    steps = [line["step"] for line in lines(rolled_back, "train")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10]
    assert [(line["step"], line["in_a_row"]) for line in lines(rolled_back, "spike")] == [
        (6, 1),
        (7, 2),
    ]
    (told,) = lines(rolled_back, "rollback")
    assert (told["step"], told["to_step"], told["first_sample"], told["end_sample"]) == (
        *(7, 4),
        *(LEFT_OUT.start, LEFT_OUT.stop),
    )
    (abandoned,) = told["abandoned"]
    assert abandoned.startswith("step_00000006.abandoned-")
    assert (rolled_back / "checkpoints" / abandoned / "manifest.json").exists()
    (rollback,) = read_rollbacks(rolled_back)
    assert range(rollback.first_sample, rollback.end_sample) == LEFT_OUT
    last = lines(rolled_back, "train")[-1]
    assert last["skipped"] == 0  # what was skipped is not in the weights' past any more
    assert last["tokens"] % (STEPS * BATCH) == 0  # the samples that were left out are not counted


def test_it_is_the_run_that_one_would_start_by_hand(
    made: MadeFolder, rolled_back: Path, world: int
) -> None:
    assert all(run_ranks(by_hand, world, config_of(made), rolled_back))


@pytest.mark.slow
@pytest.mark.parametrize("die_before", [7, 8, 11])
def test_a_restart_at_any_moment_changes_nothing(
    made: MadeFolder, rolled_back: Path, world: int, tmp_path: Path, die_before: int
) -> None:
    """Between the spikes, right after rolling back, and a few steps later."""
    config = config_of(made)
    with pytest.raises(RankFailed):
        run_ranks(train, world, config, tmp_path, die_before)
    run_ranks(train, world, config, tmp_path)
    assert curve(tmp_path) == curve(rolled_back)
    assert len(read_rollbacks(tmp_path)) == 1


def train_until_saved(config: Config, run_dir: Path, poison: range) -> None:
    """Trains until the run would roll back, and dies once its checkpoints are written."""

    def die(run: Run) -> None:
        run.checkpoints.wait()
        raise KeyboardInterrupt("the machine is gone")

    reaction.roll_back = die
    train(config, run_dir, poison=poison)


def test_a_restart_between_save_and_rollback_rolls_back_before_another_step(
    made: MadeFolder, tmp_path: Path
) -> None:
    config, poison = config_of(made, rollback_after=1, rollback_within=1), range(40, 48)  # step 6
    expected, died = tmp_path / "expected", tmp_path / "died"
    run_ranks(train, 1, config, expected, 0, poison)
    with pytest.raises(RankFailed):
        run_ranks(train_until_saved, 1, config, died, poison)
    assert (died / "checkpoints" / "step_00000006").is_dir()
    run_ranks(train, 1, config, died, 0, poison)
    assert curve(died) == curve(expected)
    assert read_rollbacks(died) == read_rollbacks(expected) != ()


@pytest.mark.slow
def test_another_number_of_ranks_leaves_out_the_same_samples(
    made: MadeFolder, rolled_back: Path, world: int, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed):
        run_ranks(train, world, config_of(made), tmp_path, 8)
    run_ranks(train, 3 - world, config_of(made), tmp_path)
    assert digests(tmp_path) == digests(rolled_back)
    assert len(read_rollbacks(tmp_path)) == 1


@pytest.mark.slow
def test_a_checkpoint_remembers_what_was_left_out(
    made: MadeFolder, rolled_back: Path, world: int, tmp_path: Path
) -> None:
    """The rollbacks' file is lost between a checkpoint and the next start."""
    with pytest.raises(RankFailed):
        run_ranks(train, world, config_of(made), tmp_path, 12)
    (tmp_path / FILE).unlink()
    run_ranks(train, world, config_of(made), tmp_path)
    assert curve(tmp_path) == curve(rolled_back)
    assert len(read_rollbacks(tmp_path)) == 1


@pytest.mark.slow
def test_skipping_alone_changes_what_spikes_change_and_nothing_else(
    made: MadeFolder, tmp_path: Path
) -> None:
    for action, poison in (("off", range(0)), ("skip", range(0)), ("skip", POISON)):
        name = f"{action}{len(poison)}"
        (tmp_path / name).mkdir()
        run_ranks(train, 1, config_of(made, action=action), tmp_path / name, 0, poison)
    assert curve(tmp_path / "off0") == curve(tmp_path / "skip0")
    skipped = lines(tmp_path / f"skip{len(POISON)}", "train")
    assert [line["skipped"] for line in skipped] == [0] * 5 + [1, 2, 2, 2, 2]
    assert digests(tmp_path / "off0") == digests(tmp_path / f"skip{len(POISON)}")


@pytest.mark.slow
def test_gradients_that_are_not_finite_count_as_spikes(made: MadeFolder, tmp_path: Path) -> None:
    run_ranks(train, 1, config_of(made), tmp_path, 0, POISON, float("nan"))
    assert [line["loss"] for line in lines(tmp_path, "spike")] == ["nan", "nan"]
    assert [line["to_step"] for line in lines(tmp_path, "rollback")] == [4]


@pytest.mark.slow
def test_a_run_that_may_not_go_back_again_ends(made: MadeFolder, tmp_path: Path) -> None:
    """Endless poison is skipped once, and then found again."""
    config, poison = config_of(made), range(5 * BATCH, 1000 * BATCH)
    with pytest.raises(RankFailed, match=r"2 spikes within 4 steps"):
        run_ranks(train, 1, config, tmp_path, 0, poison, 1e3, "", 1)
    assert len(lines(tmp_path, "rollback")) == 1


@pytest.mark.slow
def test_a_second_rollback_leaves_out_what_both_have_read(made: MadeFolder, tmp_path: Path) -> None:
    poison = range(5 * BATCH, 8 * BATCH + 1)  # and so the first step after the first rollback
    run_ranks(train, 1, config_of(made, rollback_after=1), tmp_path, 0, poison)
    told = lines(tmp_path, "rollback")
    assert [(line["step"], line["to_step"]) for line in told] == [(6, 4), (5, 4), (5, 4), (5, 4)]
    assert SkippedSamples.of(
        range(line["first_sample"], line["end_sample"]) for line in told
    ).ranges == (range(4 * BATCH, 9 * BATCH),)


@pytest.mark.slow
def test_without_an_earlier_checkpoint_the_run_stays_where_it_is(
    made: MadeFolder, tmp_path: Path
) -> None:
    config = config_of(made, rollback_steps=2)
    run_ranks(train, 1, config, tmp_path, 0, range(2 * BATCH, 4 * BATCH))
    assert [line["step"] for line in lines(tmp_path, "spike")] == [3, 4]
    (told,) = lines(tmp_path, "rollback_impossible")
    assert (told["step"], told["at_most"]) == (4, 1)
    assert [line["step"] for line in lines(tmp_path, "train")] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_gone_back_to(made: MadeFolder, tmp_path: Path) -> None:
    run_ranks(train, 1, config_of(made), tmp_path, 0, POISON, 1e3, "step_00000004")
    assert [line["to_step"] for line in lines(tmp_path, "rollback")] == [2]
    assert [line["step"] for line in lines(tmp_path, "checkpoint_set_aside")] == [4]
