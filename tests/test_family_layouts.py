"""Routers with something to remember, or something to draw, across layouts: saved on one, taken up
on another.
"""

import json
from pathlib import Path

import pytest
from pairwise import slow_but
from test_family import data, run_config
from world import run_ranks

from moebius.train.config.run_config import Config
from moebius.train.loop import train

__all__ = ["data"]  # the fixture

# A selection bias, mean logits of a transition, halting, groups of sequences, a random second
# expert, dropout.
NAMES = ["deepseek", "transition", "sut", "expert_choice", "gshard", "sigma_moe_original"]


def run(config: Config, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    assert train(config, run_dir) == "finished"


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def placed(name: str, data: Path, *, steps: int, ep: int) -> Config:
    """What a capacity refuses depends on float rounding, which differs between layouts: here there
    is room for all.
    """
    config = run_config(name, data, steps=steps, precision="float32").model_dump()
    for factor in ("capacity_factor", "evaluation_capacity_factor"):
        if factor in config["model"]["feed_forward"]["router"]:
            config["model"]["feed_forward"]["router"][factor] = None
    if config["model"]["feed_forward"]["router"].get("balance_scope") == "global_batch":
        config["model"]["feed_forward"]["router"]["balance_scope"] = "micro_batch"
    return Config.model_validate(config | {"mesh": {"ep": ep}})


@pytest.mark.parametrize("name", slow_but(NAMES, "transition"))
def test_saved_on_two_ranks_with_ep_2_and_taken_up_on_one(
    name: str, data: Path, tmp_path: Path
) -> None:
    run_ranks(run, 1, placed(name, data, steps=4, ep=1), tmp_path / "one")
    run_ranks(run, 2, placed(name, data, steps=2, ep=2), tmp_path / "two")
    run_ranks(run, 1, placed(name, data, steps=4, ep=1), tmp_path / "two")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() == set(range(1, 5))
    assert two == pytest.approx(one, rel=1e-5)
