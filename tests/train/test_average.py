"""The average of the weights is that of the weights after every update, and changes nothing else."""

import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from family import tiny_config
from pairwise import slow_but
from parts import make_config
from rich.console import Console
from safetensors import safe_open
from small_model import MODEL
from torch import Tensor
from trained import by_step, different, newest_state, run_training
from world import run_ranks

from moebius import api
from moebius.cluster.job import JobStatus, State
from moebius.cluster.report.history import read_history
from moebius.cluster.report.summary import closing_words, draw_summary
from moebius.distributed.checkpoint.format import Weights, list_checkpoints, open_checkpoint
from moebius.distributed.checkpoint.loading import read_tensor
from moebius.distributed.checkpoint.source import read_source
from moebius.train.config.run_config import Config
from moebius.train.config.train_config import TrainConfig
from moebius.train.families.import_run import average_checkpoints
from moebius.train.families.start import start_from
from moebius.train.metrics.spikes import SkipPolicy
from moebius.train.record.run_folder import open_run

STEPS, DECAY, WINDOW = 8, 0.7, 5
KINDS = {"ema": DECAY, "last": f"{WINDOW} steps"}
CHOICES: tuple[Weights, ...] = ("trained", "average")
EP2: dict[str, Any] = {"mesh": {"ep": 2}}
BIASED = {"model": tiny_config("deepseek", {"vocab_size": 257})}
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {  # kind, ranks, configuration
    "replicas": ("ema", 2, {"mesh": {"ep": 2, "rebalance_every": 2, "replicas": 1}}),
    "fsdp": ("last", 2, {"mesh": {"dp_shard": 2, "sharding": "fsdp"}}),
    "muon": ("ema", 2, EP2 | {"optim__kind": "muon"}),
    "bfloat16_only": ("last", 2, EP2 | BIASED | {"train__precision": "bfloat16_only"}),
    "bfloat16": ("ema", 2, EP2 | {"train__precision": "bfloat16"}),
    "one": ("last", 1, {}),
    "ep4": ("ema", 4, {"mesh": {"ep": 4}}),
    "ep_fsdp": ("last", 4, {"mesh": {"ep": 2, "dp_shard": 4, "sharding": "fsdp"}}),
}
Step = dict[str, Tensor]


def config_of(data: Path, kind: str | None = "ema", **changes: Any) -> Config:
    train = {"steps": STEPS, "eval_every": 3, "average": kind}
    train["average_decay"] = None if kind is None else KINDS[kind]
    always = {"model": MODEL, "train": train, "checkpoint": {"every": 1, "keep_last": 99}}
    return make_config(data, **(always | {"optim__learning_rate": 1e-2} | changes))


