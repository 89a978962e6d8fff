"""Prepared text and a run shared by the evaluation tests."""

from pathlib import Path

import pytest
from bytes_run import prepare_bytes, train_bytes


@pytest.fixture(scope="session")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared bytes, for group contexts and training."""
    return prepare_bytes(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="session")
def bytes_run(mixture_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose model reads bytes, 64 at a time."""
    return train_bytes(mixture_folder, tmp_path_factory.mktemp("bytes_run") / "run")
