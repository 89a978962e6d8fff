"""What a run on several ranks reports about its exchanges, and how it checks them on demand."""

from pathlib import Path
from typing import Any

import pytest
from parts import make_config
from small_model import MODEL
from torch import Tensor
from trained import column, lines, run_training
from world import run_ranks

from moebius.distributed.dispatch.exchange import AllToAll, ExchangeMismatch, Pending
from moebius.train.config.run_config import Config
from moebius.train.loop import train

WIDTH, REPEATS, SEQUENCES, POSITIONS = 24, 2, 8, 16
LAYERS = {f"{member}/{kind}" for member in (0, 1) for kind in ("feed_forward", "value", "output")}
ROUTES_PER_TOKEN = {"feed_forward": 3, "value": 2 * 2, "output": 2 * 2}


def config_of(data: Path, *, micro_batch: int = 2, steps: int = 2, **mesh: Any) -> Config:
    return make_config(
        data, model=MODEL, train__micro_batch=micro_batch, train__steps=steps, mesh=mesh
    )


def exchanges(config: Config, world: int, run_dir: Path, **environment: str) -> list[dict]:
    """Returns the exchanges of every step, by layer."""
    run_ranks(run_training, world, config, run_dir, environment=environment)
    return column(run_dir, "exchange")


@pytest.mark.slow
def test_every_train_line_tells_what_travelled(data: Path, tmp_path: Path) -> None:
    found = {
        name: exchanges(config_of(data, ep=2, dispatcher=name), 4, tmp_path / name)
        for name in ("alltoall", "dedup")
    }
    for name, steps in found.items():
        assert [set(layers) for layers in steps] == [LAYERS, LAYERS]
        for layers in steps:
            for layer, figures in layers.items():
                kind = layer.partition("/")[2]
                routes = SEQUENCES * POSITIONS * REPEATS * ROUTES_PER_TOKEN[kind]
                rows = (
                    SEQUENCES * POSITIONS * REPEATS * (2 if kind == "output" else 1)
                )  # an output's rows are heads
                assert figures["rows_one_per_route"] == routes
                if name == "alltoall":
                    assert figures["rows_sent"] == routes
                else:
                    assert rows <= figures["rows_sent"] <= min(2 * rows, routes)
                assert 1 <= figures["hottest_rank"] <= 2
                assert figures["bytes_intra_node"] > 0
                assert figures["bytes_inter_node"] == 0
                assert figures["waited_s"] > 0
    sent = [
        sum(figures["rows_sent"] for figures in found[name][0].values())
        for name in ("dedup", "alltoall")
    ]
    assert sent[0] < sent[1]


@pytest.mark.slow
def test_what_travelled_does_not_depend_on_how_the_batch_is_cut(data: Path, tmp_path: Path) -> None:
    whole, parts = (
        exchanges(config_of(data, ep=2, micro_batch=size, steps=1), 2, tmp_path / str(size))[0]
        for size in (4, 1)
    )
    for layer in LAYERS:
        for name in ("rows_sent", "rows_one_per_route", "bytes_intra_node", "hottest_rank"):
            assert whole[layer][name] == parts[layer][name], (layer, name)


@pytest.mark.slow
def test_bytes_between_nodes_are_told_apart(data: Path, tmp_path: Path) -> None:
    [layers] = exchanges(
        config_of(data, ep=2, steps=1), 2, tmp_path, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"
    )
    for figures in layers.values():
        assert figures["bytes_inter_node"] > 0
        assert figures["bytes_intra_node"] == 0


def test_a_run_whose_experts_are_all_here_says_nothing(data: Path, tmp_path: Path) -> None:
    run_ranks(run_training, 2, config_of(data, steps=1), tmp_path)
    assert all("exchange" not in line for line in lines(tmp_path, "train"))


# Checks on demand.


def run_spoiled(config: Config, run_dir: Path) -> tuple[str, int]:
    """Reorders rows sent to rank 0; returns how the run ends and after how many such exchanges."""
    spoiled, start = 0, AllToAll.start

    def exchange_rows(self: AllToAll, rows: Tensor) -> Pending:
        nonlocal spoiled
        out = start(self, rows)
        if rows.dim() == 2 and rows.shape[1] == WIDTH and self.group.rank() == 0:
            came = out.wait()
            came.copy_(came.flip(0))
            spoiled += 1
        return out

    AllToAll.start = exchange_rows
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        return train(config, run_dir), spoiled
    except ExchangeMismatch as error:
        return str(error), spoiled


@pytest.mark.slow
def test_a_run_that_checks_ends_where_rows_are_mixed_up_and_one_that_does_not_goes_on(
    data: Path, tmp_path: Path
) -> None:
    collectives = {"ep": 2, "dispatcher": "dedup"}  # rows in memory have checksums of their own
    trusting = run_ranks(run_spoiled, 2, config_of(data, steps=3, **collectives), tmp_path / "0")
    assert [ended for ended, _ in trusting] == ["finished", "finished"]
    for every in (1, 5):
        found = run_ranks(
            run_spoiled,
            2,
            config_of(data, steps=3, check_every=every, **collectives),
            tmp_path / str(every),
        )
        assert found[0][0] == found[1][0]
        assert found[0][0].startswith("rows were changed or swapped in transit: rank 0 received")
        spoiled = found[0][1]
        assert 0 < spoiled < trusting[0][1]
        assert (every == 1) == (spoiled == 1)


@pytest.mark.slow
def test_checks_change_no_number(data: Path, tmp_path: Path) -> None:
    for every in (0, 1):
        run_ranks(run_training, 2, config_of(data, ep=2, check_every=every), tmp_path / str(every))
    plain, checked = (column(tmp_path / str(every)) for every in (0, 1))
    assert plain == checked
