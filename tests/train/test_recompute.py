"""A run that recomputes is the run that does not, step by step, and with compiled parts up to
rounding.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from world import run_ranks

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.layout import MeshConfig
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.train import run as parts_of_a_run
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.loop import train

MODEL = ModelConfig(
    vocab_size=257,
    d_model=24,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=12, num_experts=4, top_k=2),
    feed_forward=ExpertsConfig(
        num_experts=8, router=SigmoidConfig(top_k=3, expert_dropout=0.2), d_expert=16
    ),
)


def losses(data: Path, run_dir: Path, settings: dict[str, Any]) -> list[float]:
    """Of the steps and evaluations; with the names of compiled parts, if there are any, in a file
    of the run's folder.
    """
    run_dir.mkdir()
    config = Config(
        model=MODEL,
        mesh=MeshConfig(ep=2),
        checkpoint=CheckpointConfig(every=0),
        data=DataConfig(seq_len=16, directory=str(data)),
        prepare=PrepareConfig(tokenizer="bytes", vocab_size=257, validation_fraction=0.2),
        train=TrainConfig(steps=3, global_batch=8, micro_batch=2, eval_rows=8, **settings),
    )
    run_ranks(start, 2, config, run_dir)
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def start(config: Config, run_dir: Path) -> None:
    compile_whole = parts_of_a_run.compile_dense_parts

    def compile_quickly(model: Any) -> None:
        compile_whole(model, backend="aot_eager")
        (run_dir / "compiled").touch()

    parts_of_a_run.compile_dense_parts = (
        compile_quickly  # a process of its own: nothing is to be put back
    )
    train(config, run_dir)


@pytest.mark.slow  # tests/model/test_recompute.py compares single passes
def test_the_losses_of_a_run_do_not_depend_on_it(data: Path, tmp_path: Path) -> None:
    expected = losses(data, tmp_path / "none", {})
    assert len(expected) == 5
    assert losses(data, tmp_path / "selective", {"recompute": "selective"}) == expected
    compiled = losses(data, tmp_path / "full", {"recompute": "full", "compile": True})
    assert compiled == pytest.approx(expected, rel=1e-5)
    assert [path.name for path in sorted(tmp_path.glob("*/compiled"))] == ["compiled"]
