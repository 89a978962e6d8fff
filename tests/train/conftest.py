"""What every test of a run trains on."""

from pathlib import Path

import pytest
from small_corpus import shards_of_words


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards. Only read."""
    return shards_of_words(tmp_path_factory.mktemp("data"), 60)
