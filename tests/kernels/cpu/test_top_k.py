"""The greatest scores in C++: torch.topk's, and of equal ones the first."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moebius.kernels.cpu import top_k as cpu_top_k
from moebius.kernels.cpu.top_k import LIBRARY, can_find, top_k
from moebius.model.execution.recompute import save_topk

needs_a_compiler = pytest.mark.skipif(
    LIBRARY.reason_against() is not None, reason=f"{LIBRARY.reason_against()}"
)


@needs_a_compiler
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((400, 155), 12),
        ((60, 10, 5), 2),
        ((7, 3, 4), 4),
        ((33, 16), 1),
        ((9, 1), 1),
        ((0, 8), 2),
        ((50, 600), 40),
    ],
)
def test_it_finds_what_torch_finds(shape: tuple[int, ...], count: int) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert can_find(scores)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found = top_k(scores, count)
        torch.set_num_threads(before)
        assert found.dtype == torch.int64
        assert torch.equal(found, scores.topk(count, dim=-1).indices)
    strided = torch.stack((scores, -scores), -1)[..., 0]
    assert torch.equal(top_k(strided, count), found)


@needs_a_compiler
def test_of_equal_scores_the_first_comes_first() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (300, 50), generator=generator).float()
    scores[:100] *= 0.0  # 0 and −0, which are equal
    assert torch.equal(
        top_k(scores, 9), scores.argsort(dim=-1, descending=True, stable=True)[:, :9]
    )


@needs_a_compiler
def test_numbers_at_the_ends_and_none() -> None:
    inf, nan, small = torch.inf, torch.nan, 1e-45
    scores = torch.tensor(
        [[-inf, 0.0, nan, inf, -nan, -small], [-inf, -inf, -3e38, -inf, small, -small]]
    )
    assert top_k(scores, 6).tolist() == [[2, 4, 3, 1, 5, 0], [4, 5, 2, 0, 1, 3]]
    values = scores.gather(1, top_k(scores, 6))
    torch.testing.assert_close(values, scores.topk(6).values, rtol=0, atol=0, equal_nan=True)


@needs_a_compiler
@pytest.mark.parametrize("count", [0, 6])
def test_a_count_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"the {count} greatest of 5 scores: choose 1 to all"):
        top_k(torch.zeros(2, 5), count)


def steps(scores: Tensor) -> tuple[Tensor, ...]:
    scores = scores.clone().requires_grad_()
    values, index = save_topk(scores, 3)
    (values * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert scores.grad is not None
    return values.detach(), index, scores.grad


@needs_a_compiler
def test_routers_have_the_same_bits_with_it_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(40, 2, 7, generator=torch.Generator().manual_seed(3))
    ours = steps(scores)
    monkeypatch.setattr(cpu_top_k, "_library", lambda: None)
    for mine, other in zip(ours, steps(scores), strict=True):
        assert torch.equal(mine, other)


def test_what_it_does_not_take_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_find(torch.zeros(2, 2, dtype=torch.float64))
    with FakeTensorMode():
        assert not can_find(torch.zeros(2, 2))
    monkeypatch.setattr(cpu_top_k, "_library", lambda: None)
    assert not can_find(torch.zeros(2, 2))
