"""Gradients of weights that a pass uses several times are one sum, also after a failed backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from kernel_cases import CASES, Perceptrons, make_routes, relative
from torch import Tensor
from torch_modes import Operations

from moebius.kernels.calls import (
    Deferred,
    DeferringBackend,
    GradientBuffers,
    LinearCall,
    MLPCall,
    RowGradients,
)
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.gradients import (
    GradientSum,
    accumulate_weight_gradients,
    joined_product,
    once_per_pass,
)
from moebius.kernels.segments import Segments

REPEATS = 3


@dataclass
class Bank:
    """A perceptron and a square matrix per expert, and rows that pass through both repeatedly."""

    leaves: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator, case = torch.Generator().manual_seed(0), CASES["odd widths"]
        w_up, w_down, b_up = Perceptrons("swiglu", ("b_up_EF",)).weights(case, generator)
        w = torch.randn(case.experts, 41, 41, generator=generator) / 6
        x = torch.randn(case.tokens, 41, generator=generator)
        leaves = (x, w_up / 6, w_down[..., :-1] / 4, b_up, w)
        self.leaves = [leaf.double().clone().requires_grad_() for leaf in leaves]
        self.routes = [make_routes(case, generator) for _ in range(REPEATS)]

    def forward(self, *, defer: bool = False) -> Tensor:
        x, w_up, w_down, b_up, w = self.leaves
        named = {"backend": "segments", "defer": defer}
        self.between = []
        for routes in self.routes:
            routes = routes.with_weights(routes.weight_N.double())
            x = x + routed_mlp(x, w_up, w_down, routes, activation="swiglu", b_up_EF=b_up, **named)
            x = x + routed_linear(x, w, routes, **named)
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
    """Outside the context every call returns its own gradient, and autograd adds them."""
    return bank.gradients(bank.forward())


def test_the_sum_is_that_of_separate_calls(bank: Bank, expected: list[Tensor]) -> None:
    with accumulate_weight_gradients():
        loss = bank.forward()
    same(bank.gradients(loss), expected)


def test_all_calls_of_a_pass_add_to_one_buffer(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = set()
    backward = Segments.mlp_backward

    def watched(self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers):
        buffers.add(tuple(each.data_ptr() for each in into.weights))
        return backward(self, call, grad_TO, saved, into)

    monkeypatch.setattr(Segments, "mlp_backward", watched)
    with accumulate_weight_gradients():
        loss = bank.forward()
    loss.backward()
    [both] = buffers  # and they are the weights' gradients
    assert [w.grad.data_ptr() for w in bank.leaves[1:3] if w.grad is not None] == list(both)


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
    bank: Bank, expected: list[Tensor], defer: bool, deferring: list[int]
) -> None:
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


class Deferring(Segments, DeferringBackend):
    """`Segments` as a deferring backend; `computed` holds the number of calls of each product."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def mlp_backward_rows(self, call: MLPCall, grad_TO: Tensor, saved: Tensor) -> RowGradients:
        found = self.mlp_backward(call, grad_TO, saved, self._zeros(call))
        return RowGradients(
            found.x_UD, found.weight_N, found.b_up_EW, found.b_down_EO, torch.zeros_like(saved)
        )

    def mlp_weight_gradients(self, calls: Sequence[Deferred[MLPCall]]) -> tuple[Tensor, Tensor]:
        self.computed.append(len(calls))
        into = self._zeros(calls[0].call)
        for each in calls:
            self.mlp_backward(each.call, each.grad_TO, each.saved, into)
        return into.weights[0], into.weights[1]

    def linear_backward_rows(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor
    ) -> RowGradients:
        return self.linear_backward(
            call, grad_TO, saved, GradientBuffers([torch.zeros_like(call.w_EDO)])
        )

    def linear_weight_gradients(self, calls: Sequence[Deferred[LinearCall]]) -> tuple[Tensor]:
        self.computed.append(len(calls))
        into = GradientBuffers([torch.zeros_like(calls[0].call.w_EDO)])
        for each in calls:
            self.linear_backward(each.call, each.grad_TO, each.saved, into)
        return (into.weights[0],)

    def _zeros(self, call: MLPCall) -> GradientBuffers:
        return GradientBuffers([torch.zeros_like(call.w_up_EDW), torch.zeros_like(call.w_down_EFO)])


