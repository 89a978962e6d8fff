"""Sorting, tiles and sums of rows in Triton against torch."""

import pytest
import torch
from pairwise import slow_but
from torch import Tensor

from moebius.kernels.triton.guard import launch, tl, triton
from moebius.kernels.triton.routing import (
    experts_of,
    find_tile,
    num_tiles,
    sort_routes,
    sum_rows,
)


def some_experts(num_routes: int, num_experts: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(num_routes)
    return torch.randint(num_experts, (num_routes,), generator=generator), num_experts


# blocks have 16 routes here, and up to four programs have equally many
EXPERTS = {
    "no route": (torch.zeros(0, dtype=torch.int64), 4),
    "one route": (torch.tensor([2]), 5),
    "one expert": (torch.zeros(40, dtype=torch.int64), 1),
    "the last takes all": (torch.full((33,), 6), 7),
    "descending": (torch.arange(50).flip(0) // 4, 13),
    "alternating": (torch.arange(35) % 2 * 62, 63),
    "strided": (torch.tensor([[1, 0], [1, 0], [0, 1], [2, 1]])[:, 0], 3),
    "full blocks": some_experts(64, 23),
    "two blocks per program": some_experts(65, 23),
    "many experts": some_experts(40, 300),
    "several blocks": some_experts(500, 23),
}


@pytest.mark.parametrize("name", slow_but(EXPERTS, *(set(EXPERTS) - {"several blocks"})))
def test_routes_are_sorted_stably(name: str) -> None:
    expert_N, num_experts = EXPERTS[name]
    order_N, place_N, starts_E1 = sort_routes(expert_N, num_experts)
    expected = expert_N.argsort(stable=True)
    assert order_N.dtype == place_N.dtype == starts_E1.dtype == torch.int32
    assert torch.equal(order_N.long(), expected)
    assert torch.equal(place_N.long(), expected.argsort())
    counts = torch.bincount(expert_N, minlength=num_experts)
    assert torch.equal(
        starts_E1.long(), torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    )


@triton.jit
def _find_tiles(starts, found_L4, rows, E: tl.constexpr, BINS: tl.constexpr):
    tile = tl.program_id(0)
    expert, number, first, end = find_tile(starts, tile, rows, E, BINS)
    tl.store(found_L4 + 4 * tile, expert)
    tl.store(found_L4 + 4 * tile + 1, number)
    tl.store(found_L4 + 4 * tile + 2, first)
    tl.store(found_L4 + 4 * tile + 3, end)


@pytest.mark.parametrize("bins", [None, 4])
@pytest.mark.parametrize(
    "counts", [[0, 5, 64, 0, 0, 65, 1, 0], [0], [32], [200], [31, 1, 0, 33, 31], [0] * 20 + [33]]
)
def test_tiles_cover_every_row_of_every_expert(counts: list[int], bins: int | None) -> None:
    """Each expert has at least one tile; later ones have distinct numbers below N // rows."""
    starts_E1 = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    num_rows, num_experts = sum(counts), len(counts)
    found_L4 = torch.empty(num_tiles(num_rows, num_experts, 32), 4, dtype=torch.int32)
    constants = experts_of(num_experts) | ({} if bins is None else {"BINS": bins})
    launch(_find_tiles, len(found_L4), starts_E1, found_L4, 32, **constants)
    starts = starts_E1.tolist()
    wanted = [
        (expert, number, starts[expert] + 32 * number, starts[expert + 1])
        for expert, count in enumerate(counts)
        for number in range(max(-(-count // 32), 1))
    ]
    tiles = [tuple(row) for row in found_L4.tolist()]
    assert [tile for tile in tiles if tile[1] == 0 or tile[2] < tile[3]] == wanted
    later = [at - tile[0] - 1 for at, tile in enumerate(tiles) if tile[1] > 0 and tile in wanted]
    assert len(set(later)) == len(later)
    assert all(0 <= number < num_rows // 32 for number in later)


@pytest.mark.parametrize("width", [1, 82, 1100])
@pytest.mark.parametrize("per_row", [1, 2, 7])
def test_equal_numbers_of_answers_are_added_up(per_row: int, width: int) -> None:
    outputs = torch.randn(11 * per_row, width, generator=torch.Generator().manual_seed(4))
    expected = outputs.double().view(11, per_row, width).sum(1)
    torch.testing.assert_close(
        sum_rows(outputs, None, 11, per_row).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("width", [3, 1100])
@pytest.mark.parametrize("num_routes", [0, 50])
def test_answers_are_added_up_where_an_index_says(num_routes: int, width: int) -> None:
    generator = torch.Generator().manual_seed(5)
    outputs, index_N = (
        torch.randn(num_routes, width, generator=generator),
        torch.randint(9, (num_routes,), generator=generator),
    )
    index_N[index_N == 4] = 5  # row 4 gets none
    expected = torch.zeros(9, width, dtype=torch.float64).index_add_(0, index_N, outputs.double())
    found = sum_rows(outputs, index_N, 9, 0)
    assert torch.equal(found[4], torch.zeros(width))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
