"""The expert operations as torch operators: schemas, meta shapes, graphs, FLOPs, and refused input."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_cases import Case, Operation, all_equal, make_call, make_routes, on_device
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels import ops
from moebius.kernels.functional import routed_linear, routed_mlp, sorted_fields
from moebius.kernels.reference import ACTIVATIONS
from moebius.model.routing import Routes

CASE = Case(9, 6, 4, 3, 2)
COUNTS = pytest.mark.parametrize("static", [False, True], ids=["counted", "known counts"])


def leaves_of(
    activation: str, biases: str, *, static: bool = False
) -> tuple[Operation, list[Tensor], Routes]:
    """An operation, its leaves (x and weights) and routes: 9 tokens twice through 3 experts."""
    operation, x, weights, routes = make_call(CASE, activation, biases, seed=7)
    if static:
        routes = replace(routes, expert_N=torch.arange(18) // 6, per_expert=6)
    return operation, [leaf.requires_grad_() for leaf in (x, *weights)], routes


def arguments(operator: Any, given: dict[str, Any]) -> tuple:
    """The arguments of an operator in the order of its schema."""
    return tuple(given[each.name] for each in operator._opoverload._schema.arguments)


def mlp_fields(leaves: Sequence[Tensor], routes: Routes, activation: str) -> dict[str, Any]:
    x, w_up, w_down, *biases = leaves
    b_up, b_down = biases or (None, None)
    given = sorted_fields(routes) | {"x_UD": x, "w_up_EDW": w_up, "w_down_EFO": w_down}
    given |= {"b_up_EW": b_up, "b_down_EO": b_down, "activation": activation}
    return given | {"backend": "segments", "number": 0}


@COUNTS
@pytest.mark.parametrize("biases", ["no bias", "both biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ops_are_well_behaved_custom_operators(
    activation: str, biases: str, static: bool
) -> None:
    """Schema, fake tensors and autograd registration, as torch's own checker sees them."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    _, leaves, routes = leaves_of(activation, biases, static=static)
    routes = routes.with_weights(routes.weight_N.detach().requires_grad_())
    given = mlp_fields(leaves, routes, activation)
    calls = [(ops.routed_mlp, given)]
    calls += [(ops.routed_linear, given | {"w_EDO": leaves[1]})]
    grad_TO, saved = (value.detach() for value in ops.routed_mlp(*arguments(*calls[0])))
    given = given | {"grad_TO": grad_TO, "saved": saved, "are_new": False}
    zeros = [torch.zeros_like(w) for w in leaves[1:3]]
    calls += [(ops.MLP.backward, given | {"into": zeros})]
    for operator, values in calls:
        torch.library.opcheck(operator._opoverload, arguments(operator, values), test_utils=checks)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["auto", "grouped_mm"])
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_the_operations_compile_into_one_graph_forward_and_backward(
    activation: str, backend: str
) -> None:
    torch.compiler.reset()
    operation, leaves, routes = leaves_of(activation, "both biases")
    for call, given in ((operation, leaves), (routed_linear, leaves[:2])):

        def run(*leaves: Tensor, call: Operation = call) -> Tensor:
            return call(*leaves, routes, backend=backend) + 1

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        outputs = compiled(*given), run(*given)
        assert torch.equal(*outputs)
        assert all_equal(*(torch.autograd.grad(y.square().sum(), given) for y in outputs))


def flops_of(operation: Operation, leaves: list[Tensor], routes: Routes, backend: str) -> int:
    """Of forward and backward together."""
    counter = FlopCounterMode(display=False)
    with counter:
        operation(*leaves, routes, backend=backend).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_counts_the_same_products_as_in_the_reference(activation: str) -> None:
    operation, leaves, routes = leaves_of(activation, "both biases")
    on_meta = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    for call, count in ((operation, len(leaves)), (routed_linear, 2)):
        expected = flops_of(call, leaves[:count], routes, "reference")
        assert expected > 0
        for backend in ("segments", "grouped_mm"):
            assert flops_of(call, leaves[:count], routes, backend) == expected
        assert flops_of(call, on_meta[:count], on_device(routes, "meta"), "segments") == expected
    columns = leaves[1].shape[2]
    assert flops_of(operation, leaves, routes, "segments") == 3 * 2 * 18 * (6 * columns + 4 * 7)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"activation": "tanh"},
            "activation='tanh' is unknown: choose relu, relu2, gelu, silu, swiglu",
        ),
        ({"activation": "swiglu"}, r"w_up has shape \(2, 4, 2\); .* needs \(2, 4, 4\)"),
        ({"b_up_EF": torch.zeros(2, 3)}, r"b_up_EF has shape \(2, 3\); .* needs \(2, 2\)"),
        ({"b_down_EO": torch.zeros(2, 3)}, r"b_down_EO has shape \(2, 3\); .* needs \(2, 4\)"),
        ({"backend": "cuda9"}, "'cuda9' is unknown: choose auto, reference, segments"),
        ({"per_expert": 2}, "per_expert=2 does not fit 3 routes over 2 experts"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    routes = make_routes(Case(3, 4, 2, 2, 1), torch.Generator().manual_seed(9))
    call = partial(routed_mlp, torch.zeros(3, 4), torch.zeros(2, 4, 2), torch.zeros(2, 2, 4))
    if "per_expert" in changes:
        routes, changes = replace(routes, **changes), {}
        with pytest.raises(ValueError, match=told):
            routed_linear(torch.zeros(3, 4), torch.zeros(2, 4, 2), routes)
    with pytest.raises(ValueError, match=told):
        call(routes, **changes)
