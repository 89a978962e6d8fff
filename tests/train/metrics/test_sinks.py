"""Which sinks a configuration opens; one that cannot be is one clear error on all ranks, before the
first step.
"""

import json
import sys
from pathlib import Path

import pytest
from small_corpus import data_of_words
from small_model import TINY
from world import RankFailed, run_ranks

from moebius.train.config.metrics_config import MetricsConfig
from moebius.train.config.run_config import Config, ConfigError, TrainConfig, resolve
from moebius.train.loop import train
from moebius.train.metrics.sinks import check_sinks, open_metrics, why_not_open
from moebius.train.recipes.smoke import RECIPES


def config_of(data: Path, *sinks: str) -> Config:
    return Config(
        model=TINY,
        data=data_of_words(data, seq_len=16),
        train=TrainConfig(
            steps=2,
            global_batch=4,
            micro_batch=2,
            eval_rows=4,
            metrics=MetricsConfig.model_validate({"sinks": sinks}),
        ),
    )


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = resolve("smoke", ['train.metrics.sinks=["tensorboard", "wandb"]'], RECIPES)
    with pytest.raises(ConfigError, match=r"'wandb' cannot be imported .*moebius\[wandb\]"):
        check_sinks(config, lambda act: act())


def test_a_server_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", pytest)  # any module
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert "'mlflow' needs the environment variable MLFLOW_TRACKING_URI" in why_not_open(
        ("mlflow",)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert why_not_open(("mlflow",)) == ""


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('train.metrics.sinks=["tensorbord"]', "'tensorboard', 'wandb', 'mlflow' or 'prometheus'"),
        ('train.metrics.sinks=["wandb", "wandb"]', "names a sink twice"),
        ("train.metrics.sink=[]", "did you mean train.metrics.sinks"),
        ("train.metrics.prometheus_port=70000", "less than or equal to 65535"),
        ("train.metrics.depths_every=0", "greater than 0"),
    ],
)
def test_bad_settings_are_refused_in_words(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", [override], RECIPES)
    assert problem in str(caught.value)


def test_no_sink_but_the_lines(tmp_path: Path) -> None:
    config = resolve("smoke", ["train.metrics.sinks=[]"], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=1) as log:
        log.write("train", 1, loss=1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_rank_that_takes_the_place_of_rank_0_goes_on_without_a_sink_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = resolve("smoke", ['train.metrics.sinks=["wandb"]'], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=1) as log:
        log.write("train", 1, loss=1.0)
    assert "'wandb' cannot be imported" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.0


def test_a_folder_that_cannot_be_written_costs_the_curves_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    config = resolve("smoke", [], RECIPES)
    with open_metrics(config, tmp_path, active=True, first_step=1) as log:
        log.write("train", 1, loss=1.0)
        log.write("end", 1, state="finished")
    assert "tensorboard cannot be written" in caplog.text
    assert "lacks 2 lines in all" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def train_without_wandb(config: Config, run_dir: Path) -> str:
    """Only rank 0 lacks it, and only rank 0 would use it."""
    sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
    return train(config, run_dir)


@pytest.mark.slow
def test_all_ranks_end_before_the_first_step(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"ConfigError: train\.metrics\.sinks=\['wandb'\]"):
        run_ranks(train_without_wandb, 2, config_of(data, "wandb"), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