def trained_in(run_dir: Path, config: Config, world: int = 1) -> Path:
    """Trains on ranks, in a folder that may have a checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(run_dir / "config.json")
    assert run_ranks(run_training, world, config, run_dir) == ["finished"] * world
    return run_dir


def steps_of(run_dir: Path, prefix: str = "model.") -> dict[int, Step]:
    """Returns the tensors of every checkpoint under a prefix, whole and in float64, by step."""
    found = {}
    for checkpoint in list_checkpoints(run_dir / "checkpoints"):
        stored = open_checkpoint(checkpoint.path)
        found[checkpoint.step] = {
            name.removeprefix(prefix): read_tensor(stored, name).double()
            for name in stored.index.tensors
            if name.startswith(prefix)
        }
    return found


def ema_of(weights: Sequence[Step]) -> Step:
    found = weights[0]
    for number, now in enumerate(weights):
        decay = min(DECAY, number / (number + 1))
        found = {name: decay * found[name] + (1 - decay) * now[name] for name in now}
    return found


def last_of(weights: Sequence[Step]) -> Step:
    """Returns the mean of the last h + 1 to 2 h, of which the first half begins every h updates."""
    half = WINDOW // 2
    within = weights[max(0, (len(weights) - 1) // half - 1) * half :]
    return {name: torch.stack([each[name] for each in within]).mean(0) for name in within[0]}


REFERENCE: dict[str, Callable[[Sequence[Step]], Step]] = {"ema": ema_of, "last": last_of}


def check_averages(run_dir: Path, kind: str, weights: dict[int, Step], begin: int = 1) -> None:
    """Compares the average of every checkpoint with the mean of all weights from `begin` on."""
    averages = steps_of(run_dir, "optimizer.weight_average.")
    for step, found in averages.items():
        if step < begin:
            continue
        expected = REFERENCE[kind]([weights[number] for number in range(begin, step + 1)])
        assert found.keys() <= expected.keys()
        for name, average in found.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)
    assert max(averages) == STEPS
    assert any("experts" in name for name in averages[STEPS])
    assert not any("selection_bias" in name for name in averages[STEPS])


def part(run_dir: Path) -> Step:
    """Returns the newest state without averages."""
    state = newest_state(run_dir)
    return {name: one for name, one in state.items() if "_average." not in name}


@pytest.mark.parametrize("run", slow_but(RUNS, "replicas", "fsdp", "muon", "bfloat16_only"))
def test_it_is_that_of_all_updates_and_leaves_the_run_its_bits(
    run: str, data: Path, tmp_path: Path
) -> None:
    """Also killed after the fourth step and continued, with the same bits, and on another layout."""
    kind, world, changes = RUNS[run]
    whole = trained_in(tmp_path / "whole", config_of(data, kind, **changes), world)
    weights = steps_of(whole)
    check_averages(whole, kind, weights)
    of_average = newest_state(whole).keys() - part(whole).keys()
    assert {newest_state(whole)[name].dtype for name in of_average} == {torch.float32}
    without = trained_in(tmp_path / "without", config_of(data, None, **changes), world)
    assert different(part(whole), newest_state(without)) == []
    assert [line["loss"] for line in by_step(whole, "eval").values()] == [
        line["loss"] for line in by_step(without, "eval").values()
    ]
    elsewhere = (1, {"mesh": {}}) if world > 1 else (2, EP2)
    for name, (ranks, other) in {"killed": (world, {}), "moved": elsewhere}.items():
        run_dir = tmp_path / name
        midway = "checkpoints/step_00000004"
        shutil.copytree(whole / midway, run_dir / midway)
        trained_in(run_dir, config_of(data, kind, **(changes | other)), ranks)
        if name == "killed":
            assert different(newest_state(whole), newest_state(run_dir)) == []
        check_averages(run_dir, kind, weights | steps_of(run_dir))


def test_a_run_may_begin_change_and_end_it(data: Path, tmp_path: Path) -> None:
    def trained(steps: int, kind: str | None) -> Path:
        return trained_in(tmp_path / "run", config_of(data, kind, train__steps=steps))

    run_dir = trained(2, None)
    assert part(run_dir).keys() == newest_state(run_dir).keys()
    trained(4, "last")
    trained(STEPS, "ema")
    check_averages(run_dir, "ema", steps_of(run_dir), begin=5)
    assert not any("recent_average" in name for name in newest_state(run_dir))
    trained(STEPS + 1, None)
    assert part(run_dir).keys() == newest_state(run_dir).keys()


def skipping(config: Config, run_dir: Path) -> str:
    """Trains without the updates of steps 1 and 4."""
    why = ["no targets" if step in (1, 4) else None for step in range(1, STEPS + 1)]
    with mock.patch.object(SkipPolicy, "why_skipped", side_effect=[(each, None) for each in why]):
        return run_training(config, run_dir)


def test_skipped_updates_do_not_count(data: Path, tmp_path: Path) -> None:
    run_ranks(skipping, 1, config_of(data), tmp_path)
    weights = steps_of(tmp_path)
    assert not steps_of(tmp_path, "optimizer.")[1]
    averages = steps_of(tmp_path, "optimizer.weight_average.")
    expected = ema_of([weights[step] for step in (2, 3, 5, 6, 7, 8)])
    for name, average in averages[STEPS].items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)
    assert different(averages[3], averages[4]) == []


# Read --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Returns the folder of a run with an average of its weights."""
    return trained_in(tmp_path_factory.mktemp("averaged") / "run", config_of(data))


