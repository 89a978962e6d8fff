"""Operators of `torch.library` that eager mode calls without the library.

`torch.library.custom_op` gives an operator a schema, shapes without data, a place for its FLOP
formula and one node in compiled graphs. Its path through the dispatcher costs 50 to 200 µs of Python
per call, more than launching the kernels that the call is for. Wherever nobody looks at operators, a
`CustomOp` therefore calls the same functions as a plain `torch.autograd.Function`, or as they are if
no gradient is needed. Under `torch.compile`, in a mode of torch (fake tensors, FLOP counting, vmap)
and with other tensors than plain ones with data, it calls the library's operator.
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
        self._opoverload = self._op._opoverload
        self._names = [argument.name for argument in self._opoverload._schema.arguments]
        self._mutated = [self._names.index(each) for each in mutates_args]
        self._function: type[torch.autograd.Function] | None = None

    def register_fake(self, function: Function) -> Function:
        """Registers the function that returns the operator's results without data."""
        return self._op.register_fake(function)

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """Registers the operator's gradients, as `torch.library.CustomOpDef` does."""
        self._op.register_autograd(backward, setup_context=setup_context)
        run = self._run

        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(self._op._name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the function, under autograd if an argument needs a gradient."""
        if torch.compiler.is_compiling() or len(args) + len(named) != len(self._names):
            return self._op(*args, **named)
        args = (*args, *(named[name] for name in self._names[len(args) :]))
        tensors = [each for each in args if type(each) in _TENSORS]
        if not _is_plain(args, tensors):
            return self._op(*args)
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            return (self._op if self._function is None else self._function.apply)(*args)
        for place in self._mutated:  # kernels write without torch's knowledge
            torch.autograd.graph.increment_version(args[place])
        return self._run(*args)


def _is_plain(args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Returns whether nobody but autograd can tell these arguments' operator from its function."""
    return (
        all(type(each) in _VALUES for each in args if type(each) not in _TENSORS)
        and not tensors[0].is_meta
        and not torch.overrides.has_torch_function(())  # true in a mode of torch's functions
        and _is_eager()
    )


_known: dict[int, bool] = {}


def _is_eager() -> bool:
    """Returns whether no mode of torch's dispatcher is active in this thread."""
    keys = torch._C._dispatch_tls_local_include_set()  # torch has no public name for it
    state = keys.raw_repr()
    if state not in _known:
        _known[state] = keys.highestPriorityTypeId().name in _ORDINARY
    return _known[state]
