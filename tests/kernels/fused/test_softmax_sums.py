"""Sums of softmaxes in C++: values and gradients of torch's, whatever the rows beside and threads."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moebius.kernels.fused import softmax_sums as kernel
from moebius.kernels.fused.softmax_sums import LIBRARY, WIDEST, softmax_sums, softmax_sums_reference

pytestmark = pytest.mark.skipif(
    LIBRARY.reason_against() is not None, reason=f"{LIBRARY.reason_against()}"
)


def logits_of(shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size


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
    logits, weights = logits_of(shape, size), logits_of((batch_size, *shape[1:]))
    assert kernel._can_add(logits)
    sums, grad = sums_and_gradient(logits, batch_size, weights)
    exact = logits.double().requires_grad_()
    expected = softmax_sums_reference(exact, batch_size)
    (expected_grad,) = torch.autograd.grad(expected, exact, weights.double())
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-10)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-6)


def test_neither_other_sequences_nor_threads_change_a_bit() -> None:
    logits, weights = logits_of((1200, 4, 8)), logits_of((3, 4, 8))
    sums, grad = sums_and_gradient(logits, 3, weights)
    alone, grad_alone = sums_and_gradient(logits[400:800], 1, weights[1:2])
    assert torch.equal(alone, sums[1:2])
    assert torch.equal(grad_alone, grad[400:800])
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again, grad_again = sums_and_gradient(logits, 3, weights)
        torch.set_num_threads(before)
        assert torch.equal(again, sums)
        assert torch.equal(grad_again, grad)


def test_numbers_at_the_ends_and_none() -> None:
    inf, nan = torch.inf, torch.nan
    heads = [[0.0, -inf, 1.0], [0.0, nan, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0]]
    logits = torch.tensor([heads])
    torch.testing.assert_close(
        softmax_sums(logits, 1), softmax_sums_reference(logits, 1), equal_nan=True
    )


def test_rows_that_lie_otherwise_are_taken() -> None:
    logits = logits_of((8, 12, 4)).transpose(1, 2)
    assert torch.equal(softmax_sums(logits, 2), softmax_sums(logits.contiguous(), 2))


def test_what_it_does_not_take_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernel._can_add(torch.zeros(2, 2, 2, dtype=torch.float64))
    assert not kernel._can_add(torch.zeros(2, 2, WIDEST + 1))
    assert not kernel._can_add(torch.zeros(2, 2, 2, device="meta"))
    logits = logits_of((6, 2, 3))
    ours = softmax_sums(logits, 2)
    monkeypatch.setattr(kernel, "_library", lambda: None)
    torch.testing.assert_close(softmax_sums(logits, 2), ours)


def test_it_is_traced_without_values() -> None:
    with FakeTensorMode():
        logits = torch.zeros(6, 2, 3, requires_grad=True)
        sums = kernel._softmax_sums(logits, 2)
        assert sums.shape == (2, 2, 3)
        sums.sum().backward()
        assert logits.grad is not None
        assert logits.grad.shape == logits.shape
