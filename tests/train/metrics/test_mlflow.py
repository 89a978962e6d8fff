"""MLflow's own client, with a store of files in place of a server."""

from pathlib import Path
from typing import Any

import pytest
from fake_sink import facts_of, line_of_loads

from moebius.train.metrics.records import Record
from moebius.train.sinks.mlflow import MLflow

pytestmark = pytest.mark.slow  # MLflow's import takes seconds


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return tracking.MlflowClient()


def test_a_run_that_goes_on_is_the_same_run_and_repeats_no_step(
    tmp_path: Path, client: Any
) -> None:
    sink = MLflow(facts_of(tmp_path))
    sink.write([line_of_loads(1), line_of_loads(2), line_of_loads(3)])
    sink.close("failed")
    sink = MLflow(facts_of(tmp_path))
    sink.write([line_of_loads(2, 9.0), line_of_loads(3, 9.0), line_of_loads(4)])
    sink.write([Record("eval", 4, 0.0, {"loss": 1.25})])
    sink.close("finished")
    experiment = client.get_experiment_by_name("moebius")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(one.step, one.value) for one in losses] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert run.data.metrics["loss/validation"] == 1.25
    assert run.data.params["train.steps"] == "9"


def test_more_numbers_than_one_request_takes(tmp_path: Path, client: Any) -> None:
    sink = MLflow(facts_of(tmp_path))
    sink.write([line_of_loads(step) for step in range(1, 401)])  # 3 numbers each
    sink.close("stopped")
    (run,) = client.search_runs([client.get_experiment_by_name("moebius").experiment_id])
    assert run.info.status == "KILLED"
    assert len(client.get_metric_history(run.info.run_id, "loss/train")) == 400


def test_a_run_that_the_server_does_not_know_is_begun_anew(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    MLflow(facts_of(tmp_path)).write([line_of_loads(3)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/other")
    sink = MLflow(facts_of(tmp_path))
    sink.write([line_of_loads(2)])
    sink.close("stopped")
    assert len(list((tmp_path / "other").glob("*/*/metrics/loss/train"))) == 1
