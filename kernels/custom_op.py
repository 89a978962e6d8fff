"""Operators of `torch.library` that eager mode calls without the library.

The library costs 50 to 200 µs of Python per call, more than launching a call's kernels. So a
`CustomOp` calls the same function as a plain `torch.autograd.Function`, or as it is if no gradient is
needed. Under `torch.compile`, in a mode of torch (fake tensors, FLOP counting, vmap) and for other
tensors than plain ones with data it calls the library's operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
_TENSORS = frozenset({Tensor, torch.nn.Parameter})  # subclasses have rules of their own
_VALUES = frozenset({type(None), bool, int, float, str, list, torch.dtype})
_ORDINARY = ("ADInplaceOrView", "BackendSelect")  # the latter in inference mode


def custom_op(
    name: str, *, mutates_args: tuple[str, ...] = (), schema: str | None = None
) -> Callable[[Function], "CustomOp"]:
    """Makes a `CustomOp` of a function; takes what `torch.library.custom_op` takes."""
    return lambda run: CustomOp(name, run, mutates_args, schema)


class CustomOp:
    """An operator of `torch.library`, and the function behind it for eager mode.

    The function must not return its arguments or views of them: the library forbids it. Tensors in
    lists have no gradients.
    """

    def __init__(
        self, name: str, run: Function, mutates_args: tuple[str, ...], schema: str | None
    ) -> None:
        define = torch.library.custom_op(name, mutates_args=mutates_args, schema=schema)
        self._op, self._run = define(run), run
        self._opoverload, self.register_fake = self._op._opoverload, self._op.register_fake
        self._names = [argument.name for argument in self._opoverload._schema.arguments]
        self._mutated = [self._names.index(each) for each in mutates_args]
        self._with_gradients: Function = self._op

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """Registers the operator's gradients, as `torch.library.CustomOpDef` does."""
        self._op.register_autograd(backward, setup_context=setup_context)
        run = self._run

        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._with_gradients = type(self._op._name, (torch.autograd.Function,), members).apply

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the function, under autograd if an argument needs a gradient."""
        if torch.compiler.is_compiling() or len(args) + len(named) != len(self._names):
            return self._op(*args, **named)
        if named:
            args = (*args, *[named[name] for name in self._names[len(args) :]])
        needs_gradient = _needs_gradient(args)
        if needs_gradient is None:
            return self._op(*args)
        if needs_gradient and torch.is_grad_enabled():
            return self._with_gradients(*args)
        for place in self._mutated:  # kernels write without torch's knowledge
            torch.autograd.graph.increment_version(args[place])
        return self._run(*args)


_known: dict[int, bool] = {}  # whether no mode is active, by the dispatcher's state


def _needs_gradient(args: tuple[Any, ...]) -> bool | None:
    """Returns whether an argument needs a gradient; None if only the library can handle the call.

    That is so for other tensors than plain ones with data, and while a mode of torch is active in
    this thread.
    """
    needs_gradient = has_no_data = False
    for each in args:
        kind = type(each)
        if kind in _TENSORS:
            needs_gradient |= each.requires_grad
            has_no_data |= each.is_meta
        elif kind not in _VALUES:
            return None
    # a mode of functions sees plain tensors, too
    if has_no_data or torch.overrides.has_torch_function(args):
        return None
    keys = torch._C._dispatch_tls_local_include_set()  # torch has no public name for it
    state = keys.raw_repr()
    if state not in _known:
        _known[state] = keys.highestPriorityTypeId().name in _ORDINARY
    return needs_gradient if _known[state] else None
