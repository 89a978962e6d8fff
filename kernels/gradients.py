"""Gradients of weights that several depth steps of one pass share: summed in one buffer, and handed
out once.

Autograd would make a tensor of zeros for every use of a shared weight, fill it, and add it to the
sum so far: for a bank of experts that costs as much memory traffic as the products themselves.
Inside `one_pass` every call of a door on the same bank adds its gradient to the same buffer (or,
where the backend defers, leaves its operands there, and all calls' gradients are one product); the
sum enters the graph once, when the last of them has run. Outside of it, and in compiled code, each
call returns its own gradient, and autograd adds them up.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Sums = tuple[Tensor, ...]


class GradientSum:
    """What one backward pass has of the gradients of a bank's weights."""

    def __init__(self, weights: Sequence[Tensor], *, defer: bool) -> None:
        self.defer = defer
        self._forms = [(w.shape, w.dtype, w.device) for w in weights]
        self._clear()

    def buffers(self) -> Sums:
        """To add to: zeros at the first call of a backward pass."""
        self._enter()
        if self._buffers is None:
            self._buffers = tuple(
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype, device in self._forms
            )
        return self._buffers

    def leave(self, operands: Any, settle: Callable[[list[Any]], Sums]) -> None:
        """Defers a call: `settle` will be given all that was left, in order."""
        self._enter()
        self._left.append(operands)
        self._settle = settle

    def take(self) -> Sums | tuple[None, ...]:
        """The sums, which are then the caller's alone."""
        self._enter()
        sums = self._buffers
        if self._left and self._settle is not None:
            settled = self._settle(self._left)
            sums = (
                settled
                if sums is None
                else tuple(a.add_(b) for a, b in zip(sums, settled, strict=True))
            )
        self._clear()
        return (None,) * len(self._forms) if sums is None else sums

    def _enter(self) -> None:
        """What an earlier backward pass left behind, which broke off or did not ask for these
        weights, is nothing to this one.
        """
        task = torch._C._current_graph_task_id()  # there is no public name for it
        if task != self._task:
            self._clear()
            self._task = task

    def _clear(self) -> None:
        self._buffers: Sums | None = None
        self._left: list[Any] = []
        self._settle: Callable[[list[Any]], Sums] | None = None
        self._task = -1


_number = itertools.count(1)
_sums: weakref.WeakValueDictionary[int, GradientSum] = (
    weakref.WeakValueDictionary()
)  # ops take numbers, no objects
_pass: ContextVar[dict[tuple[int, ...], tuple[Sequence[Tensor], Sums, int]] | None] = ContextVar(
    "pass", default=None
)


@contextmanager
def one_pass() -> Iterator[None]:
    """A forward pass in which no weight changes. Passes may be nested: the inner one is its own."""
    token = _pass.set({})
    try:
        yield
    finally:
        _pass.reset(token)


def shared(*weights: Tensor, defer: bool) -> tuple[Sums, int]:
    """The weights as a call is to use them, and the number of their sum: 0 outside of a pass, where
    there is none.
    """
    known = None if torch.compiler.is_compiling() else _pass.get()
    if known is None or not torch.is_grad_enabled() or not all(w.requires_grad for w in weights):
        return weights, 0
    key = tuple(map(id, weights))
    if key not in known:
        total = GradientSum(weights, defer=defer)
        number = next(_number)
        _sums[number] = total
        # the weights themselves are kept, so that no other tensor gets their ids
        known[key] = (weights, _Share.apply(total, *weights), number)  # pyright: ignore[reportArgumentType]
    return known[key][1:]


def sum_of(number: int) -> GradientSum | None:
    """The sum of that number; None: of no pass."""
    return _sums[number] if number else None


class _Share(torch.autograd.Function):
    """The weights again. In the backward pass it comes after all their calls, and brings the sum of
    what these have added.
    """

    @staticmethod
    def forward(ctx: Any, total: GradientSum, *weights: Tensor) -> Sums:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        sums = ctx.total.take()
        return None, *(
            a if b is None else b if a is None else a + b for a, b in zip(sums, grads, strict=True)
        )
