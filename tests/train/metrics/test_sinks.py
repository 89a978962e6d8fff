"""TensorBoard, W&B and MLflow get every step once, across restarts.

A sink that cannot work is one clear error on all ranks before the first step.
"""

import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_sink import facts_of, line, read_board
from parts import make_config
from tensorboard.summary.writer import event_file_writer
from world import RankFailed, run_ranks

from moebius.train.config.errors import ConfigError
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.metrics.log import Record
from moebius.train.metrics.sinks import (
    MLflow,
    SentLines,
    TensorBoard,
    WandB,
    check_sinks,
    open_metrics,
)
from moebius.train.recipes.smoke import RECIPES

# TensorBoard ------------------------------------------------------------------------------------


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_board(run_dir).Scalars("loss/train")]


def test_tensorboard_shows_curves_and_configuration(tmp_path: Path) -> None:
    board = TensorBoard(facts_of(tmp_path), first_step=1)
    sample = Record("samples", 2, 1.0, {"prompt": "Once", "text": " upon"})  # no curve
    board.write([line(step) for step in range(1, 13)])
    board.write([Record("scores", 2, 1.0, {"piqa": 0.5}), sample])
    board.close("finished")
    found = read_board(tmp_path)
    assert found.Scalars("scores/piqa")[0].value == 0.5
    assert losses(tmp_path) == [(step, 1.0) for step in range(1, 13)]
    assert found.Scalars("loss/train")[0].wall_time == 101.0
    assert found.Scalars("experts/max_violation/feed_forward")[3].value == 0.5
    second = found.Scalars("experts_by_depth/max_violation/feed_forward/depth_02")
    assert [(event.step, event.value) for event in second] == [(1, 0.25), (11, 0.25)]
    [configuration] = found.Tensors("configuration/text_summary")
    assert b'"d_model": 16' in configuration.tensor_proto.string_val[0]


@pytest.fixture
def files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process number its event files from 0.

    Files are read by name: second, host, process, number. Here all have one second and process, and
    a process's tenth file would sort before its ninth.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("files_in_order")
def test_tensorboard_hides_abandoned_steps(tmp_path: Path) -> None:
    board = TensorBoard(facts_of(tmp_path), first_step=1)
    board.write([line(step) for step in (1, 2, 3)])
    board.close("failed")
    # another process continues from the checkpoint of step 1
    board = TensorBoard(facts_of(tmp_path), first_step=2)
    board.write([line(2, 7.0)])
    board.close("stopped")
    assert losses(tmp_path) == [(1, 1.0), (2, 7.0)]


@pytest.mark.usefixtures("files_in_order")
def test_tensorboard_that_is_reopened_after_a_failure_hides_nothing(tmp_path: Path) -> None:
    board = TensorBoard(facts_of(tmp_path), first_step=1)
    board.write([line(1)])
    board.close("failed")
    board = TensorBoard(facts_of(tmp_path), first_step=None)
    board.write([line(2)])
    board.close("finished")
    assert losses(tmp_path) == [(1, 1.0), (2, 1.0)]


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Weights & Biases -------------------------------------------------------------------------------


def stored_records(data: bytes) -> Iterator[bytes]:
    """Reads a .wandb file: LevelDB's log format, after seven bytes with the version.

    It has blocks of 32 KiB; a record is a checksum, a length, a continuation flag and the bytes.
    """
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too little room for another header
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@dataclass
class Stored:
    """Holds what W&B has stored."""

    rows: list[tuple[str, int, float | None]] = field(default_factory=list)  # run, step, loss
    runs: list[Any] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)


