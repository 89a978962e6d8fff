"""The operations with the Triton backend, in its interpreter: autograd, deferred gradients, well-behaved
operators.
"""

import pytest
import torch
from kernel_cases import BIASES, Case, Perceptrons, check, head_routes, make_routes
from pairwise import slow_but
from torch import Tensor

from moebius.kernels import ops
from moebius.kernels.backend import KernelConfig
from moebius.kernels.functional import _flat, routed_linear, routed_mlp
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.model.routing import Routes

CASE = Case(17, 12, 7, 5, 2)


@pytest.mark.parametrize("biases", slow_but(BIASES, "no bias", "both biases"))
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_perceptrons(activation: str, biases: str) -> None:
    generator = torch.Generator().manual_seed(1)
    operation = Perceptrons(activation, BIASES[biases])
    x = torch.randn(CASE.tokens, CASE.d_in, generator=generator)
    check(
        operation,
        x,
        operation.weights(CASE, generator),
        make_routes(CASE, generator),
        1e-5,
        "triton",
    )


@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_matrices(direction: str) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = head_routes(direction, generator)
    x, w = (
        torch.randn(rows, 24, generator=generator),
        torch.randn(routes.num_experts, 24, 8, generator=generator),
    )
    check(routed_linear, x, [w], routes, 1e-5, "triton")


def test_switches_reach_the_kernels() -> None:
    generator = torch.Generator().manual_seed(3)
    backend = KernelConfig(backend="triton", switches=("scatter_add", "fused")).name
    operation = Perceptrons("relu")
    x = torch.randn(CASE.tokens, CASE.d_in, generator=generator)
    check(
        operation,
        x,
        operation.weights(CASE, generator),
        make_routes(CASE, generator),
        1e-5,
        backend,
    )


def repeats(backend: str, routes: Routes, dtype: torch.dtype, *, defer: bool) -> list[Tensor]:
    """Gradients of a layer that is applied three times: of its input and its weights."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((CASE.tokens, 12), (5, 12, 7), (5, 7, 12), (5, 12, 12))
    leaves = [
        (0.3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
        for shape in shapes
    ]
    x, w_up, w_down, w = leaves
    routes = routes.with_weights(routes.weight_N.to(dtype))
    with accumulate_weight_gradients():
        for _ in range(3):
            x = x + routed_mlp(x, w_up, w_down, routes, backend=backend, defer=defer)
            x = x + routed_linear(x, w, routes, backend=backend, defer=defer)
    return list(torch.autograd.grad(x.square().sum(), leaves))


@pytest.mark.slow
@pytest.mark.parametrize("defer", [False, True])
def test_the_weights_of_repeats(defer: bool) -> None:
    routes = make_routes(CASE, torch.Generator().manual_seed(5))
    expected = repeats("reference", routes, torch.float64, defer=False)
    for mine, theirs in zip(
        repeats("triton", routes, torch.float32, defer=defer), expected, strict=True
    ):
        assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-5


@pytest.mark.slow
def test_the_operators_are_well_behaved() -> None:
    generator, checks = (
        torch.Generator().manual_seed(6),
        ("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    routes = make_routes(CASE, generator)
    routes = routes.with_weights(routes.weight_N.requires_grad_())
    x, w_up, w_down = (
        torch.randn(s, generator=generator).requires_grad_()
        for s in ((17, 12), (5, 12, 7), (5, 7, 12))
    )
    bank = (w_up, w_down, None, None, "relu")
    torch.library.opcheck(
        ops.routed_mlp, (x, *bank, *_flat(routes), "triton", 0), test_utils=checks
    )
    torch.library.opcheck(
        ops.routed_linear, (x, w_up, *_flat(routes), "triton", 0), test_utils=checks
    )
