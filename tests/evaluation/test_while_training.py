"""Scores and samples while a run trains: those of the commands, with no trace in the run."""

import json
import os
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from family import tiny_config
from pairwise import slow_but
from parts import make_config
from small_model import MODEL
from trained import column, different, lines, newest_state
from world import run_ranks

import moebius
from moebius.distributed.checkpoint.format import find_checkpoint
from moebius.distributed.process.process import start_process
from moebius.evaluation import restore as restoring
from moebius.evaluation import while_training
from moebius.evaluation.tasks.items import TaskItems, read_items
from moebius.evaluation.tasks.task import TaskError
from moebius.evaluation.text import write_text
from moebius.evaluation.while_training import Examiner, check_evaluation
from moebius.evaluation.zero_shot import measure_tasks
from moebius.model.config.model_config import ModelConfig
from moebius.train import loop
from moebius.train.config.run_config import Config
from moebius.train.config.train_config import EvaluateConfig
from moebius.train.hooks import HOOKS, save_checkpoint, score_and_sample

PROMPT, ITEMS = "the band", 3
SAMPLING: dict[str, Any] = while_training._SAMPLING | {"num_tokens": 6}
TASKS: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        {"question": f"What is {n}?", "choices": ["one", "two", "three", "four"], "label": n % 4}
        for n in range(6)
    ],
    "blimp": [
        {"sentence_good": "She runs.", "sentence_bad": "She run.", "UID": "agreement"},
        {"sentence_good": "He sees her.", "sentence_bad": "He sees she.", "UID": "case"},
    ],
    "lambada": [{"text": "He saw the hat and took the hat"}],  # rows of one rank alone
    "cbt": [  # without a score, which takes ten candidates
        dict(kind="V", context=["We"], question="XXXXX .", answer="go", candidates=["go", "am"])
    ],
}
TRANSITION = {
    "vocab_size": 257,
    "num_layers": 2,
    "layers_per_group": 2,
    "feed_forward.sparse_layers": "all",
    "feed_forward.num_experts": 4,
    "feed_forward.router": {"kind": "transition", "sequences_per_group": 4, "switch_step": 3},
}
RESCALED = {"vocab_size": 257, "feed_forward.router.evaluation_capacity_factor": None}
# ranks, model, and the other settings
RUNS: dict[str, tuple[int, ModelConfig, dict[str, Any]]] = {
    "one rank": (1, MODEL, {}),
    "compiled": (1, MODEL, {"train__compile": True}),
    "ep": (2, MODEL.changed({"feed_forward.router.expert_dropout": 0.3}), {"mesh__ep": 2}),
    "fsdp": (2, MODEL, {"mesh": {"sharding": "fsdp", "dp_shard": 2}}),
    "fsdp, tied": (
        2,
        MODEL.changed({"tied_head": True}),
        {"mesh": {"sharding": "fsdp", "dp_shard": 2, "ep": 2}},
    ),
    "replicas": (
        4,
        MODEL,
        {"mesh": {"ep": 2, "dp_replicate": 2, "rebalance_every": 1, "replicas": 2}},
    ),
    "scheduled": (2, tiny_config("transition", TRANSITION), {"train__micro_batch": 4}),
    "rescaled": (1, tiny_config("x_moe_torchscale", RESCALED), {}),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few items of each task."""
    folder = tmp_path_factory.mktemp("eval")
    for name, records in TASKS.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def config_of(data: Path, tasks: Path | None, **changes: Any) -> Config:
    asked = {"tasks": [*TASKS], "data": str(tasks), "prompts": [PROMPT]}
    evaluate = {"every": 2, "items": ITEMS} | asked
    settings = {"data__seq_len": 32, "checkpoint": {"every": 2}}
    return make_config(data, **settings | {"evaluate": {} if tasks is None else evaluate} | changes)


def trained(config: Config, run_dir: Path) -> None:
    while_training._SAMPLING.update(SAMPLING)
    run_dir.mkdir(parents=True, exist_ok=True)
    loop.train(config, run_dir, examine=Examiner())


@pytest.mark.parametrize("name", slow_but(RUNS, "ep", "fsdp"))
def test_they_are_those_of_the_commands_and_leave_no_trace(
    name: str, mixture_folder: Path, tasks: Path, tmp_path: Path
) -> None:
    world, model, settings = RUNS[name]
    run, plain = tmp_path / "run", tmp_path / "plain"
    for folder, asked in ((run, tasks), (plain, None)):
        config = config_of(mixture_folder, asked, model=model, **settings)
        run_ranks(trained, world, config, folder)
    assert different(newest_state(run), newest_state(plain)) == []
    for number in ("loss", "digest", "grad_norm"):
        assert column(run, number) == column(plain, number)
    scored, written = lines(run, "scores"), lines(run, "samples")
    assert [line["step"] for line in scored] == [line["step"] for line in written] == [2, 4]
    for score, sample in zip(scored, written, strict=True):
        report = measure_tasks(run, [*TASKS], tasks, step=score["step"], limit=ITEMS)
        assert report is not None
        for task in report.tasks:
            expected = next(iter(task.metrics.values())).value
            assert score.get(task.name) == (None if isnan(expected) else expected)
        assert "cbt" not in score
        assert score["items"] == sum(task.items for task in report.tasks) == 7
        with start_process("cpu") as process:
            restored = restoring.restore(run, process, step=score["step"])
        text = "".join(write_text(restored, PROMPT, **SAMPLING))
        assert (sample["prompt"], PROMPT + sample["text"]) == (PROMPT, text)


def step_restored(run: Path) -> int:
    """Returns the step of a run that saves another checkpoint before rank 1 looks."""
    with start_process("cpu", timeout_s=60) as process, pytest.MonkeyPatch.context() as patch:
        if process.rank == 1:
            patch.setattr(restoring, "find_checkpoint", lambda path, _: find_checkpoint(path, 2))
        return restoring.restore(run, process).step


def examined(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    """Trains to the end, and returns the scores and samples without their times."""
    trained(config, run_dir)
    records = moebius.history(run_dir).records()
    found = [one for one in records if one["kind"] in ("scores", "samples")]
    return [{key: one[key] for key in one.keys() - {"time", "seconds"}} for one in found]


@pytest.mark.parametrize("saved", [False, True])
def test_a_killed_run_has_each_once(
    saved: bool, mixture_folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(run: Any, result: Any) -> None:
        if run.progress.step == 4:
            run.checkpoints.wait()
            raise ZeroDivisionError

    config = config_of(mixture_folder, tasks, train__steps=6)
    at = HOOKS.index(save_checkpoint) + saved
    with monkeypatch.context() as patched:
        patched.setattr(loop, "HOOKS", (*HOOKS[:at], kill, *HOOKS[at:]))
        with pytest.raises(ZeroDivisionError):
            trained(config, tmp_path / "killed")
    killed, whole = (examined(config, tmp_path / name) for name in ("killed", "whole"))
    assert killed == whole
    assert [record["step"] for record in whole] == [2, 2, 4, 4, 6, 6]
    assert run_ranks(step_restored, 2, tmp_path / "whole") == [6, 6]


def gone(*_given: Any) -> None:
    raise TaskError("it is gone here")


def fewer(name: str, task: Any, place: str, encoder: Any, _limit: int) -> TaskItems:
    return read_items(name, task, place, encoder, 1)


def broken(run: Any, _result: Any) -> None:
    if run.progress.step == 4:
        torch.nn.init.constant_(run.model.head.weight, torch.nan)


def stopped(run: Any, _result: Any) -> None:
    if run.progress.step == 4:
        (run.run_dir / "stop").touch()


def troubled(config: Config, run_dir: Path, trouble: Any) -> list[str]:
    """Trains with a trouble of rank 1, or before the last evaluation; returns this rank's warnings."""
    said, at = list[str](), HOOKS.index(score_and_sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            while_training.logger, "warning", lambda text, *words: said.append(text % words)
        )
        if trouble in (broken, stopped):
            patch.setattr(loop, "HOOKS", (*HOOKS[:at], trouble, *HOOKS[at:]))
        elif os.environ["RANK"] == "1":
            patch.setattr(while_training, "read_items", trouble)
        trained(config, run_dir)
    return said


@pytest.mark.parametrize(
    ("trouble", "num_warnings", "message"),
    [
        (gone, 2, "it is gone here"),
        pytest.param(fewer, 2, "the ranks differ in the items of evaluate", marks=pytest.mark.slow),
        (broken, 1, "log-probabilities are not finite"),
        (stopped, 0, ""),
    ],
)
def test_what_no_rank_can_do_ends_no_run(
    trouble: Any, num_warnings: int, message: str, mixture_folder: Path, tasks: Path, tmp_path: Path
) -> None:
    config = config_of(mixture_folder, tasks, model=MODEL, mesh__ep=2)
    said, nothing = run_ranks(troubled, 2, config, tmp_path / "run", trouble)
    assert (len(said), nothing) == (num_warnings, [])
    for line in said:
        assert re.match(rf"step \d was not evaluated: .*{message}", line, re.DOTALL), said
    steps = [line["step"] for line in lines(tmp_path / "run", "scores")]
    assert steps == ([] if num_warnings == 2 else [2])
    assert [line["state"] for line in lines(tmp_path / "run", "end")] == ["finished"]


CAPACITY = tiny_config("x_moe_torchscale", {"vocab_size": 257})  # places go by position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["helaswag"]}, "not a task; did you mean hellaswag?"),
        ({"tasks": ["copa"]}, "task 'copa' has no file"),
        ({"tasks": ["boolq"]}, "'boolq' has no items"),
        ({"tasks": ["siqa"]}, "no items are left.* longer than the context of 32"),
        ({"tasks": ["cbt_style"], "data": "hub"}, "'cbt_style' is not on the hub"),
        ({"tasks": ["all"], "best": "all"}, "keep_best='all' must be a task, as lambada"),
        ({"prompts": ["so " * 11]}, "'so so so .* has 33 tokens, and must have 1 to 32"),
        ({"prompts": ["a", ""]}, "'' has 0 tokens"),
        ({"prompts": ["a"], "model": CAPACITY}, "lets a position read later ones"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_ranks_start(
    changes: dict[str, Any], message: str, mixture_folder: Path, tasks: Path
) -> None:
    (tasks / "boolq.jsonl").write_text("")
    siqa = {"context": "a", "question": "b", **{f"answer{n}": n * 40 for n in "ABC"}, "label": 1}
    (tasks / "siqa.jsonl").write_text(json.dumps(siqa) + "\n")
    given = {"model": MODEL, "best": None} | changes
    asked = {key: value for key, value in changes.items() if key in EvaluateConfig.model_fields}
    config = config_of(
        mixture_folder,
        None,
        model=given["model"],
        checkpoint__keep_best=given["best"],
        evaluate={"every": 2, "data": str(tasks)} | asked,
    )
    with pytest.raises(ValueError, match=message):
        check_evaluation(config)
