"""What ranks read of each other's messages, by Triton's kernels, against loops."""

import pytest
import torch

from experimental.peer_memory import triton_peers as ours
from experimental.peer_memory.tests.peer_cases import ONE_CHUNK, check_back, check_out


# Not bfloat16, of which the interpreter computes wrong sums.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("into heads", torch.float32),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in ONE_CHUNK
            for dtype in (torch.float32, torch.float64)
            if (name, dtype) != ("into heads", torch.float32)
        ),
    ],
)
def test_every_rank_finds_what_is_its_own(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_BLOCK", 32)
    monkeypatch.setattr(ours, "_COLUMNS", 16)
    check_out(ours, name, dtype, 20)
    check_back(ours, name, dtype, 20)
