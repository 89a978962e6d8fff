"""The data of every test that trains."""

from pathlib import Path

import pytest
from small_corpus import shards_of_words


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a read-only folder of token shards."""
    return shards_of_words(tmp_path_factory.mktemp("data"), 60)
