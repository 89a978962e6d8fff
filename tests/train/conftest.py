"""What every test of a run trains on."""

import json
from pathlib import Path

import numpy as np
import pytest

from moebius.data_pipeline.config import DataConfig
from moebius.data_pipeline.prepare import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards: 60 lines of seven words, as bytes. Only read."""
    folder = tmp_path_factory.mktemp("data")
    words = np.random.default_rng(0).choice(["one", "two", "three", "many", "band", "expert", "route"], size=(60, 30))
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(line)}) + "\n" for line in words), encoding="utf-8")
    config = DataConfig(input=(str(text),), tokenizer="bytes", vocab_size=257, validation_fraction=0.2)
    prepare(config, folder / "shards")
    return folder / "shards"
