"""What ranks read of each other's messages, by torch's operations, against loops."""

import pytest
import torch

from experimental.peer_memory import peers
from experimental.peer_memory.peers import Layout
from experimental.peer_memory.tests.peer_cases import DTYPES, ONE_CHUNK, check_back, check_out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_every_rank_finds_what_is_its_own(name: str, dtype: torch.dtype) -> None:
    check_out(peers, name, dtype, 5)
    check_back(peers, name, dtype, 5)


def test_sections_do_not_overlap_and_hold_every_type() -> None:
    for num_ranks, routes, row_bytes in ((1, 0, 0), (3, 7, 100), (8, 131072, 1 << 24)):
        layout = Layout(num_ranks, routes, row_bytes)
        ends = [8 * layout.words, layout.list_at + 4 * routes, layout.routes_at + 32 * routes]
        begins = [layout.list_at, layout.routes_at, layout.rows_at]
        assert all(end <= begin for end, begin in zip(ends, begins, strict=True))
        assert layout.num_bytes >= layout.rows_at + row_bytes
        assert all(begin % 16 == 0 for begin in begins)
