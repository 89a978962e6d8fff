"""The log passes each line to all sinks, and writes it to metrics.jsonl at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_sink import FakeSink, in_background
from jobs import wait_for

from moebius.cluster.report.history import describe_trouble
from moebius.distributed.checkpoint.source import SOURCE, Source
from moebius.model.balance import DepthLoad
from moebius.train.config.resolve import resolve
from moebius.train.loss import MicroBatchLoss
from moebius.train.metrics.log import MetricsLog
from moebius.train.metrics.sinks import open_metrics
from moebius.train.metrics.step_metrics import StepMeter
from moebius.train.recipes.smoke import RECIPES


def test_each_line_goes_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "opensesame")
    fakes = [FakeSink(), FakeSink()]
    log = MetricsLog(tmp_path, active=True, sinks=[in_background(fake) for fake in fakes])
    log.write("train", 1, loss=float("nan"), expert_load=[[0.5, 0.5]])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before anything is closed
    values = json.loads(line)
    assert list(values) == ["kind", "step", "time", "loss", "expert_load"]
    assert (values["kind"], values["step"], values["loss"]) == ("train", 1, "nan")
    log.write("note", 1, texts=["opensesame", "x"], why="opensesame!")
    log.write("end", 1, state="stopped")
    log.close()
    log.close()
    for fake in fakes:
        assert fake.steps == [1, 1, 1]
        assert list(fake.records[0].values) == ["loss"]
        assert fake.records[1].values == {"texts": ["***", "x"], "why": "***!"}
        assert fake.closed == ["stopped"]


def test_an_error_closes_the_sinks_as_failed(tmp_path: Path) -> None:
    fake = FakeSink()
    log = MetricsLog(tmp_path, active=True, sinks=[in_background(fake)])
    log.write("train", 1, loss=1.0)
    with pytest.raises(ZeroDivisionError), log:
        log.write("train", 2, loss=1 / 0)
    assert (fake.steps, fake.closed) == ([1], ["failed"])


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, active=False) as log:
        log.write("train", 1, loss=1.0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_lines_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path, active=True)
    log.write("train", 1, loss=1.0)
    log.write("train", 2, loss=1.0)
    log.close()
    assert caplog.text.count("could not be written") == 1


def replaced_by_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("/dev/null")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "meddle",
    [
        Path.unlink,
        lambda path: (path.unlink(), path.write_text("")),
        lambda path: (path.unlink(), path.write_text('{"kind": "train", "st')),
        lambda path: path.write_text(""),
        lambda path: os.truncate(path, 30),
        replaced_by_a_link,
        replaced_by_a_folder,
    ],
)
def test_a_file_that_somebody_changes_gets_all_later_lines_and_says_so_once(
    tmp_path: Path, meddle: Callable[[Path], object]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, active=True) as log:
        log.write("train", 1, loss=3.0)
        meddle(path)
        log.write("train", 2, loss=2.0)
        log.write("train", 3, loss=1.0)
    assert not path.is_symlink()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("gap", 2),
        ("train", 2),
        ("train", 3),
    ]
    assert "deleted, cut or replaced: it lacks the steps before 2" in str(
        describe_trouble(lines[0])
    )


@pytest.mark.parametrize("text", [None, ""])
@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize("step", [None, 4, 5, -1], ids="written after step {}".format)
def test_a_run_that_continues_says_that_its_file_is_gone(
    tmp_path: Path, text: str | None, has_trained: bool, step: int | None
) -> None:
    if has_trained:
        (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
    if step is not None:  # by `ckpt grow`, without having trained up to there
        source = Source(kind="written", given="/run", path="/run", digest="", step=step)
        (tmp_path / SOURCE).write_text(source.as_text() if step > 0 else "{}")  # damaged
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    config = resolve("smoke", ["train.sinks=[]"], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=6) as log:
        log.write("train", 6, loss=1.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lacks = has_trained and step != 5  # without checkpoints, it is a branch
    assert [line["kind"] for line in lines] == ["gap", "train"][not lacks :]


def test_a_sink_that_lacks_lines_says_so_in_the_file(tmp_path: Path) -> None:
    fake = FakeSink()
    fake.failures = 1000
    log = MetricsLog(tmp_path, active=True, sinks=[in_background(fake)])
    log.write("train", 1, loss=1.0)
    wait_for(lambda: fake.failures <= 997)
    log.write("end", 1, state="finished")
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [describe_trouble(line) for line in lines if line["kind"] == "gap"]
    assert len(told) == 2
    assert str(told[0]).startswith("fake cannot be written (OSError: the disk is full")
    assert told[1] == "fake lacks 2 lines in all, which metrics.jsonl has"


def test_a_step_sums_the_reports_of_its_micro_batches() -> None:
    """One that only some micro-batches report is the sum over these; no report is changed."""
    meter, reports = StepMeter(), []
    for number in (1.0, 2.0, 4.0):
        load = DepthLoad(torch.full((2, 3), int(number)), torch.full((2,), 5), torch.ones(2))
        auxiliary = {"own": torch.tensor(number)} if number > 1 else {}
        loss, wide = torch.tensor(number), torch.tensor([number], dtype=torch.float64)
        reports.append(
            MicroBatchLoss(loss, loss, 2 * loss, auxiliary, {"value": load}, {"0/value/load": wide})
        )
        meter.add(reports[-1])
    assert meter.loss == 7
    assert meter.loads()["value"].tolist() == [[7] * 3] * 2
    assert meter._sums["auxiliary/own"] == 6
    assert meter._sums["value/wanted"].tolist() == [15, 15]
    assert meter._carried["0/value/load"].item() == 7
    assert [report.cross_entropy.item() for report in reports] == [1, 2, 4]
