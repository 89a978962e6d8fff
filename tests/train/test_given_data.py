"""A run on a dataset of Python: the same on every layout, resumed, and refused on all ranks together."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parts import make_config
from small_model import MODEL
from trained import by_step, column, different, lines, newest_state, run_training
from world import run_ranks

from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.read import given
from moebius.data_pipeline.read.given import ADDRESS, giving
from moebius.train.config.errors import ConfigError
from moebius.train.config.run_config import Config
from moebius.train.record.run_folder import check_data, open_run

ROWS = np.random.default_rng(5).integers(0, 257, (50, 17))


def on_ranks(
    train: Any, world: int, run_dir: Path, dataset: object, *, steps: int = 4, **mesh: Any
) -> list[Any]:
    config = make_config(model=MODEL, mesh=mesh, train__steps=steps, checkpoint__every=2)
    with giving(config.data, dataset, vocab_size=257) as data:
        config = config.model_copy(update={"data": data})
        open_run(config, run_dir)
        check_data(config, run_dir, is_whole=True)
        return run_ranks(train, world, config, run_dir, environment={ADDRESS: os.environ[ADDRESS]})


def test_layouts_and_a_resumed_run_see_the_same_rows(tmp_path: Path) -> None:
    data = (ROWS[:40], ROWS[40:])
    alone, parted = tmp_path / "alone", tmp_path / "parted"
    on_ranks(run_training, 1, alone, data)
    on_ranks(run_training, 2, parted, data, ep=2, steps=2)
    on_ranks(run_training, 2, parted, data, ep=2)
    on_ranks(run_training, 2, tmp_path / "together", data, ep=2)
    assert different(newest_state(parted), newest_state(tmp_path / "together")) == []
    for name in ("digest", "tokens", "passes"):
        assert column(alone, name) == column(parted, name)
    assert column(alone) == pytest.approx(column(parted), rel=1e-5)
    one, other = (by_step(run, "eval")[4] for run in (alone, parted))
    assert one["tokens"] == other["tokens"] == 8 * 16
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_run_without_validation_rows_trains_and_another_dataset_is_refused(
    tmp_path: Path,
) -> None:
    on_ranks(run_training, 1, tmp_path / "run", list(ROWS), steps=2)
    assert lines(tmp_path / "run", "eval") == []
    assert column(tmp_path / "run", "passes")[-1] == 16 / 50
    kept = make_config(train__eval_every=2, checkpoint__keep_best="validation")
    with giving(kept.data, ROWS, vocab_size=257) as data:
        with pytest.raises(DataError, match="no validation rows"):
            check_data(kept.model_copy(update={"data": data}), tmp_path, is_whole=True)
    changed = ROWS.copy()
    changed[-1] += 1
    for other in (ROWS[:49], changed % 257):
        with pytest.raises(ConfigError, match=r"data.dataset: the run has 'train: 50 rows"):
            on_ranks(run_training, 1, tmp_path / "run", other)


class Elsewhere(Sequence[Any]):
    """Gives other items to ranks than to the program."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: Any) -> Any:
        return [int(threading.current_thread() is threading.main_thread())] * 17


def refused(config: Config, run_dir: Path) -> str:
    with pytest.raises(ValueError, match="the ranks") as found:
        run_training(config, run_dir)
    return str(found.value)


def refused_where_one_differs(config: Config, run_dir: Path) -> str:
    ask = given._ask
    given._ask = lambda *asked: ask(*asked) + (os.environ["RANK"] == "1")
    return refused(config, run_dir)


def test_all_ranks_refuse_a_dataset_that_is_not_the_same_everywhere(tmp_path: Path) -> None:
    one, other = on_ranks(refused_where_one_differs, 2, tmp_path / "differs", ROWS)
    assert one == other
    assert "the ranks differ in the dataset" in one
    assert "on rank 0" in one
    assert "on rank 1" in one
    one, other = on_ranks(refused, 2, tmp_path / "elsewhere", Elsewhere())
    assert one == other
    assert "depend on its index alone" in one
