"""Training during preparation gives the same samples, losses and weights as afterwards.

It ends with a cause if the preparation fails.
"""

import threading
import time
from pathlib import Path

import pytest
from made_folder import MadeFolder, documents
from parts import make_config
from pydantic import ValidationError
from trained import lines, run_training
from world import run_ranks

from moebius.data_pipeline.growth import give_up
from moebius.data_pipeline.manifest import read_manifest
from moebius.train import rank_data
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.config.start_when import StartWhen
from moebius.train.recipes.smoke import RECIPES

STEPS = 7  # of 8 samples: segment 0 has some 30


def begun(folder: Path) -> MadeFolder:
    return MadeFolder(folder).seal("text", documents(0, 16), documents(2, 16))


def go_on(made: MadeFolder) -> None:
    made.seal("text", documents(1, 16)).complete()


def config_of(made: MadeFolder) -> Config:
    settings = {"steps": STEPS, "micro_batch": 4, "eval_rows": 4, "timeout_s": 60.0}
    return make_config(data=made.config(), checkpoint__every=2, train=settings)


def train_soon(config: Config, run_dir: Path) -> str:
    rank_data._ROUND_S, rank_data._SAY_AFTER_S = 0.2, 0.3
    return run_training(config, run_dir)


def seen(run_dir: Path) -> list[tuple[int, int, float]]:
    return [(line["step"], line["digest"], line["loss"]) for line in lines(run_dir, "train")]


def weights(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
    assert found
    return found


def waits_for_a_segment(run_dir: Path) -> list[int]:
    """Returns the steps after which ranks reported waiting for a segment."""
    if not (run_dir / "metrics.jsonl").exists():
        return []
    waits = lines(run_dir, "data_wait")
    return [line["step"] for line in waits if "is not sealed yet" in (line["reason"] or "")]


def when_ranks_wait(run_dir: Path, act) -> threading.Thread:
    """Acts in a thread once the ranks have reported waiting for data."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not waits_for_a_segment(run_dir) and time.monotonic() < deadline:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def afterwards(tmp_path_factory) -> Path:
    """Returns the run on the complete folder."""
    folder = tmp_path_factory.mktemp("afterwards")
    made = begun(folder / "data")
    go_on(made)
    run_ranks(train_soon, 2, config_of(made), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_training_meanwhile_is_training_afterwards(afterwards, tmp_path):
    made = begun(tmp_path / "data")
    thread = when_ranks_wait(tmp_path / "run", lambda: go_on(made))
    run_ranks(train_soon, 2, config_of(made), tmp_path / "run")
    thread.join()
    assert waits_for_a_segment(tmp_path / "run")[0] in (2, 3), "it began on the first segment alone"
    assert seen(tmp_path / "run") == seen(afterwards)
    assert lines(tmp_path / "run", "eval")[-1]["loss"] == lines(afterwards, "eval")[-1]["loss"]
    assert weights(tmp_path / "run", STEPS) == weights(afterwards, STEPS)


@pytest.mark.slow  # and tests/cluster/test_train_while_tokenising.py has it with the commands
def test_where_no_more_comes_the_run_ends_with_the_cause_and_can_go_on(afterwards, tmp_path):
    made, run_dir = begun(tmp_path / "data"), tmp_path / "run"
    thread = when_ranks_wait(run_dir, lambda: give_up(made.folder, "b.txt is not UTF-8"))
    with pytest.raises(
        Exception, match=r"segment 1 of source 'text' of .* will not come: its prepa"
    ) as told:
        run_ranks(train_soon, 2, config_of(made), run_dir)
    thread.join()
    assert "has failed (b.txt is not UTF-8)" in str(told.value)
    last = seen(run_dir)[-1][0]
    assert 0 < last < STEPS
    assert weights(run_dir, last)
    go_on(made)
    run_ranks(train_soon, 2, config_of(made), run_dir)
    assert seen(run_dir) == seen(afterwards)
    assert weights(run_dir, STEPS) == weights(afterwards, STEPS)


# ---- when


@pytest.mark.parametrize(
    ("written", "tokens"),
    [(7, 7), ("50M", 50_000_000), ("2.5B", 2_500_000_000), ("1_000", 1000), ("3 k", 3000)],
)
def test_tokens_are_written_as_people_write_them(written, tokens):
    assert StartWhen(tokens=written).tokens == tokens


@pytest.mark.parametrize("written", ["", "M", "50X", "-3", "1.5", 0, -1, "0"])
def test_what_is_no_number_of_tokens_is_told(written):
    with pytest.raises(ValidationError):
        StartWhen(tokens=written)


def test_it_is_a_section_of_the_configuration():
    for override in ("train.start_when={segments=2}", "train.start_when.segments=2"):
        assert resolve("smoke", [override], RECIPES).train.start_when == StartWhen(segments=2)
    both = resolve("smoke", ["train.start_when.segments=2", "train.start_when.tokens=50M"], RECIPES)
    assert str(both.train.start_when) == "2 segments and 50,000,000 tokens"
    assert resolve("smoke", ["train.start_when=none"], RECIPES).train.start_when is None
    with pytest.raises(ConfigError, match=r"did you mean train.start_when.segments\?"):
        resolve("smoke", ["train.start_when={segment=2}"], RECIPES)
    with pytest.raises(ConfigError, match="give segments, tokens or both"):
        resolve("smoke", ["train.start_when={}"], RECIPES)


def test_ranks_begin_with_a_segment_of_every_source_and_what_was_asked_for(tmp_path):
    made = MadeFolder(tmp_path, ("a", "b"))
    asked = [
        StartWhen(segments=1),
        StartWhen(segments=3),
        StartWhen(tokens=500),
        StartWhen(segments=9),
    ]

    def met() -> list[bool]:
        manifest = read_manifest(tmp_path)
        return [one.is_met(manifest) for one in asked]

    assert met() == [False] * 4
    made.seal("a", documents(0, 20))
    made.seal("a", documents(1, 20))
    assert read_manifest(tmp_path).num_tokens("train") > 500
    assert met() == [False] * 4, "nothing of b"
    made.seal("b", documents(2, 2))
    assert met() == [True, True, True, False]
    assert not StartWhen(segments=3, tokens=10**6).is_met(read_manifest(tmp_path))
    made.complete()
    assert met() == [True] * 4
