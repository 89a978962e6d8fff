"""Tests of the Triton kernels in the interpreter, which must be selected before they are imported.

`tests/kernels/triton/test_interpreted.py` starts their session with TRITON_INTERPRET=1. Other sessions
ignore these files.
"""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fills unwritten memory with NaN or the greatest integer, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
