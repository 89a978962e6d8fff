"""A router's scores in C++: torch.topk with ties by lowest index, and torch's softmax with its
gradients, independent of neighbouring rows and threads.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moebius.kernels.cpu import library
from moebius.kernels.fused.router import (
    WIDEST,
    finds_first,
    greatest,
    softmax_sums,
    softmax_sums_reference,
)
from moebius.model.execution.recompute import save_topk

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiler")
inf, nan, small = torch.inf, torch.nan, 1e-45


def drawn(shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size


# The greatest -------------------------------------------------------------------------------------


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
def test_it_finds_what_torch_finds(
    shape: tuple[int, ...], count: int, on_threads: Callable[[int], None]
) -> None:
    scores = drawn(shape)
    assert finds_first(scores)
    expected = scores.topk(count, dim=-1).indices
    for threads in (1, 2):
        on_threads(threads)
        assert torch.equal(greatest(scores, count), expected)
    strided = torch.stack((scores, -scores), -1)[..., 0]
    assert torch.equal(greatest(strided, count), expected)


def test_of_equal_scores_the_first_comes_first() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (300, 50), generator=generator).float()
    scores[:100] *= 0.0  # 0 and −0, which are equal
    expected = scores.argsort(dim=-1, descending=True, stable=True)[:, :9]
    assert torch.equal(greatest(scores, 9), expected)


def test_scores_at_the_ends_and_none() -> None:
    rows = [[-inf, 0.0, nan, inf, -nan, -small], [-inf, -inf, -3e38, -inf, small, -small]]
    scores = torch.tensor(rows)
    assert greatest(scores, 6).tolist() == [[2, 4, 3, 1, 5, 0], [4, 5, 2, 0, 1, 3]]
    values = scores.gather(1, greatest(scores, 6))
    torch.testing.assert_close(values, scores.topk(6).values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 6])
def test_a_count_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count={count} must be 1 to 5"):
        greatest(torch.zeros(2, 5), count)


def test_routers_have_the_same_bits_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> tuple[Tensor, ...]:
        scores = drawn((40, 2, 7)).requires_grad_()
        values, index = save_topk(scores, 3)
        (values * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
        assert scores.grad is not None
        return values.detach(), index, scores.grad

    ours = steps()
    monkeypatch.setattr(library, "loaded", lambda: None)
    assert not finds_first(torch.zeros(2, 2))
    for mine, other in zip(ours, steps(), strict=True):
        assert torch.equal(mine, other)


# Softmaxes ----------------------------------------------------------------------------------------


def sums_and_gradient(logits: Tensor, batch_size: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    sums = softmax_sums(logits, batch_size)
    (grad,) = torch.autograd.grad(sums, logits, weights)
    return sums.detach(), grad


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(
    ("shape", "batch_size"),
    [((24, 4, 8), 3), ((5, 1, WIDEST), 1), ((2, 3, 1), 2), ((0, 2, 3), 2), ((2000, 10, 5), 4)],
)
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], batch_size: int, size: float
) -> None:
    logits, weights = drawn(shape, size), drawn((batch_size, *shape[1:]))
    sums, grad = sums_and_gradient(logits, batch_size, weights)
    exact = logits.double().requires_grad_()
    expected = softmax_sums_reference(exact, batch_size)
    (expected_grad,) = torch.autograd.grad(expected, exact, weights.double())
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-10)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-6)


def test_neither_other_sequences_nor_threads_change_a_bit(
    on_threads: Callable[[int], None],
) -> None:
    logits, weights = drawn((1200, 4, 8)), drawn((3, 4, 8))
    sums, grad = sums_and_gradient(logits, 3, weights)
    alone, grad_alone = sums_and_gradient(logits[400:800], 1, weights[1:2])
    assert torch.equal(alone, sums[1:2])
    assert torch.equal(grad_alone, grad[400:800])
    for threads in (1, 2, 3):
        on_threads(threads)
        again, grad_again = sums_and_gradient(logits, 3, weights)
        assert torch.equal(again, sums)
        assert torch.equal(grad_again, grad)


def test_logits_at_the_ends_and_none_and_in_any_layout() -> None:
    heads = [[0.0, -inf, 1.0], [0.0, nan, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0]]
    logits = torch.tensor([heads])
    expected = softmax_sums_reference(logits, 1)
    torch.testing.assert_close(softmax_sums(logits, 1), expected, equal_nan=True)
    turned = drawn((8, 12, 4)).transpose(1, 2)
    assert torch.equal(softmax_sums(turned, 2), softmax_sums(turned.contiguous(), 2))


def test_they_are_traced_without_values() -> None:
    with FakeTensorMode() as mode:
        logits = torch.zeros(6, 2, 3, requires_grad=True)
        assert not finds_first(logits)
        for found in (softmax_sums(logits, 2), torch.ops.moebius.softmax_sums(logits, 2)):
            assert found.shape == (2, 2, 3)
            (grad,) = torch.autograd.grad(found.sum(), logits)
            assert grad.shape == logits.shape
        assert torch.ops.moebius.top_k(mode.from_tensor(torch.zeros(4, 5)), 2).shape == (4, 2)
