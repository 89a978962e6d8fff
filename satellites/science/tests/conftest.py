"""A tiny run shared by several tests, and one thread for torch."""

from pathlib import Path

import pytest
import torch
from small_runs import TINY, write_texts

import moebius

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder after two steps on 40 documents."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_texts(folder / "text.jsonl", 40)
    changes = ("train.steps=2", "train.global_batch=4", "train.micro_batch=4", "train.seed=3")
    config = moebius.recipe(
        "smoke",
        *TINY,
        *changes,
        "prepare.validation_fraction=0.2",
        f"prepare.input=['{text}']",
    )
    moebius.fit(config, folder / "run", show=False)
    return folder / "run"
