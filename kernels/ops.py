"""The expert operations as torch operators: schemas, fake and autograd registrations, FLOP formulas.

Meta-device dry runs, torch.compile and torch's FlopCounterMode therefore work. An op's arguments are
the fields of its call (`MLPCall` or `LinearCall`, calls.py), in order. Each of the two operations has three ops:

    NAME                 returns the result and the rows that the backward reads, in sorted order: a
                         perceptron's before the activation, a matrix's before the gate weight
    NAME_backward        returns the gradients, and adds the weights' to new buffers or to those of
                         the pass (gradients.py)
    NAME_backward_rows   omits the weights' gradients, which a deferring backend computes later for
                         all calls of the pass

Legend: U source rows, N routes, E experts, D input width, W columns before the activation, O output
width.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .backend import implementation
from .calls import (
    Backend,
    Deferred,
    DeferringBackend,
    GradientBuffers,
    LinearCall,
    MLPCall,
    RowGradients,
)
from .custom_op import custom_op
from .gradients import gradient_sum

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", str: "str"}
_BACKWARD = "Tensor grad_TO, Tensor saved, "
_INTO = "Tensor(a!)[] into, bool are_new, "
Record = type[MLPCall] | type[LinearCall]


class _Operation:
    """The ops of one operation; `kind` is the prefix of its methods' names in a backend."""

    def __init__(self, kind: str, record: Record) -> None:
        self._kind, self._record = kind, record
        self._names = [field.name for field in fields(record)]
        results = ", ".join(["Tensor"] * (2 + len(record.BIASES)))
        self.forward = self._define("", "", "Tensor, Tensor", self._run_forward)
        self.forward.register_fake(self._fake_forward)
        self.backward = self._define("_backward", _BACKWARD + _INTO, results, self._run_backward)
        self.backward.register_fake(self._fake_backward)
        results += ", Tensor" * record.HAS_HIDDEN_ROWS
        self.rows = self._define("_backward_rows", _BACKWARD, results, self._run_rows)
        self.rows.register_fake(self._fake_rows)
        self.forward.register_autograd(self._gradients, setup_context=self._keep)
        for op, formula in (
            (self.forward, self._forward_flops),
            (self.backward, self._backward_flops),
            (self.rows, self._rows_flops),
        ):
            register_flop_formula(op._opoverload.overloadpacket)(formula)

    def _define(self, end: str, before: str, results: str, run: Callable[..., Any]) -> Any:
        record = ", ".join(f"{_SCHEMA_TYPES[f.type]} {f.name}" for f in fields(self._record))
        schema, name = f"({before}{record}) -> ({results})", f"moebius::routed_{self._kind}{end}"
        mutates = ("into",) if "into" in before else ()
        return custom_op(name, mutates_args=mutates, schema=schema)(run)

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        return self._record(*arguments)

    def _method(self, backend: Backend, end: str) -> Callable[..., Any]:
        return getattr(backend, f"{self._kind}_{end}")

    # Execution

    def _run_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = self._call(arguments)
        return self._method(implementation(call.backend), "forward")(call)

    def _run_backward(
        self, grad_TO: Tensor, saved: Tensor, into: list[Tensor], are_new: bool, *arguments: Any
    ) -> tuple[Tensor, ...]:
        call = self._call(arguments)
        backward = self._method(implementation(call.backend), "backward")
        return _results(call, backward(call, grad_TO, saved, GradientBuffers(into, are_new)))

    def _run_rows(self, grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        call = self._call(arguments)
        found = self._method(implementation(call.backend), "backward_rows")(call, grad_TO, saved)
        return *_results(call, found), *([] if found.z_NW is None else [found.z_NW])

    # Shapes

    def _fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = self._call(arguments)
        y_TO = call.x_UD.new_empty(call.num_targets, call.width_out)
        return y_TO, call.x_UD.new_empty(call.saved_shape)

    def _fake_backward(
        self, grad_TO: Tensor, saved: Tensor, into: list[Tensor], are_new: bool, *arguments: Any
    ) -> tuple[Tensor, ...]:
        call = self._call(arguments)
        given = call.x_UD, call.weight_N, *(getattr(call, name) for name in call.BIASES)
        return tuple(torch.empty_like(_or_empty(call, value)) for value in given)

    def _fake_rows(self, grad_TO: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        rows = self._fake_backward(grad_TO, saved, [], False, *arguments)
        return *rows, *([torch.empty_like(saved)] if self._record.HAS_HIDDEN_ROWS else [])

    # FLOPs of the products alone, two per multiply-accumulate, as torch counts its own ops. Deferred
    # products count with their call. Here the records hold shapes instead of tensors.

    def _forward_flops(self, *arguments: Any, **_: Any) -> int:
        call = self._call(arguments)
        sizes = (getattr(call, name) for name in call.WEIGHTS)
        return 2 * call.weight_N[0] * sum(width_in * width for _, width_in, width in sizes)

    def _backward_flops(
        self, grad_TO: Any, saved: Any, into: Any, are_new: bool, *arguments: Any, **_: Any
    ) -> int:
        return 2 * self._forward_flops(*arguments)

    def _rows_flops(self, grad_TO: Any, saved: Any, *arguments: Any, **_: Any) -> int:
        return 2 * self._forward_flops(*arguments)

    # Autograd

    def _keep(self, ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        """Saves a call and its saved rows for the backward pass."""
        values, saved = dict(zip(self._names, inputs, strict=True)), output[1]
        ctx.names = [name for name, value in values.items() if isinstance(value, Tensor)]
        ctx.others = {name: value for name, value in values.items() if name not in ctx.names}
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)  # no zeros for non-differentiable outputs
        ctx.save_for_backward(*(values[name] for name in ctx.names), saved)

    def _gradients(self, ctx: Any, grad_TO: Tensor | None, *_saved: Tensor) -> tuple:
        if grad_TO is None:
            return (None,) * len(self._names)
        *tensors, saved = ctx.saved_tensors
        values = dict(zip(ctx.names, tensors, strict=True)) | ctx.others
        call, grad_TO = self._record(**values), grad_TO.contiguous()
        weights = [values[name] for name in call.WEIGHTS]
        backend, total = implementation(call.backend), gradient_sum(call.number)
        found: dict[str, Tensor | None] = {}
        if total is not None and total.defer and isinstance(backend, DeferringBackend):
            rows = self.rows(grad_TO=grad_TO, saved=saved, **values)
            z_NW = rows[-1] if call.HAS_HIDDEN_ROWS else None
            deferred = Deferred(call, grad_TO, saved, z_NW)
            total.defer_call(deferred, self._method(backend, "weight_gradients"))
        else:
            are_new = total is None and backend.writes and call.HAS_HIDDEN_ROWS
            new = torch.empty_like if are_new else torch.zeros_like
            into = [new(w) for w in weights] if total is None else list(total.buffers())
            given = {"grad_TO": grad_TO, "saved": saved, "into": into, "are_new": are_new}
            rows = self.backward(**given, **values)
            if total is None:
                found = dict(zip(call.WEIGHTS, into, strict=True))
        found |= zip(("x_UD", "weight_N", *call.BIASES), rows, strict=False)
        return tuple(None if values[name] is None else found.get(name) for name in self._names)


def _results(call: MLPCall | LinearCall, found: RowGradients) -> tuple[Tensor, ...]:
    biases = (found.b_up_EW, found.b_down_EO)[: len(call.BIASES)]
    return found.x_UD, found.weight_N, *(_or_empty(call, bias) for bias in biases)


def _or_empty(call: MLPCall | LinearCall, value: Tensor | None) -> Tensor:
    """Replaces a missing bias by an empty tensor, because ops return tensors only."""
    return call.x_UD.new_empty(0) if value is None else value


MLP, LINEAR = _Operation("mlp", MLPCall), _Operation("linear", LinearCall)
routed_mlp, routed_linear = MLP.forward, LINEAR.forward
