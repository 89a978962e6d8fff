"""Route lists in C++: sums equal `index_add_` bit for bit, and sorting equals a stable sort."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moebius.kernels import permute
from moebius.kernels.cpu import library
from moebius.kernels.cpu.library import handles
from moebius.kernels.cpu.lists import add_by_index, can_add
from moebius.kernels.permute import add_rows, sort_routes

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiler")


def by_torch(rows: Tensor, place_N: Tensor | None, index_N: Tensor, num_rows: int) -> Tensor:
    taken = rows[: len(index_N)] if place_N is None else rows[place_N.long()]
    return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, index_N, taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_it_adds_as_torch_does_bit_for_bit(
    dtype: torch.dtype, width: int, index_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(50, width, generator=generator).to(dtype)
    rows[7], rows[8, 0], rows[9, 0] = 0.0, torch.inf, torch.nan
    place_N = torch.randint(0, 50, (200,), generator=generator).int()
    index_N = torch.randint(0, 13, (200,), generator=generator).to(index_dtype)
    for place, index in ((place_N, index_N), (None, index_N[:50]), (None, index_N[:0])):
        ours, theirs = add_rows(rows, place, index, 13, 0), by_torch(rows, place, index.long(), 13)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    wide = torch.cat([rows + 1, rows], 1)[:, width:]  # rows that do not lie side by side
    first, second = (add_by_index(each, place_N, index_N, 13) for each in (rows, wide))
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("place", "index"), [(50, 0), (-1, 0), (0, 13), (0, -1)])
def test_a_row_or_a_sum_that_does_not_exist_is_refused(place: int, index: int) -> None:
    with pytest.raises(IndexError, match="there are 13 sums of 50 rows"):
        add_by_index(torch.ones(50, 4), torch.tensor([place]), torch.tensor([index]), 13)


@pytest.mark.parametrize(("routes", "experts"), [(300, 7), (300, 70_000), (0, 3), (1, 1)])
def test_it_sorts_as_torch_does(routes: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    expert_N = torch.randint(0, experts, (2 * routes,), generator=generator)[::2]
    assert handles(expert_N, torch.int64)
    ours = sort_routes(expert_N, experts)
    monkeypatch.setattr(permute, "handles", lambda *_: False)
    for mine, other in zip(
        vars(ours).values(), vars(sort_routes(expert_N, experts)).values(), strict=True
    ):
        assert mine.dtype == other.dtype == torch.int32
        assert mine.equal(other)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_does_not_exist_is_refused(expert: int) -> None:
    with pytest.raises(IndexError, match="names an expert outside 0 … 3"):
        sort_routes(torch.tensor([0, expert, 3]), 4)


def test_what_it_cannot_add_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_add(torch.ones(2, 2, dtype=torch.float16))
    with FakeTensorMode():
        assert not can_add(torch.ones(2, 2))
    monkeypatch.setattr(library, "loaded", lambda: None)
    rows, index_N = torch.randn(6, 3), torch.tensor([1, 1, 0, 3, 3, 3])
    assert add_rows(rows, None, index_N, 4, 0).equal(by_torch(rows, None, index_N, 4))
