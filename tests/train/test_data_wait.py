"""Ranks wait for a blocked store longer than a collective's time-out, with the same losses; and what a
continued run may change.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_folder import MadeFolder, documents
from parts import make_config
from trained import lines, run_training
from world import run_ranks

from moebius.data_pipeline.read.token_store import TokenBatch, TokenStore
from moebius.train import rank_data
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.record.run_folder import open_run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    """Returns two segments of about 30 rows each."""
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    folder.seal("text", documents(0, 16), documents(2, 16)).seal("text", documents(1, 16))
    return folder.complete()


def config_of(made: MadeFolder, *, steps: int = 9, timeout_s: float = 60.0, **data: Any) -> Config:
    return make_config(
        data=made.config(**data),
        checkpoint__every=4,
        train={"steps": steps, "micro_batch": 1, "eval_rows": 4, "timeout_s": timeout_s},
    )


@dataclass(frozen=True)
class Block:
    """Delays the first batch of a segment on these ranks."""

    ranks: tuple[int, ...]
    segment: int
    seconds: float

    def install(self, rank: int) -> None:
        read = TokenStore.read
        passed = rank not in self.ranks

        def slow(store: TokenStore, batch: int) -> TokenBatch:
            nonlocal passed
            if not passed and store.segment == self.segment and store.split == "train":
                passed = True
                time.sleep(self.seconds)
            return read(store, batch)

        TokenStore.read = slow  # type: ignore[assignment]  # in a process of its own


def train_blocked(config: Config, run_dir: Path, block: Block | None = None) -> str:
    rank_data._ROUND_S, rank_data._SAY_AFTER_S = 0.2, 0.5
    if block is not None:
        block.install(int(os.environ.get("RANK", "0")))
    return run_training(config, run_dir)


def seen(run_dir: Path) -> list[tuple[int, float]]:
    """Returns digest and loss of every step."""
    return [(line["digest"], line["loss"]) for line in lines(run_dir, "train")]


@pytest.fixture(scope="module")
def expected(made, tmp_path_factory) -> Path:
    run_ranks(train_blocked, 2, config_of(made), run := tmp_path_factory.mktemp("expected"))
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    # of the second, what was read ahead hides a part: as long as the steps of a segment take
    [Block((1,), 0, 5.0), Block((0, 1), 1, 9.0)],
)
def test_a_store_that_blocks_is_waited_for_beyond_the_time_out(
    made, expected, tmp_path, block
) -> None:
    run_ranks(train_blocked, 2, config_of(made, timeout_s=2.0), tmp_path / "run", block)
    assert seen(tmp_path / "run") == seen(expected)
    waits = lines(tmp_path / "run", "data_wait")
    assert waits
    assert {line["ranks"] for line in waits} <= set(range(1, len(block.ranks) + 1))
    assert waits[-1]["seconds"] > 1
    if 0 in block.ranks:
        reasons = [line["reason"] for line in waits if line["reason"]]
        assert reasons[0].startswith(f"reading record batch 0 of segment {block.segment} of")
    assert not lines(expected, "data_wait")


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_samples_on_any_number_of_ranks(made, tmp_path) -> None:
    whole = tmp_path / "whole"
    run_ranks(train_blocked, 1, config_of(made, steps=12), whole)
    parts = tmp_path / "parts"
    for world, steps in ((2, 4), (1, 8), (4, 12)):
        run_ranks(train_blocked, world, config_of(made, steps=steps), parts)
    digests = [digest for digest, _ in seen(whole)]
    assert [digest for digest, _ in seen(parts)] == digests
    for (_, one), (_, other) in zip(seen(whole), seen(parts), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
def test_other_data_is_refused_with_the_difference_unless_that_is_wanted(made, tmp_path) -> None:
    config = config_of(made, steps=4)
    run = tmp_path / "run"
    open_run(config, run)
    run_ranks(train_blocked, 1, config, run)
    changed = config_of(made, steps=6, seed=4)
    with pytest.raises(ConfigError, match=r"data.seed: the run has 3, now 4"):
        open_run(changed, run)
    with pytest.raises(Exception, match=r"seed: saved 3, now 4.*data.override_position=true"):
        run_ranks(train_blocked, 1, changed, run)
    wanted = config_of(made, steps=6, seed=4, override_position=True)
    open_run(wanted, run)
    run_ranks(train_blocked, 1, wanted, run)
    steps = lines(run, "train")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"train.global_batch"):
        open_run(make_other_batch(config), run)


def make_other_batch(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 16})})


def test_data_that_is_not_enough_is_told_before_the_first_step(made, tmp_path) -> None:
    config = config_of(made, steps=100, max_epochs={"text": 2})
    with pytest.raises(Exception, match=r"max_epochs=2: they are used up before sample 800"):
        run_ranks(train_blocked, 1, config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
