"""Gradients of weights that a pass uses several times: one sum, whoever asks for it, and whatever
went wrong before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from kernel_cases import CASES, Perceptrons, make_routes, relative
from torch import Tensor

from moebius.kernels import backend, segments
from moebius.kernels.calls import LinearCall, MLPCall, MLPGradients
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.gradients import GradientSum, accumulate_weight_gradients

REPEATS = 3


@dataclass
class Bank:
    """A perceptron and a square matrix of the same experts, and rows that go through both again and
    again.
    """

    leaves: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator, case = torch.Generator().manual_seed(0), CASES["odd widths"]
        operation = Perceptrons("swiglu", ("b_up_EF",))
        w_up, w_down, b_up = operation.weights(case, generator)
        shapes = (
            w_up / 6,
            w_down[..., :-1] / 4,
            b_up,
            torch.randn(case.experts, 41, 41, generator=generator) / 6,
        )
        x = torch.randn(case.tokens, 41, generator=generator)
        self.leaves = [leaf.double().clone().requires_grad_() for leaf in (x, *shapes)]
        self.routes = [make_routes(case, generator) for _ in range(REPEATS)]

    def forward(self, *, defer: bool = False) -> Tensor:
        x, w_up, w_down, b_up, w = self.leaves
        self.between = []
        for routes in self.routes:
            routes = routes.with_weights(routes.weight_N.double())
            x = x + routed_mlp(
                x,
                w_up,
                w_down,
                routes,
                activation="swiglu",
                b_up_EF=b_up,
                backend="segments",
                defer=defer,
            )
            x = x + routed_linear(x, w, routes, backend="segments", defer=defer)
            self.between.append(x)
        return x.square().sum()

    def gradients(self, loss: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves, retain_graph=retain_graph))


def same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert relative(mine, theirs) < 1e-12


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def expected(bank: Bank) -> list[Tensor]:
    """Outside of a pass: every call returns its own gradient, and autograd adds them up."""
    return bank.gradients(bank.forward())


def test_the_sum_is_that_of_separate_calls(bank: Bank, expected: list[Tensor]) -> None:
    with accumulate_weight_gradients():
        loss = bank.forward()
    same(bank.gradients(loss), expected)


def test_all_calls_of_a_pass_add_to_one_buffer(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = set()
    backward = segments.mlp_backward

    def watched(grad: Tensor, x: Tensor, bank, routes, saved: Tensor, into: MLPGradients):
        buffers.add((into.w_up_EDW.data_ptr(), into.w_down_EFO.data_ptr()))
        return backward(grad, x, bank, routes, saved, into)

    monkeypatch.setattr(segments, "mlp_backward", watched)
    with accumulate_weight_gradients():
        loss = bank.forward()
    loss.backward()
    [(up, down)] = buffers
    weights = bank.leaves[1:3]
    assert [w.grad.data_ptr() for w in weights if w.grad is not None] == [
        up,
        down,
    ]  # and it is the weights' gradient


def test_a_graph_can_be_walked_twice(bank: Bank, expected: list[Tensor]) -> None:
    with accumulate_weight_gradients():
        loss = bank.forward()
    same(bank.gradients(loss, retain_graph=True), expected)
    same(bank.gradients(loss), expected)


def test_two_passes_before_one_backward_pass(bank: Bank, expected: list[Tensor]) -> None:
    losses = []
    for _ in range(2):
        with accumulate_weight_gradients():
            losses.append(bank.forward())
    same(bank.gradients(losses[0] + losses[1]), [2 * gradient for gradient in expected])


def test_a_backward_pass_that_did_not_ask_for_the_weights_leaves_nothing(
    bank: Bank, expected: list[Tensor]
) -> None:
    with accumulate_weight_gradients():
        loss = bank.forward()
    [grad_x] = torch.autograd.grad(loss, bank.leaves[:1], retain_graph=True)
    same([grad_x], expected[:1])
    same(bank.gradients(loss), expected)


@pytest.mark.parametrize("defer", [False, True])
def test_a_backward_pass_that_broke_off_leaves_nothing(
    bank: Bank, expected: list[Tensor], defer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if defer:
        let_segments_defer(monkeypatch)
    with accumulate_weight_gradients():
        loss = bank.forward(defer=defer)

    def break_off(_grad: Tensor) -> None:
        raise InterruptedError  # the last two calls have left their share

    handle = bank.between[1].register_hook(break_off)
    with pytest.raises(InterruptedError):
        loss.backward(retain_graph=True)
    handle.remove()
    same(bank.gradients(loss), expected)


def test_weights_that_want_no_gradient_get_none(bank: Bank, expected: list[Tensor]) -> None:
    for leaf in bank.leaves[1:]:
        leaf.requires_grad_(False)
    with accumulate_weight_gradients():
        loss = bank.forward()
    same(torch.autograd.grad(loss, bank.leaves[:1]), expected[:1])


def let_segments_defer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As a backend that defers would: how many calls each product was of."""
    computed: list[int] = []

    def mlp_backward_rows(grad, x, bank, routes, saved):
        into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
        return *segments.mlp_backward(grad, x, bank, routes, saved, into), torch.zeros_like(saved)

    def mlp_weight_gradients(calls: Sequence[MLPCall]) -> tuple[Tensor, Tensor]:
        computed.append(len(calls))
        bank = calls[0].bank
        into = MLPGradients(torch.zeros_like(bank.w_up_EDW), torch.zeros_like(bank.w_down_EFO))
        for call in calls:
            segments.mlp_backward(call.grad_TO, call.x_UD, call.bank, call.routes, call.saved, into)
        return into.w_up_EDW, into.w_down_EFO

    def linear_backward_rows(grad, x, w, routes, saved):
        return segments.linear_backward(grad, x, w, routes, saved, torch.zeros_like(w))

    def linear_weight_gradients(calls: Sequence[LinearCall]) -> tuple[Tensor]:
        computed.append(len(calls))
        into = torch.zeros_like(calls[0].w_EDO)
        for call in calls:
            saved = segments.linear_forward(call.x_UD, call.w_EDO, call.routes)[1]
            segments.linear_backward(call.grad_TO, call.x_UD, call.w_EDO, call.routes, saved, into)
        return (into,)

    monkeypatch.setattr(backend, "DEFERRING_BACKENDS", ("segments",))
    for function in (
        mlp_backward_rows,
        mlp_weight_gradients,
        linear_backward_rows,
        linear_weight_gradients,
    ):
        monkeypatch.setattr(segments, function.__name__, function, raising=False)
    return computed


def test_deferred_gradients_are_made_once_for_all_calls(
    bank: Bank, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = let_segments_defer(monkeypatch)
    with accumulate_weight_gradients():
        loss = bank.forward(defer=True)
    same(bank.gradients(loss), expected)
    assert computed == [REPEATS, REPEATS]


def test_nothing_is_deferred_where_the_caller_does_not_let_it(
    bank: Bank, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = let_segments_defer(monkeypatch)
    with accumulate_weight_gradients():
        loss = bank.forward()
    same(bank.gradients(loss), expected)
    assert computed == []


def test_calls_that_were_deferred_are_added_to_those_that_were_not() -> None:
    sums = GradientSum([torch.zeros(2)], defer=True)
    sums.buffers()[0].add_(1)
    sums.defer_call(torch.tensor([2.0, 3.0]), lambda calls: (torch.stack(calls).sum(0),))
    sums.defer_call(torch.tensor([4.0, 5.0]), lambda calls: (torch.stack(calls).sum(0),))
    [total] = sums.pop()
    assert total is not None
    assert total.tolist() == [7, 9]
    assert sums.pop() == (None,)