@pytest.fixture
def deferring(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the backend defer; returns the number of calls of each product."""
    found = Deferring()
    monkeypatch.setattr("moebius.kernels.ops.implementation", lambda name: found)
    return found.computed


@pytest.mark.parametrize(("defer", "products"), [(True, [REPEATS, REPEATS]), (False, [])])
def test_deferred_gradients_are_made_once_for_all_calls_and_only_where_the_caller_lets_it(
    bank: Bank, expected: list[Tensor], deferring: list[int], defer: bool, products: list[int]
) -> None:
    with accumulate_weight_gradients():
        loss = bank.forward(defer=defer)
    same(bank.gradients(loss), expected)
    assert deferring == products


def test_calls_that_were_deferred_are_added_to_those_that_were_not() -> None:
    sums = GradientSum([torch.zeros(2)], defer=True)
    sums.buffers()[0].add_(1)
    for operands in ([2.0, 3.0], [4.0, 5.0]):
        sums.defer_call(torch.tensor(operands), lambda calls: (torch.stack(calls).sum(0),))
    [total] = sums.pop()
    assert total is not None
    assert total.tolist() == [7, 9]
    assert sums.pop() == (None,)


def test_parts_of_many_calls_are_one_sum() -> None:
    """Of unequally many parts, and of more calls than wait in memory."""
    sums, added = GradientSum([torch.zeros(2)], defer=False), torch.zeros(2)
    for call in range(40):
        parts = torch.full((1 + call % 3, 2), float(call))
        sums.add_parts(parts)
        added += parts.sum(0)
    assert torch.equal(sums.pop()[0], added)  # type: ignore[arg-type]
    assert sums.pop() == (None,)


def test_what_calls_derive_is_made_once_per_pass_and_never_stale() -> None:
    weight = torch.ones(2, requires_grad=True)
    made = [once_per_pass("double", lambda w: 2 * w, weight)]
    for _ in range(2):
        with torch.no_grad():
            weight += 1
        with accumulate_weight_gradients():
            with torch.no_grad():
                without = once_per_pass("double", lambda w: 2 * w, weight)
            first, again = (once_per_pass("double", lambda w: 2 * w, weight) for _ in range(2))
            other = once_per_pass("triple", lambda w: 3 * w, weight)
        assert first is again
        assert first.requires_grad
        assert not without.requires_grad
        assert torch.equal(2 * other, 3 * first)
        made.append(first)
    assert [each[0].item() for each in made] == [2, 4, 6]


@pytest.mark.parametrize("frozen", [False, True])
def test_joined_matrices_are_multiplied_once_per_call_and_their_gradients_added_there(
    frozen: bool,
) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 3, 6), (6, 6), (2, 6))
    leaves = [torch.randn(size, generator=generator).double().requires_grad_() for size in sizes]
    leaves[2].requires_grad_(not frozen)

    def run(joins: bool) -> list[Tensor]:
        x, first, second = leaves
        for _ in range(REPEATS):
            a, b = joined_product(x, first, second) if joins else (x @ first.T, x @ second.T)
            x = x + a.tanh() * b.sum(-1, keepdim=True)
        return list(torch.autograd.grad(x.square().sum(), leaves[: 3 - frozen]))

    expected = run(False)
    same(run(True), expected)  # outside of a pass
    with Operations() as ran, accumulate_weight_gradients():
        found = run(True)
    same(found, expected)
    if not frozen:
        assert (ran.names["aten.cat.default"], ran.names["aten.addmm_.default"]) == (1 + REPEATS, 3)
