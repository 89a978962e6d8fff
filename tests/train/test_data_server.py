"""One rank of a node starts the data server, the others find it; a run's rows do not depend on it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folder import MadeFolder, documents
from parts import make_config
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from trained import lines, run_training
from world import run_ranks

from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.serve.protocol import ServerJob
from moebius.data_pipeline.serve.start import ServerHandle
from moebius.distributed.process.process import Process
from moebius.train import loop
from moebius.train import rank_data as data_server
from moebius.train.config.run_config import Config
from moebius.train.rank_data import open_data_server
from moebius.train.recipes.smoke import smoke
from moebius.train.run import Run

ADDRESS = Path("a-folder/socket")


@pytest.fixture
def config(tmp_path) -> Config:
    made = MadeFolder(tmp_path / "data").seal("text", documents(0, 20))
    config = smoke()
    return config.model_copy(update={"data": made.config(server="on")})


def _process(rank: int, store: HashStore, *, ranks_per_node: int = 2) -> Process:
    return Process(
        rank=rank,
        world_size=4,
        local_rank=rank % ranks_per_node,
        device=torch.device("cpu"),
        backend="gloo",
        timeout_s=0.1,
        ranks_per_node=ranks_per_node,
        store=store,
    )


def test_the_first_rank_of_each_node_starts_one_and_the_second_finds_it(config, monkeypatch):
    started: list[ServerJob] = []

    def start(job: ServerJob) -> ServerHandle:
        started.append(job)
        return ServerHandle(ADDRESS.with_name(str(job.first_rank)))

    monkeypatch.setattr(data_server, "start_server", start)
    store = HashStore()
    for turn in range(2):
        found = [open_data_server(config, _process(rank, store), 16) for rank in range(4)]
        names = [None if handle is None else handle.address.name for handle in found]
        assert names == ["0", "0", "2", "2"]
        jobs = started[2 * turn :]
        assert [(job.first_rank, job.ranks_here, job.num_ranks) for job in jobs] == [
            (0, 2, 4),
            (2, 2, 4),
        ]
        assert jobs[0].start_sample == 16
    auto = config.model_copy(update={"data": config.data.model_copy(update={"server": "auto"})})
    assert open_data_server(auto, _process(0, store, ranks_per_node=1), 0) is None
    assert [open_data_server(auto, _process(rank, store), 0) for rank in (0, 1)] == [None] * 2
    assert len(started) == 4
    assert open_data_server(auto, _process(0, store, ranks_per_node=4), 0) is not None


def test_off_asks_nobody_and_a_server_that_cannot_start_is_told(config, monkeypatch, caplog):
    def fails(job: ServerJob) -> ServerHandle:
        raise DataError("no room for a folder")

    monkeypatch.setattr(data_server, "start_server", fails)
    store = HashStore()
    off = config.model_copy(update={"data": config.data.model_copy(update={"server": "off"})})
    assert open_data_server(off, _process(1, store), 0) is None
    auto = config.model_copy(update={"data": config.data.model_copy(update={"server": "auto"})})
    with caplog.at_level(logging.WARNING):
        ranks = [_process(rank, store, ranks_per_node=4) for rank in range(4)]
        assert [open_data_server(auto, rank, 0) for rank in ranks] == [None] * 4
        assert "no room for a folder" in caplog.text
        assert open_data_server(config, _process(3, store), 0) is None
        assert "reports no data server" in caplog.text
    with pytest.raises(DataError, match="no room for a folder"):
        open_data_server(config, _process(0, HashStore()), 0)


@pytest.mark.slow
def test_a_run_is_the_same_with_a_server_without_one_and_with_one_that_is_killed(tmp_path):
    made = MadeFolder(tmp_path / "data")
    made.seal("text", documents(0, 400), documents(1, 40)).complete()
    losses = {}
    for server in ("off", "on", "killed"):
        data = made.config(server="off" if server == "off" else "on", server_bytes=4000)
        run_dir = tmp_path / server
        config = make_config(data=data, train__steps=12)
        run_ranks(_train_killing if server == "killed" else run_training, 2, config, run_dir)
        steps = lines(run_dir, "train")
        losses[server] = [(line["loss"], line["digest"]) for line in steps]
        alone = [line.get("ranks_without_data_server", 0) for line in steps]
        assert alone[0] == 0
        assert alone[-1] == (2 if server == "killed" else 0)
    assert losses["on"] == losses["off"] == losses["killed"]
    assert len(losses["on"]) == 12


def _train_killing(config: Config, run_dir: Path) -> str:
    """Trains, and kills the server after the third step."""
    started: list[ServerHandle] = []
    start_server, step = data_server.start_server, loop.step

    def start(job: ServerJob) -> ServerHandle:
        started.append(start_server(job))
        return started[0]

    def stepping(run: Run, *arguments: Any, **options: Any) -> loop.StepResult:
        result = step(run, *arguments, **options)
        if started and started[0].process is not None and run.progress.step == 3:
            started[0].process.kill()
            started[0].process.wait()
        return result

    data_server.start_server, loop.step = start, stepping
    return run_training(config, run_dir)
