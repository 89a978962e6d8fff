"""Two ranks train, and go on after a checkpoint: TensorBoard has every step once."""

import json
from pathlib import Path

import pytest
from fake_sink import read_board
from small_corpus import data_of_words
from small_model import TINY
from world import run_ranks

from moebius.train.config.metrics_config import MetricsConfig
from moebius.train.config.run_config import (
    CheckpointConfig,
    Config,
    MeshConfig,
    TrainConfig,
)
from moebius.train.loop import train


def config_of(data: Path, steps: int) -> Config:
    metrics = MetricsConfig(heat_map_every=2, depths_every=1, sample_tokens=4)
    return Config(
        model=TINY,
        data=data_of_words(data, seq_len=16),
        mesh=MeshConfig(ep=2),
        checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(steps=steps, global_batch=4, micro_batch=2, eval_rows=4, metrics=metrics),
    )


@pytest.mark.slow
def test_every_step_is_there_once_and_the_run_is_one(data: Path, tmp_path: Path) -> None:
    run_ranks(train, 2, config_of(data, 2), tmp_path)
    run_ranks(train, 2, config_of(data, 4), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = {line["step"]: line for line in lines if line["kind"] == "train"}
    board = read_board(tmp_path)
    losses = [(event.step, event.value) for event in board.Scalars("loss/train")]
    assert losses == [(step, pytest.approx(told[step]["loss"])) for step in (1, 2, 3, 4)]
    sent = board.Scalars("exchange/rows_sent/0/feed_forward")
    assert sent[0].value == told[1]["exchange"]["0/feed_forward"]["rows_sent"]
    assert [picture.step for picture in board.Images("experts/load/feed_forward")] == [1, 3]
    texts = [event.tensor_proto.string_val[0] for event in board.Tensors("samples/1/text_summary")]
    samples = [line["samples"] for line in lines if line["kind"] == "samples"]
    assert len(samples) == len(texts) == 3  # at the beginning, and at both ends
    assert all("▶".encode() in text for text in texts)
    assert all(set(sample) == {"prompt", "continuation"} for sample in samples[0])
    events = [event.tensor_proto.string_val[0] for event in board.Tensors("events/text_summary")]
    assert b"generation 0 goes on from step 2 with 2 ranks" in events