@pytest.fixture
def read_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Stored]:
    """Lets W&B write files, and reads them."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    records: Any = wandb_internal_pb2
    variables = {"MODE": "offline", "API_KEY": "a" * 40, "CACHE_DIR": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def read() -> Stored:
        stored = Stored()
        files = tmp_path.glob("wandb/offline-run-*/*.wandb")
        for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
            assert b"a" * 40 not in file.read_bytes()
            for data in stored_records(file.read_bytes()):
                record = records.Record.FromString(data)
                if record.HasField("run"):
                    stored.runs.append(record.run)
                items = record.history.item
                row = {"/".join(i.nested_key): json.loads(i.value_json) for i in items}
                if row:
                    name = stored.runs[-1].display_name
                    stored.rows.append((name, row["step"], row.get("loss/train")))
                if record.HasField("exit"):
                    stored.exits.append(record.exit.exit_code)
        return stored

    return read


def test_wandb_continues_one_run_and_gets_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_wandb: Callable[[], Stored]
) -> None:
    start, evaluation = (
        Record("start", 1, 0.0, {"generation": 2}),
        Record("eval", 3, 0.0, {"loss": 1}),
    )
    for records, state in (
        ([line(1), line(2), line(3), evaluation], "failed"),
        ([start, line(2), line(3), line(4)], "finished"),
    ):
        sink = WandB(facts_of(tmp_path))
        sink.write(records)
        sink.close(state)
        monkeypatch.setenv("WANDB_PROJECT", "mine")
    stored = read_wandb()
    assert [step for _, step, _ in stored.rows] == [1, 2, 3, 3, 1, 4]
    assert len({run.run_id for run in stored.runs}) == 1
    assert [run.project for run in stored.runs] == ["moebius", "mine"]
    assert stored.exits == [1, 0]


@pytest.mark.slow
def test_wandb_gets_another_run_from_where_a_run_went_back(
    tmp_path: Path, read_wandb: Callable[[], Stored]
) -> None:
    attempts = (
        [line(1), line(2), line(3), line(4)],
        [line(2), line(3, 7.0), line(4, 7.0)],  # other samples show at step 3
        [line(3, 7.0), line(4, 7.0), line(5, 7.0)],  # the same again, after a failure
    )
    for records in attempts:
        sink = WandB(facts_of(tmp_path))
        for record in records:
            sink.write([record])
        sink.close("finished")
    stored, name = read_wandb(), tmp_path.name
    assert stored.rows == [
        *((name, step, 1.0) for step in (1, 2, 3, 4)),
        *((f"{name} from step 2", step, loss) for step, loss in ((2, 1.0), (3, 7.0), (4, 7.0))),
        (f"{name} from step 2", 5, 7.0),
    ]
    first, _, second, third = stored.runs
    assert first.run_id != second.run_id == third.run_id
    assert {run.run_group for run in stored.runs} == {name}


@pytest.mark.parametrize(
    ("before", "now", "is_other"),
    [
        ({"loss": 2.0}, {"loss": 2.0001}, False),  # on other ranks
        ({"loss": 2.0}, {"loss": 2.1}, True),
        ({"loss": None}, {"loss": None}, False),  # no target counted
        ({"loss": None}, {"loss": 2.0}, True),
        ({"loss": math.nan}, {"loss": math.nan}, False),
        ({"loss": math.nan}, {"loss": 2.0}, True),
        ({"loss": 2.0, "digest": 1}, {"loss": 2.0, "digest": 2}, True),  # other samples
        ({"loss": 2.0, "learning_rate": 0.1}, {"loss": 2.0, "learning_rate": 0.2}, True),
    ],
)
def test_a_repeated_step_is_told_from_another(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], is_other: bool
) -> None:
    sent = SentLines(facts_of(tmp_path), "fake")
    sent.begin_run("a")
    sent.note([Record("train", 4, 0.0, before)])
    again = SentLines(facts_of(tmp_path), "fake")
    record = Record("train", 4, 0.0, now)
    assert again.unsent([record]) == [record] * is_other
    assert again.run == (None if is_other else "a")


@pytest.mark.parametrize("meddle", [Path.unlink, lambda path: path.write_text(""), folder_instead])
def test_a_changed_file_of_sent_lines_still_names_the_run(
    tmp_path: Path, meddle: Callable[[Path], object]
) -> None:
    sent = SentLines(facts_of(tmp_path), "fake")
    sent.begin_run("a")
    meddle(tmp_path / "sinks" / "fake.json")
    sent.note([line(4)])
    again = SentLines(facts_of(tmp_path), "fake")
    assert (again.run, again.unsent([line(4)])) == ("a", [])


# MLflow -----------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns MLflow's own client on a file store instead of a server."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return tracking.MlflowClient()


@pytest.mark.slow
def test_mlflow_continues_one_run_and_gets_no_step_twice(tmp_path: Path, client: Any) -> None:
    sink = MLflow(facts_of(tmp_path))
    sink.write([line(step) for step in range(1, 401)])  # 2 numbers each, and more in every tenth
    sink.close("failed")
    sink = MLflow(facts_of(tmp_path))
    sink.write([line(399), line(400), line(401)])
    sink.write([Record("eval", 401, 0.0, {"loss": 1.25})])
    sink.close("finished")
    experiment = client.get_experiment_by_name("moebius")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    found = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(one.step, one.value) for one in found] == [(step, 1.0) for step in range(1, 402)]
    assert run.data.metrics["loss/validation"] == 1.25
    assert run.data.params["train.steps"] == "9"


@pytest.mark.slow
def test_mlflow_gets_another_run_from_where_a_run_went_back(tmp_path: Path, client: Any) -> None:
    for loss in (1.0, 7.0):
        sink = MLflow(facts_of(tmp_path))
        sink.write([line(step, loss) for step in (2, 3)])
        sink.close("finished")
    experiment = client.get_experiment_by_name("moebius")
    found = client.search_runs([experiment.experiment_id])
    names = {run.info.run_name: run.data.metrics["loss/train"] for run in found}
    assert names == {tmp_path.name: 1.0, f"{tmp_path.name} from step 2": 7.0}


@pytest.mark.slow
def test_mlflow_begins_a_new_run_where_the_server_does_not_know_the_old_one(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    MLflow(facts_of(tmp_path)).write([line(3)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/other")
    sink = MLflow(facts_of(tmp_path))
    sink.write([line(2)])
    sink.close("stopped")
    assert len(list((tmp_path / "other").glob("*/*/metrics/loss/train"))) == 1


# A run's sinks ----------------------------------------------------------------------------------


def test_what_a_sink_lacks_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", pytest)  # any module
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = resolve("smoke", ['train.sinks=["wandb", "mlflow"]'], RECIPES)
    with pytest.raises(ConfigError) as caught:
        check_sinks(config, lambda act: act(), tmp_path)
    assert "moebius[wandb]" in str(caught.value)
    assert "MLFLOW_TRACKING_URI" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "refusal"),
    [
        ({}, "there is no API key): run `wandb login` or set WANDB_API_KEY"),
        ({"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandb_needs_a_key_unless_it_sends_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    refusal: str | None,
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "netrc"),
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # without its settings
    wandb.teardown()
    config = resolve("smoke", ['train.sinks=["wandb"]'], RECIPES)
    with nullcontext() if refusal is None else pytest.raises(ConfigError, match=re.escape(refusal)):
        check_sinks(config, lambda act: act(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://127.0.0.1:99999", "nothing://"])
def test_mlflow_must_have_answered_this_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    config = resolve("smoke", ['train.sinks=["mlflow"]'], RECIPES)
    with pytest.raises(ConfigError, match=r"'mlflow' cannot be used .*MLFLOW_TRACKING_URI is up"):
        check_sinks(config, lambda act: act(), tmp_path)
    SentLines(facts_of(tmp_path), "mlflow").begin_run("a")  # a restart may meet an outage
    if address == "http://127.0.0.1:1":
        check_sinks(config, lambda act: act(), tmp_path)


def test_no_sink_but_the_lines(tmp_path: Path) -> None:
    config = resolve("smoke", ["train.sinks=[]"], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=1) as log:
        log.write("train", 1, loss=1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_written_costs_the_curves_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    config = resolve("smoke", [], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=1) as log:
        log.write("train", 1, loss=1.0)
        log.write("end", 1, state="finished")
    assert "tensorboard lacks 2 lines in all" in caplog.text
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["kind"] for line in text.splitlines()].count("gap") == 2


def train_without_wandb(config: Config, run_dir: Path) -> str:
    """Trains without W&B, which only rank 0 would use."""
    sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
    return train(config, run_dir)


@pytest.mark.slow
def test_all_ranks_end_before_the_first_step(data: Path, tmp_path: Path) -> None:
    config = make_config(data, train__sinks=("wandb",))
    with pytest.raises(RankFailed, match=r"ConfigError: train\.sinks=\['wandb'\]"):
        run_ranks(train_without_wandb, 2, config, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_ranks_that_resume_write_every_step_once(data: Path, tmp_path: Path) -> None:
    def config(steps: int) -> Config:
        return make_config(
            data,
            mesh__ep=2,
            checkpoint__every=2,
            train={"steps": steps, "global_batch": 4, "eval_rows": 4},
        )

    run_ranks(train, 2, config(2), tmp_path)
    run_ranks(train, 2, config(4), tmp_path)
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = {line["step"]: line for line in lines if line["kind"] == "train"}
    assert losses(tmp_path) == [(step, pytest.approx(told[step]["loss"])) for step in (1, 2, 3, 4)]
    board = read_board(tmp_path)
    sent = board.Scalars("exchange/rows_sent/0/feed_forward")
    assert sent[0].value == told[1]["exchange"]["0/feed_forward"]["rows_sent"]
