"""Sets torch's number of threads for one test."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def on_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
