"""Runs that train in this process within a second: tiny, on bytes or a small BPE."""

import json
from pathlib import Path

from parts import make_config
from small_corpus import sentences
from small_model import TINY

from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.model.config.model_config import ModelConfig
from moebius.train.loop import train


def prepare_bytes(place: Path, *, tokenizer: str = "bytes", vocab_size: int = 257) -> Path:
    """Prepares a folder of bytes and returns it."""
    file = place / "text.jsonl"
    file.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in sentences(0, 60)), encoding="utf-8"
    )
    config = PrepareConfig(
        input=(str(file),), tokenizer=tokenizer, vocab_size=vocab_size, validation_fraction=0.2
    )
    prepare(config, place / "shards")
    return place / "shards"


def train_bytes(
    folder: Path,
    run_dir: Path,
    model: ModelConfig = TINY,
    *,
    seq_len: int = 64,
    tokenizer: str = "bytes",
) -> Path:
    """Trains two steps and returns the run folder."""
    sizes = {"steps": 2, "global_batch": 4, "micro_batch": 4, "eval_rows": 4}
    text = {"tokenizer": tokenizer, "vocab_size": model.vocab_size}
    run = make_config(folder, model=model, data__seq_len=seq_len, prepare=text, train=sizes)
    run_dir.mkdir(parents=True)
    run.save(run_dir / "config.json")
    assert train(run, run_dir) == "finished"
    return run_dir
