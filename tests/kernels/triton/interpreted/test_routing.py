"""Sorting, tile tables and sums of rows in Triton against torch."""

import pytest
import torch
from pairwise import slow_but

from moebius.kernels.calls import SortedRoutes
from moebius.kernels.triton.routing import sort_routes, sorted_rows, sum_rows, tile_table

EXPERTS = {
    "no route": (torch.zeros(0, dtype=torch.int64), 4),
    "one route": (torch.tensor([2]), 5),
    "one expert": (torch.zeros(300, dtype=torch.int64), 1),
    "the last takes all": (torch.full((300,), 6), 7),
    "strided": (torch.tensor([[1, 0], [1, 0], [0, 1], [2, 1]])[:, 0], 3),
    "several blocks": (torch.randint(23, (900,), generator=torch.Generator().manual_seed(1)), 23),
    "many experts": (torch.randint(300, (517,), generator=torch.Generator().manual_seed(2)), 300),
}


@pytest.mark.parametrize(
    "name", slow_but(EXPERTS, *(name for name in EXPERTS if name != "many experts"))
)
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


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("counts", [[0, 5, 64, 0, 0, 65, 1, 0], [0], [200], [0] * 70 + [33]])
def test_tiles_cover_every_row_of_every_expert(counts: list[int], least: int) -> None:
    counts_E = torch.tensor(counts, dtype=torch.int32)
    starts_E1 = torch.cat((torch.zeros(1, dtype=torch.int32), counts_E.cumsum(0).to(torch.int32)))
    table = tile_table(starts_E1, sum(counts), rows=32, least=least)
    tiles = [
        (expert, starts_E1[expert].item() + 32 * tile, tile)
        for expert, count in enumerate(counts)
        for tile in range(max(-(-count // 32), least))
    ]
    found = zip(table.expert_L.tolist(), table.first_L.tolist(), table.slot_L.tolist(), strict=True)
    later, entry = 0, -1
    for entry, (expert, first, slot) in enumerate(found):
        if entry >= len(tiles):
            assert expert == -1
            continue
        assert (expert, first) == tiles[entry][:2]
        assert slot == (later if tiles[entry][2] else -1)
        later += tiles[entry][2] > 0
    assert entry >= len(tiles) - 1
    per_expert = [max(-(-count // 32) - 1, 0) for count in counts]
    assert table.slots_E1.tolist() == [
        sum(per_expert[:expert]) for expert in range(len(counts) + 1)
    ]


@pytest.mark.parametrize("sorted_already", [True, False])
@pytest.mark.parametrize("ruled", [True, False])
def test_sorted_places_know_their_rows(ruled: bool, sorted_already: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    num_routes = 1500  # two programs
    order_N = (
        None if sorted_already else torch.randperm(num_routes, generator=generator).to(torch.int32)
    )
    weight_N = torch.rand(num_routes, generator=generator)
    source_N, target_N = (torch.randint(40, (num_routes,), generator=generator) for _ in range(2))
    starts = torch.zeros(2, dtype=torch.int32)
    index = (None, None) if ruled else (source_N, target_N)
    rules = (3, 5) if ruled else (0, 0)
    rows = sorted_rows(SortedRoutes(weight_N, order_N, None, starts, *index, 40, *rules, 0))
    order = torch.arange(num_routes) if order_N is None else order_N.long()
    assert torch.equal(rows.source_N.long(), order // 3 if ruled else source_N[order])
    assert torch.equal(rows.target_N.long(), order // 5 if ruled else target_N[order])
    assert torch.equal(rows.gate_N, weight_N[order])


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
