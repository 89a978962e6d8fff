"""The loss that never sees all logits equals the one that does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family import make_uneven, some_tokens, tiny_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torch_modes import LiveMemory

from moebius.model.execution.precision import forward_in
from moebius.model.head_loss import head_loss, rows_of_chunk

TOKENS, WIDTH, WORDS = 23, 7, 11
# one token each, a rest, a rest of one, exactly all, more than there are
CHUNKS = (1, 4, 22, 23, 100)


def operands(
    dtype: torch.dtype = torch.float64, *, size: float = 1.0, bias: bool = True
) -> tuple[Any, Any, Any]:
    """Rows, weight and bias, or None for it."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,))
    x, weight, offset = (
        size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return (
        x.to(wide).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        offset.to(wide).requires_grad_() if bias else None,
    )


def targets() -> Tensor:
    return torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(1))


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, targets_T: Tensor) -> Tensor:
    """On full logits, as anyone would write it."""
    logits = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    return F.cross_entropy(logits.to(x.dtype), targets_T, reduction="sum")


def with_gradients(loss: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, [t for t in inputs if t is not None])]


def assert_near(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "size", [1.0, 30.0]
)  # so large that most softmaxes are 0 or 1 and logits overflow exp
def test_it_equals_the_loss_on_full_logits(rows: int, bias: bool, size: float) -> None:
    inputs = operands(size=size, bias=bias)
    expected = with_gradients(plain(*inputs, targets()), inputs)
    found = with_gradients(head_loss(*inputs, targets(), rows=rows), inputs)
    assert_near(found, expected)


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize(
    "counted", [[], [7], [0, 3, 4, 9, 21, 22], [*range(TOKENS)]], ids=["none", "one", "some", "all"]
)
def test_only_counted_targets_are_in_the_loss(counted: list[int], rows: int) -> None:
    """A plain loop over them; where all are counted, with the bits of the loss without a mask."""
    inputs = x, weight, bias = operands()
    index = torch.tensor(counted, dtype=torch.int64)
    terms = [plain(x[[t]], weight, bias, targets()[[t]]) for t in counted]
    expected = with_gradients(sum(terms, start=0 * (x.sum() + weight.sum() + bias.sum())), inputs)
    found = with_gradients(head_loss(*inputs, targets(), index, rows=rows), inputs)
    assert_near(found, expected)
    if len(counted) == TOKENS:
        unmasked = with_gradients(head_loss(*inputs, targets(), rows=rows), inputs)
        assert all(map(torch.equal, found, unmasked))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows", [4, 100])
def test_low_precision_keeps_to_its_rounding(
    dtype: torch.dtype, tolerance: float, rows: int
) -> None:
    """Against float64 on the same values; gradients have the dtypes of what they belong to."""
    inputs = operands(dtype)
    x, weight, bias = (t.detach().to(dtype).double().requires_grad_() for t in inputs)
    expected = with_gradients(plain(x, weight, bias, targets()), (x, weight, bias))
    found = with_gradients(head_loss(*inputs, targets(), rows=rows), inputs)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype, torch.float32]
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_repeats_bit_for_bit_and_again_from_one_graph(dtype: torch.dtype) -> None:
    inputs = operands(dtype)
    first, second = (
        with_gradients(head_loss(*inputs, targets(), rows=4), inputs) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    loss = head_loss(*inputs, targets(), rows=4)
    once, twice = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))


def test_without_gradients_there_are_none_to_wait() -> None:
    x, weight, bias = operands(torch.float32)
    loss = head_loss(x, weight, bias, targets())
    with torch.no_grad(), LiveMemory() as live, FlopCounterMode(display=False) as counter:
        assert torch.equal(head_loss(x, weight, bias, targets()), loss)
    assert live.num_bytes == 0
    assert counter.get_total_flops() == 2 * TOKENS * WIDTH * WORDS


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("counted", [None, 5])
def test_three_products_of_counted_rows_are_computed(device: str, counted: int | None) -> None:
    x, weight, bias = (t.detach().to(device).requires_grad_() for t in operands(torch.float32))
    index = None if counted is None else torch.arange(counted, device=device)
    with FlopCounterMode(display=False) as counter:
        head_loss(x, weight, bias, targets().to(device), index, rows=4).backward()
    assert counter.get_total_flops() == 3 * 2 * (counted or TOKENS) * WIDTH * WORDS


class Largest(LiveMemory):
    """The most bytes that were there at a time."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.num_bytes)
        return result


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    width, words = 8, 4096
    rows = rows_of_chunk(words, "cpu")

    def peak(loss: Callable[..., Tensor], tokens: int) -> int:
        x, weight = (torch.randn(each, width, requires_grad=True) for each in (tokens, words))
        with Largest() as live:
            loss(x, weight, None, torch.zeros(tokens, dtype=torch.int64)).backward()
        return live.most

    # rows of x and their gradients, and no logits
    assert peak(head_loss, 4 * rows) - peak(head_loss, 2 * rows) < 2 * rows * 4 * 4 * width
    assert peak(head_loss, 2 * rows) < 3 * 4 * rows * words < peak(plain, 2 * rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["moeut", "dense"])
def test_a_model_gives_the_loss_of_its_own_logits(name: str, dtype: torch.dtype) -> None:
    rows = some_tokens(4, 9)
    model = make_uneven(tiny_model(name))
    forward = partial(forward_in, model, dtype)
    logits = forward(rows[:, :-1])
    loss = forward(rows[:, :-1], targets_BS=rows[:, 1:])
    assert torch.equal(loss.regularisation_B, logits.regularisation_B)
    plain_loss = F.cross_entropy(logits.logits_BSV.mT, rows[:, 1:], reduction="sum")
    parameters = list(model.parameters())
    expected, found = (
        torch.autograd.grad(each, parameters) for each in (plain_loss, loss.cross_entropy)
    )
    assert_near(found, expected, 1e-5 if dtype == torch.float32 else 2e-2)


def test_there_is_no_second_derivative_without_its_terms() -> None:
    x, weight, bias = operands()
    [grad] = torch.autograd.grad(
        head_loss(x, weight, bias, targets()).square(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
