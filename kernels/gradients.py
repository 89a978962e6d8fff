"""Sums the gradients of weights that several depth steps share in one buffer per pass.

For every use of a shared weight, autograd would allocate zeros, fill them and add them to the
running sum. For a bank of experts this costs as much memory traffic as the products themselves.
Inside `accumulate_weight_gradients` all calls on a bank add to one buffer; a backend that defers
saves the operands instead and computes all gradients in one product. The sum enters the graph once,
after the last call's backward. Elsewhere, and in compiled code, autograd adds the calls' gradients.
Tensors that all calls derive from a weight are made once per pass, too (`once_per_pass`).
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pass_scope import pass_scope, sharing

T = TypeVar("T")
_MOST_CALLS = 16  # whose parts wait in memory
Sums = tuple[Tensor, ...]
WeightGradients = Callable[[list[Any]], Sums]


class GradientSum:
    """Accumulates the gradients of one bank's weights over one backward pass."""

    def __init__(self, weights: Sequence[Tensor], *, defer: bool) -> None:
        self.defer = defer
        self._forms = [(w.shape, w.dtype, w.device) for w in weights]
        self._clear()

    def buffers(self) -> Sums:
        """Returns one buffer per weight to add to, zeroed at the first call of a backward pass."""
        self._discard_older_pass()
        if self._buffers is None:
            self._buffers = tuple(
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype, device in self._forms
            )
        return self._buffers

    def add_parts(self, parts: Tensor) -> None:
        """Saves parts of the only weight's gradient, (S, …), which are later added in order."""
        self._discard_older_pass()
        self._parts.append(parts)
        if len(self._parts) == _MOST_CALLS:
            self._parts = [sum_parts(torch.cat(self._parts))[None]]

    def defer_call(self, operands: Any, weight_gradients: WeightGradients) -> None:
        """Saves a call's operands; `weight_gradients` later receives all of them in order."""
        self._discard_older_pass()
        self._deferred.append(operands)
        self._weight_gradients = weight_gradients

    def pop(self) -> Sums | tuple[None, ...]:
        """Returns the sums and gives up ownership; Nones if there was no call."""
        self._discard_older_pass()
        sums = self._buffers
        if self._deferred and self._weight_gradients is not None:
            deferred = self._weight_gradients(self._deferred)
            if sums is not None:
                deferred = tuple(a.add_(b) for a, b in zip(sums, deferred, strict=True))
            sums = deferred
        if self._parts:
            sums = (sum_parts(torch.cat(self._parts)),)
        self._clear()
        return (None,) * len(self._forms) if sums is None else sums

    def _discard_older_pass(self) -> None:
        """Discards an earlier backward pass that failed or did not need these weights."""
        task = torch._C._current_graph_task_id()  # torch has no public name for it
        if task != self._task:
            self._clear()
            self._task = task

    def _clear(self) -> None:
        self._buffers: Sums | None = None
        self._deferred: list[Any] = []
        self._parts: list[Tensor] = []
        self._weight_gradients: WeightGradients | None = None
        self._task = -1


class _SharedBank(NamedTuple):
    """One bank inside `accumulate_weight_gradients`."""

    weights: Sequence[Tensor]  # kept alive so that no other tensor reuses their ids
    views: Sums  # used by the calls: the sum enters the graph through them
    number: int


_number = itertools.count(1)
# Ops take numbers, not objects.
_sums: weakref.WeakValueDictionary[int, GradientSum] = weakref.WeakValueDictionary()


@contextmanager
def accumulate_weight_gradients() -> Iterator[None]:
    """Makes the calls of a forward pass sum their weights' gradients; no weight may change meanwhile.

    Contexts nest: the inner one has its own sums.
    """
    with sharing(made={}):
        yield


def shared_weights(*weights: Tensor, defer: bool, joins: bool = False) -> tuple[Sums, int]:
    """Returns the weights for a call to use, and the number of their gradient sum.

    Outside `accumulate_weight_gradients` these are the given weights and 0. With `joins` it is one
    matrix of all their rows, made once per pass.
    """
    banks = None if torch.compiler.is_compiling() else pass_scope().made
    if banks is None or not torch.is_grad_enabled() or not all(w.requires_grad for w in weights):
        return (torch.cat(weights),) if joins else weights, 0
    key = tuple(map(id, weights))
    if key not in banks:
        used = (torch.cat(weights),) if joins else weights
        total = GradientSum(used, defer=defer)
        number = next(_number)
        _sums[number] = total
        views: Any = _SharedWeights.apply(total, *used)
        banks[key] = _SharedBank(weights, views, number)
    return banks[key].views, banks[key].number


def once_per_pass(key: Hashable, make: Callable[..., T], *weights: Tensor) -> T:
    """Returns make(*weights), inside `accumulate_weight_gradients` that of the first call.

    `key` names what is made. A result made without autograd is not used with it.
    """
    made = None if torch.compiler.is_compiling() else pass_scope().made
    if made is None:
        return make(*weights)
    place = (key, torch.is_grad_enabled(), *map(id, weights))
    if place not in made:
        made[place] = make(*weights), weights  # kept alive like those of a bank
    return made[place][0]


def sum_parts(parts: Tensor) -> Tensor:
    """Adds up the parts of a sum, (S, …), in order."""
    return parts.sum(0) if len(parts) > 1 else parts[0]


def gradient_sum(number: int) -> GradientSum | None:
    """Returns the sum with that number; None for 0, a call outside any context."""
    return _sums[number] if number else None


class _SharedWeights(torch.autograd.Function):
    """Returns the weights as views; its backward returns the sum over all calls.

    All calls use these views, so autograd runs this backward after theirs.
    """

    @staticmethod
    def forward(ctx: Any, total: GradientSum, *weights: Tensor) -> Sums:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        sums = ctx.total.pop()
        return None, *(_add(a, b) for a, b in zip(sums, grads, strict=True))


def joined_product(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Returns x Wᵀ, (…, O) for each (O, I) weight, by one product with all their rows.

    Their gradients are added in the product, without rounding each call's.
    """
    [joined_OI], number = shared_weights(*weights, defer=False, joins=True)
    y: Any = _JoinedProduct.apply(x, joined_OI, number)
    return y.split([len(w) for w in weights], -1)


class _JoinedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.total = gradient_sum(number)
        return F.linear(x, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_OI = ctx.saved_tensors
        grad_OT, x_TI = grads[0].flatten(0, -2).T, x.flatten(0, -2)
        d_x = grads[0] @ weight_OI if ctx.needs_input_grad[0] else None
        if ctx.total is None:
            return d_x, grad_OT @ x_TI if ctx.needs_input_grad[1] else None, None
        ctx.total.buffers()[0].addmm_(grad_OT, x_TI)
        return d_x, None, None


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Adds two gradients, either of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