def test_everything_that_opens_a_model_reads_it(
    averaged: Path, moebius: Callable[..., Any], tmp_path: Path
) -> None:
    line = by_step(averaged, "eval")[STEPS]
    assert "average_loss" not in by_step(averaged, "eval")[0]
    trained, mean = (api.evaluate(averaged, max_rows=8, weights=each) for each in CHOICES)
    assert (trained.result.loss, mean.result.loss) == (line["loss"], line["average_loss"])
    assert abs(line["loss"] - line["average_loss"]) > 1e-3
    assert read_history(averaged).average[STEPS] == line["average_loss"]
    assert draw_summary(averaged).stat().st_size > 0
    printed = io.StringIO()
    Console(file=printed, width=100).print(closing_words(JobStatus(averaged, State.SUCCEEDED)))
    assert f"averaged weights  {line['average_loss']:.4f}" in printed.getvalue()
    loaded = api.load(averaged, weights="average")
    weights, state = loaded.model.state_dict(), newest_state(averaged)
    assert (
        different(weights, {name: state[f"optimizer.weight_average.{name}"] for name in weights})
        == []
    )
    assert api.evaluate(loaded, max_rows=8).result.loss == line["average_loss"]
    saved = newest_state(api.save(loaded, tmp_path / "saved"))
    assert different(saved, {f"model.{name}": weight for name, weight in weights.items()}) == []
    of_prompt = ["--prompt", "ab", "--temperature", 0]
    for words in ([], ["--stride", "4"], ["--score", "ab ba"], of_prompt):
        trained, mean = (moebius("eval", averaged, *words, "--weights", each) for each in CHOICES)
        assert trained.out != mean.out, words
        assert (trained.code, mean.code) == (0, 0), mean.text
    words = ["--weights", "average", "--format", "safetensors", "--out", tmp_path / "out"]
    assert "averaged weights of step 8" in moebius("ckpt", "export", averaged, *words).text
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("embedding.weight"), weights["embedding"])


@pytest.mark.parametrize(
    ("kind", "given", "steps", "span"),
    [
        ("ema", 0.999, 1000, 0.999),
        ("ema", "500 steps", 1000, 0.5 ** (1 / 500)),
        ("ema", "1.28e5 tokens", 1000, 0.5 ** (1 / 1000)),
        ("ema", None, 1000, 0.5 ** (1 / 20)),
        ("last", "1280 tokens", 1000, 10),
        ("last", None, 1000, 100),
        (None, None, 1000, 0),
    ],
)
def test_decays_half_lives_and_windows(kind: Any, given: Any, steps: int, span: float) -> None:
    train = TrainConfig(steps=steps, average=kind, average_decay=given)
    assert train.average_span(128) == pytest.approx(span, rel=1e-12)


# Means of checkpoints ----------------------------------------------------------------------------


def test_the_mean_of_checkpoints_is_a_run(
    averaged: Path, data: Path, moebius: Callable[..., Any], tmp_path: Path
) -> None:
    named = [f"{averaged}@{step}" for step in (3, 6, 8)]
    answer = moebius("ckpt", "average", *named, "--run-dir", tmp_path / "mean")
    assert answer.code == 0, answer.text
    weights = steps_of(averaged)
    found = newest_state(tmp_path / "mean")
    assert found.keys() == {f"model.{name}" for name in weights[8]}
    for name in weights[8]:
        expected = (weights[3][name] + weights[6][name] + weights[8][name]) / 3
        assert torch.equal(found[f"model.{name}"], expected.float()), name
    source = read_source(tmp_path / "mean")
    assert source is not None
    assert source.given.count(str(averaged)) == 3
    assert "starts from the mean of" in source.words()
    assert "step 8, validation: loss" in moebius("eval", tmp_path / "mean").text
    again = config_of(data, train__steps=2)
    file = tmp_path / "again.json"
    again.save(file)
    start = start_from(str(tmp_path / "mean"), str(file))
    open_run(start.config, tmp_path / "again", start.source)
    run_ranks(run_training, 2, start.config, tmp_path / "again")
    found, begun = api.evaluate(tmp_path / "mean", max_rows=8), by_step(tmp_path / "again", "eval")
    assert begun[0]["loss"] == pytest.approx(found.result.loss, rel=1e-6)
    again = config_of(data, train__steps=STEPS + 1)
    trained_in(tmp_path / "mean", again)  # also goes on from there
    assert [*by_step(tmp_path / "mean")] == [STEPS + 1]
    shutil.rmtree(tmp_path / "mean" / "checkpoints")
    with pytest.raises(AssertionError, match="is gone: make it again in a new run folder"):
        run_ranks(run_training, 1, again, tmp_path / "mean")


def test_what_has_no_mean_is_refused(averaged: Path, data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(averaged / "checkpoints" / "step_00000003", tmp_path / "other")
    wide = config_of(data, None, train__steps=1, model=MODEL.changed({"norm": "post"}))
    other = trained_in(tmp_path / "wide", wide)
    for paths, words in (
        ([f"{averaged}@3"], "name two checkpoints or more"),
        ([f"{averaged}@3", f"{averaged}@8", str(copy)], "each once"),
        ([f"{averaged}@3", f"{averaged}@99"], "has no checkpoint of step 99"),
        ([f"{averaged}@3", str(other)], "its model.norm differ from those of"),
    ):
        with pytest.raises(ValueError, match=words):
            average_checkpoints([Path(path) for path in paths], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()
