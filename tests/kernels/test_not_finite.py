"""Rows that are not finite spoil their own expert's gradients and no other's, whatever the backend
fills up its products with.

A NaN in one row is a NaN in the weights' gradient of the expert that it went through, and has to be.
Expert parallelism puts other experts beside that one, so what leaks depends on the layout.
"""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import (
    BIASES,
    Case,
    Perceptrons,
    values_and_gradients,
)
from torch import Tensor

from moebius.kernels.backend import reason_against
from moebius.kernels.functional import routed_linear
from moebius.model.routing import Routes, token_routes

KINDS = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend, dtypes in {
        "reference": (torch.float64,),
        "segments": (torch.float64, torch.float32, torch.bfloat16),
        "brgemm": (torch.float32, torch.bfloat16),
        "grouped_mm": (torch.float32, torch.bfloat16),
    }.items()
    for dtype in dtypes
]
expert_of = torch.tensor([0] * 3 + [1] * 2 + [2] * 4 + [3] * 3)  # of every token
WIDTH = 6


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_rows_that_are_not_finite_spoil_no_other_experts_gradients(
    bad: float, backend: str, dtype: torch.dtype
) -> None:
    """In the rows that come in, or in the gradient that comes back; in every expert's turn."""
    if (reason := reason_against(backend, "cpu", dtype)) is not None:
        pytest.skip(f"{backend}: {reason}")
    for operation, weights in operations(dtype):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(len(expert_of), weights[0].shape[1], generator=generator).to(dtype)
        width = weights[min(1, len(weights) - 1)].shape[2]
        grad = torch.randn(len(expert_of), width, generator=generator).to(dtype)
        clean = values_and_gradients(operation, x, weights, routes(dtype), grad, backend)
        for sick in range(4):
            rows = expert_of == sick
            spoilt_x, spoilt_grad = x.clone(), grad.clone()
            spoilt_x[rows], spoilt_grad[rows] = bad, bad
            for arguments in ((spoilt_x, grad), (x, spoilt_grad)):
                spoilt = values_and_gradients(
                    operation, arguments[0], weights, routes(dtype), arguments[1], backend
                )
                assert any(not found.isfinite().all() for found in spoilt)
                assert unlike(clean, spoilt, sick) == []


def operations(dtype: torch.dtype) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """Perceptrons of three kinds, with biases, and matrices with wide and narrow outputs."""
    generator, case = torch.Generator().manual_seed(2), Case(len(expert_of), WIDTH, 5, 4, 1)
    found: list[tuple[Callable[..., Tensor], list[Tensor]]] = []
    for activation in ("relu", "gelu", "swiglu"):
        operation = Perceptrons(activation, BIASES["both biases"])
        found.append((operation, [w.to(dtype) for w in operation.weights(case, generator)]))
    up, down, *_ = found[0][1]
    return [*found, (routed_linear, [up]), (routed_linear, [down])]


def routes(dtype: torch.dtype) -> Routes:
    """One route per token, weighted by 0.7."""
    gate = torch.full((len(expert_of), 1), 0.7, dtype=torch.promote_types(dtype, torch.float32))
    return token_routes(expert_of[:, None], gate, num_experts=4)


def unlike(clean: list[Tensor], spoilt: list[Tensor], sick: int) -> list[str]:
    """What differs in the rows of other tokens, and in the gradients of other experts."""
    last = len(clean) - 1
    names = ["y", "x", *(f"weights {index}" for index in range(last - 2)), "gate"]
    others = expert_of != sick, torch.arange(4) != sick
    return [
        name
        for index, (name, before, after) in enumerate(zip(names, clean, spoilt, strict=True))
        if not torch.equal(
            *(both[others[0 if index in (0, 1, last) else 1]] for both in (before, after))
        )
    ]
