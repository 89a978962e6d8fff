"""`moebius eval --test-sets`: a finished run on its own test sets and others, with more loops."""

import json
from pathlib import Path

import pytest
from small_model import TINY

from moebius.cli.main import main
from moebius.data_pipeline.algorithmic.draw import ANSWER, PROMPT
from moebius.data_pipeline.data_config import DataConfig, TestSet
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import restore
from moebius.train.config.run_config import (
    CheckpointConfig,
    Config,
    ConfigError,
    TrainConfig,
)
from moebius.train.loop import train
from moebius.train.recipes.algorithmic import input_of

SIZES = {"letters": 3, "hops": 2, "length": 6}
LONGER = input_of("p_hop", "held_out", sequences=15, **SIZES | {"length": 11})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p_hop")
    held_out = input_of("p_hop", "held_out", sequences=20, **SIZES)
    data = DataConfig(
        input=(input_of("p_hop", "train", sequences=200, **SIZES),),
        validation_input=(held_out,),
        tokenizer=input_of("p_hop", "words", letters=3, hops=2),
        vocab_size=257,
        targets="paired",
        seq_len=16,
        test_sets=(TestSet(name="in_distribution", input=(held_out,)),),
        directory=str(folder / "data"),
        prompt_field=PROMPT,
        answer_field=ANSWER,
    )
    config = Config(
        model=TINY, data=data, checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(steps=2, global_batch=8, micro_batch=4),
    )  # fmt: skip
    prepare(data, data.directory)
    run_dir = folder / "run"
    run_dir.mkdir()
    config.save(run_dir / "config.json")
    train(config, run_dir)
    return run_dir


def moebius(*arguments: object) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def scores(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert moebius(run, "--test-sets", "--json", *options) == 0
    return json.loads(capsys.readouterr().out)


def test_what_the_run_logged_last_is_what_its_checkpoint_scores(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["kind"] == "task"][-1]
    found = scores(run, capsys)
    assert (found["step"], found["depth_steps"], found["trained_depth_steps"]) == (2, 2, 2)
    for key, value in found["scores"]["in_distribution"].items():
        assert value == pytest.approx(logged[f"in_distribution/{key}"], rel=1e-6)


def test_other_sets_and_more_depth_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once, more = (
        scores(run, capsys, "--test-set", f"longer={LONGER}", *options)
        for options in ((), ("--depth-steps", "5"))
    )
    assert more["depth_steps"] == 5
    assert list(once["scores"]) == list(more["scores"]) == ["longer"]
    assert once["scores"]["longer"]["items"] == 15
    assert once["scores"]["longer"]["loss"] != more["scores"]["longer"]["loss"]


def test_more_depth_steps_are_the_group_applied_more_often(run: Path) -> None:
    with start_process("cpu", timeout_s=60) as process:
        found = [restore(run, process, depth_steps=count).model for count in (2, 6)]
    weights = [dict(model.named_parameters()) for model in found]
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    assert [len(model.config.schedule) for model in found] == [2, 6]


def test_a_table_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moebius(run, "--test-sets") == 0
    shown = capsys.readouterr().out
    assert "in_distribution" in shown
    assert "exact match" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--test-sets", "--depth-steps", "0"], "0 depth steps of a group of 1 layers"),
        (["--depth-steps", "4"], "--depth-steps goes with --test-sets"),
        (["--test-set", "longer=x.jsonl"], "--test-set goes with --test-sets"),
        (["--test-sets", "--test-set", "longer"], "write NAME=INPUT"),
        (["--test-sets", "--prompt", "a"], "are two things to do"),
        (["--prompt", "a"], "its rows are pairs of inputs and labels"),
        (["--stride", "4"], "its rows are pairs of inputs and labels"),
        (["--score", "a"], "its rows are pairs of inputs and labels"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moebius(run, *options) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_shares_nothing_has_the_depth_that_it_has(run: Path) -> None:
    config = Config.load(run / "config.json")
    unshared = config.model.model_copy(update={"layers_per_group": 2})
    folder = run.parent / "unshared"
    folder.mkdir()
    config.model_copy(update={"model": unshared}).save(folder / "config.json")
    with start_process("cpu", timeout_s=60) as process:
        with pytest.raises(ConfigError, match="shares no layers, and has 2 depth steps"):
            restore(folder, process, depth_steps=4)
