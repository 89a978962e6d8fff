"""Tests of Triton's kernels in its interpreter, which must be chosen before they are imported: in a
session of their own.

`tests/kernels/triton/test_interpreted.py` starts it, with TRITON_INTERPRET=1. Any other session
passes these files by.
"""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN, or the greatest integer: what is read before it is
    written shows.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
