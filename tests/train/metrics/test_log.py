"""The log passes each line to all sinks, and writes it to metrics.jsonl at once."""

import json
from pathlib import Path

import pytest
from fake_sink import FakeSink, in_background

from moebius.train.metrics.log import MetricsLog


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


@pytest.mark.parametrize("text", [None, "", '{"kind": "train", "st'])
def test_a_deleted_or_replaced_file_gets_the_next_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, active=True) as log:
        log.write("train", 1, loss=3.0)
        path.unlink()
        if text is not None:
            path.write_text(text)
        log.write("train", 2, loss=2.0)
        log.write("train", 3, loss=1.0)
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line["step"] for line in lines] == [2, 3]
