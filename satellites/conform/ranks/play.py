"""Runs one forward and backward pass of a layer and returns all results as arrays."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..contract import Layer
from ..scenes import Batch
from . import weights
from .job import GATES, INPUT, OUTPUT, PARAMETER, Arrays, Events


def play(
    layer: Layer,
    module: nn.Module,
    whole: Batch,
    rows: slice | None,
    events: Events | None = None,
) -> Arrays:
    """Runs forward and backward on some rows of a batch.

    Returns:
        The output, the gradients of rows and gates, and those of the parameters.

    Raises:
        RuntimeError: the output is not a tensor of the rows' shape, or has no autograd graph.
    """
    own = slice(None) if rows is None else rows
    module.zero_grad(set_to_none=True)
    dtype = weights.dtype_of(module)
    x_TD = torch.from_numpy(whole.x_TD[own].copy()).to(dtype).requires_grad_()
    gates_TK = torch.from_numpy(whole.gates_TK[own].copy()).to(dtype).requires_grad_()
    experts_TK = torch.from_numpy(whole.experts_TK[own].copy())
    given = (experts_TK, gates_TK) if layer.routes == "given" else ()
    call = layer.call or (lambda module, *arguments: module(*arguments))
    y_TD = call(module, x_TD, *given)
    y_TD = y_TD[0] if isinstance(y_TD, tuple) else y_TD
    _check_output(y_TD, x_TD)
    if events is not None:
        events.note("backward")
    y_TD.backward(torch.from_numpy(whole.gradient_TD[own].copy()).to(y_TD.dtype))
    played = {OUTPUT: weights.as_array(y_TD), INPUT: _gradient(x_TD)}
    if given:
        played[GATES] = _gradient(gates_TK)
    return played | parameter_gradients(module)


def _check_output(y_TD: object, x_TD: Tensor) -> None:
    if not isinstance(y_TD, Tensor) or y_TD.shape != x_TD.shape:
        shape = tuple(y_TD.shape) if isinstance(y_TD, Tensor) else type(y_TD).__name__
        raise RuntimeError(
            f"the layer returned {shape} for rows of {tuple(x_TD.shape)}; adapt it with Layer.call"
        )
    if not y_TD.requires_grad:
        raise RuntimeError(
            "the output has no autograd graph, so this rank would never issue the collectives of its "
            f"backward pass, for which the others wait ({len(x_TD)} rows here)"
        )


def _gradient(tensor: Tensor) -> NDArray[np.float64]:
    return weights.as_array(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)


def parameter_gradients(module: nn.Module) -> Arrays:
    """Returns the current gradients of the parameters."""
    return {f"{PARAMETER}{name}": g for name, g in weights.gradients_of(module).items()}
