"""Gradients of weights that several depth steps of one pass share: summed in one buffer, and handed
out once.

Autograd would make a tensor of zeros for every use of a shared weight, fill it, and add it to the
sum so far: for a bank of experts that costs as much memory traffic as the products themselves.
Inside `accumulate_weight_gradients` every call on the same bank adds its gradient to the same
buffer (or, where the backend defers, saves its operands there, and all calls' gradients are one
product); the sum enters the graph once, when the last of them has run. Outside of it, and in
compiled code, each call returns its own gradient, and autograd adds them up.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sums = tuple[Tensor, ...]
WeightGradients = Callable[[list[Any]], Sums]


class GradientSum:
    """Accumulates the gradients of one bank's weights over one backward pass."""

    def __init__(self, weights: Sequence[Tensor], *, defer: bool) -> None:
        self.defer = defer
        self._forms = [(w.shape, w.dtype, w.device) for w in weights]
        self._clear()

    def buffers(self) -> Sums:
        """Returns one buffer per weight to add to: zeros at the first call of a backward pass."""
        self._discard_older_pass()
        if self._buffers is None:
            self._buffers = tuple(
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype, device in self._forms
            )
        return self._buffers

    def defer_call(self, operands: Any, weight_gradients: WeightGradients) -> None:
        """Saves a call's operands; `weight_gradients` will get all that were saved, in order."""
        self._discard_older_pass()
        self._deferred.append(operands)
        self._weight_gradients = weight_gradients

    def pop(self) -> Sums | tuple[None, ...]:
        """Returns the sums, which are then the caller's alone; None where there was no call."""
        self._discard_older_pass()
        sums = self._buffers
        if self._deferred and self._weight_gradients is not None:
            deferred = self._weight_gradients(self._deferred)
            if sums is not None:
                deferred = tuple(a.add_(b) for a, b in zip(sums, deferred, strict=True))
            sums = deferred
        self._clear()
        return (None,) * len(self._forms) if sums is None else sums

    def _discard_older_pass(self) -> None:
        """Forgets an earlier backward pass, which broke off or did not ask for these weights."""
        task = torch._C._current_graph_task_id()  # there is no public name for it
        if task != self._task:
            self._clear()
            self._task = task

    def _clear(self) -> None:
        self._buffers: Sums | None = None
        self._deferred: list[Any] = []
        self._weight_gradients: WeightGradients | None = None
        self._task = -1


class _SharedBank(NamedTuple):
    """One bank inside `accumulate_weight_gradients`."""

    weights: Sequence[Tensor]  # kept alive, so that no other tensor gets their ids
    views: Sums  # what calls use: through them the sum enters the graph
    number: int


_number = itertools.count(1)
# Ops take numbers, no objects.
_sums: weakref.WeakValueDictionary[int, GradientSum] = weakref.WeakValueDictionary()
_banks: ContextVar[dict[tuple[int, ...], _SharedBank] | None] = ContextVar("banks", default=None)


@contextmanager
def accumulate_weight_gradients() -> Iterator[None]:
    """Spans a forward pass, in which no weight changes, whose calls sum their weights' gradients.

    Spans may be nested: the inner one has sums of its own.
    """
    token = _banks.set({})
    try:
        yield
    finally:
        _banks.reset(token)


def shared_weights(*weights: Tensor, defer: bool) -> tuple[Sums, int]:
    """Returns the weights as a call is to use them, and the number of their gradient sum.

    The number is 0, and the weights are the given ones, outside of `accumulate_weight_gradients`.
    """
    banks = None if torch.compiler.is_compiling() else _banks.get()
    if banks is None or not torch.is_grad_enabled() or not all(w.requires_grad for w in weights):
        return weights, 0
    key = tuple(map(id, weights))
    if key not in banks:
        total = GradientSum(weights, defer=defer)
        number = next(_number)
        _sums[number] = total
        views: Any = _SharedWeights.apply(total, *weights)
        banks[key] = _SharedBank(weights, views, number)
    return banks[key].views, banks[key].number


def gradient_sum(number: int) -> GradientSum | None:
    """Returns the sum of that number; None for 0, a call outside of any span."""
    return _sums[number] if number else None


class _SharedWeights(torch.autograd.Function):
    """Returns the weights as views, and in the backward pass the sum that their calls have made.

    Autograd runs this backward after those of all calls, for they use its outputs.
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


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Adds two gradients, either of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
