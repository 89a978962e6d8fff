"""The backend on torch's own grouped product against the reference."""

from collections.abc import Callable
from functools import partial

import kernel_cases
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BIASES, CASES, Case, Perceptrons, irregular, make_routes
from pairwise import parametrize_pairs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels.activations import ACTIVATIONS
from moebius.kernels.backend import resolve_backend
from moebius.kernels.calls import SortedRoutes
from moebius.kernels.cpu.workspace import workspace
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.interface import ROW_SLACK
from moebius.kernels.libraries import grouped_mm
from moebius.model.routing import Routes

check = partial(kernel_cases.check, backend="grouped_mm")
values_and_gradients = partial(kernel_cases.values_and_gradients, backend="grouped_mm")

TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """What the operator leaves unwritten is not a number: rows past the last expert's, sums of
    experts without rows.

    Beside it the operator itself.
    """
    product = F.grouped_mm

    def poisoning(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        result = product(left, right, offs=offs)
        if result.ndim == 2:
            result[offs[-1] :] = float("nan")
        else:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return result

    def poisoned(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return workspace(name, shape, like).fill_(float("nan"))

    monkeypatch.setattr(F, "grouped_mm", poisoning)
    monkeypatch.setattr(grouped_mm, "workspace", poisoned)
    return product


@parametrize_pairs(
    {
        "name": CASES,
        "activation": ACTIVATIONS,
        "biases": ["no bias", "both biases"],
        ("dtype", "tolerance"): TOLERANCES,
    }
)
def test_mlp_equals_the_reference(
    name: str, activation: str, biases: str, dtype: torch.dtype, tolerance: float
) -> None:
    case, operation, generator = (
        CASES[name],
        Perceptrons(activation, BIASES[biases]),
        torch.Generator().manual_seed(1),
    )
    routes = make_routes(case, generator)
    x, weights = (
        torch.randn(case.tokens, case.d_in, generator=generator),
        operation.weights(case, generator),
    )
    if activation == "relu":
        x, weights = kernel_cases.away_from_the_kink(x, weights, operation)
    x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    check(operation, x, weights, routes, tolerance)
    check(operation, x, weights, irregular(routes), tolerance)


@pytest.mark.parametrize("biases", ["bias up", "bias down"])
def test_one_bias_alone(biases: str) -> None:
    case, operation, generator = (
        CASES["random"],
        Perceptrons("swiglu", BIASES[biases]),
        torch.Generator().manual_seed(2),
    )
    routes, x = (
        make_routes(case, generator),
        torch.randn(case.tokens, case.d_in, generator=generator),
    )
    check(operation, x, operation.weights(case, generator), routes, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize("widths", [(24, 8), (8, 24), (8, 8), (412, 82), (82, 412)], ids=str)
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(
    direction: str, widths: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = kernel_cases.head_routes(direction, generator)
    x = torch.randn(rows, widths[0], generator=generator).to(dtype)
    w = torch.randn(routes.num_experts, *widths, generator=generator).to(dtype)
    check(routed_linear, x, [w], routes, tolerance)
    check(routed_linear, x, [w], irregular(routes), tolerance)


@pytest.mark.parametrize("kind", ["slots", "expert choice", "two slots of a row"])
def test_routes_that_stand_in_order(kind: str) -> None:
    (routes, rows), generator = kernel_cases.equal_counts(kind), torch.Generator().manual_seed(15)
    x, operation = (
        torch.randn(rows, 12, generator=generator),
        Perceptrons("swiglu", BIASES["both biases"]),
    )
    check(operation, x, operation.weights(Case(rows, 12, 7, 5, 1), generator), routes, 1e-5)
    for d_out in (13, 8):
        check(routed_linear, x, [torch.randn(5, 12, d_out, generator=generator)], routes, 1e-5)


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 90),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    d_in=st.integers(1, 20),
    d_hidden=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    tokens: int, experts: int, top_k: int, d_in: int, d_hidden: int, seed: int
) -> None:
    """Of small whole numbers, so that no sum is rounded and every difference is an error."""
    case, generator = (
        Case(tokens, d_in, d_hidden, experts, min(top_k, experts)),
        torch.Generator().manual_seed(seed),
    )
    routes, operation = make_routes(case, generator), Perceptrons("relu", BIASES["both biases"])
    routes = routes.with_weights((routes.weight_N * 4).ceil() / 4)
    x, weights = (
        torch.randn(tokens, d_in, generator=generator).round(),
        operation.weights(case, generator),
    )
    weights = [w.round() for w in weights]
    for kind in (routes, irregular(routes)):
        check(operation, x, weights, kind, 1e-12)
        check(routed_linear, x, weights[:1], kind, 1e-12)


def odd_call() -> tuple[Tensor, list[Tensor], Routes, Tensor]:
    """x, weights, routes and the output's gradient of a layer with widths that are no multiple of
    anything.
    """
    case, generator = CASES["odd widths"], torch.Generator().manual_seed(6)
    routes, x = (
        make_routes(case, generator),
        torch.randn(case.tokens, case.d_in, generator=generator),
    )
    weights = Perceptrons("gelu", BIASES["both biases"]).weights(case, generator)
    return x, weights, routes, torch.randn(case.tokens, case.d_in + 1, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_bitwise_equal(dtype: torch.dtype) -> None:
    x, weights, routes, grad = odd_call()
    operation, x, weights = (
        Perceptrons("gelu", BIASES["both biases"]),
        x.to(dtype),
        [w.to(dtype) for w in weights],
    )
    first, second = (values_and_gradients(operation, x, weights, routes, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weights_that_begin_anywhere_in_memory_and_have_any_strides() -> None:
    """A shard's slice of a flat buffer begins where it begins; a transposed view has no contiguous
    rows.
    """
    case, generator = Case(30, 16, 8, 4, 2), torch.Generator().manual_seed(8)
    routes, x = make_routes(case, generator), torch.randn(30, 16, generator=generator)
    w_up = torch.randn(4 * 16 * 8 + 1, generator=generator)[1:].view(4, 16, 8)
    w_down = torch.randn(4, 16, 8, generator=generator).transpose(1, 2)
    expected = routed_mlp(x, w_up, w_down, routes, activation="silu", backend="reference")
    ours = routed_mlp(x, w_up, w_down, routes, activation="silu", backend="grouped_mm")
    assert w_up.data_ptr() % 16 != 0
    assert kernel_cases.relative(ours, expected) < 1e-5


def test_repeats_add_up_in_one_buffer() -> None:
    """Weights that serve three times in a pass get the sum of three gradients."""
    x, weights, routes, grad = odd_call()
    gradients = {}
    for backend in ("reference", "grouped_mm"):
        leaves = w_up, w_down = [w.clone().requires_grad_() for w in weights[:2]]
        with accumulate_weight_gradients():
            outputs = [
                routed_mlp(x * n, w_up, w_down, routes, activation="gelu", backend=backend)
                for n in (1, 2, 3)
            ]
        gradients[backend] = torch.autograd.grad(outputs, leaves, [grad] * 3)
    for mine, theirs in zip(gradients["grouped_mm"], gradients["reference"], strict=True):
        assert kernel_cases.relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_saved_is_no_wider_than_the_hidden_rows(activation: str) -> None:
    operation, case, generator = (
        Perceptrons(activation),
        Case(50, 29, 5, 4, 2),
        torch.Generator().manual_seed(13),
    )
    x, weights = (
        torch.randn(50, 29, requires_grad=True),
        [w.requires_grad_() for w in operation.weights(case, generator)],
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operation(x, *weights, make_routes(case, generator), backend="grouped_mm")
    given = {t.data_ptr() for t in (x, *weights)}
    own = [t for t in saved if t.is_floating_point() and t.ndim == 2 and t.data_ptr() not in given]
    assert [tuple(t.shape) for t in own] == [(50 * 2 + ROW_SLACK, weights[0].shape[2])]
    assert own[0].untyped_storage().nbytes() == own[0].nbytes


def test_nothing_is_read_on_the_host(
    product: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA each of these would wait for the device."""
    x, weights, routes, grad = odd_call()
    operation = Perceptrons("gelu", BIASES["both biases"])
    expected = values_and_gradients(operation, x, weights, routes, grad)
    assert routes.sorting.order_N is not None
    monkeypatch.setattr(F, "grouped_mm", product)  # the poison reads as well
    for name in ("item", "tolist", "__int__", "__bool__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(Tensor, name, partial(pytest.fail, f"Tensor.{name} is called"))
    ours = values_and_gradients(operation, x, weights, routes, grad)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_torch_counts_the_products_of_the_door_and_no_others() -> None:
    x, weights, routes, _ = odd_call()
    counter = FlopCounterMode(display=False)
    with counter:
        x, w_up, w_down = (value.requires_grad_() for value in (x, *weights[:2]))
        routed_mlp(
            x, w_up, w_down, routes, activation="gelu", backend="grouped_mm"
        ).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 130 * 4 * (41 * 13 + 13 * 42)


def test_it_compiles_into_one_graph() -> None:
    x, weights, routes, grad = odd_call()
    leaves = [value.requires_grad_() for value in (x, *weights[:2])]
    call: Callable[..., Tensor] = partial(
        routed_mlp, routes=routes, activation="gelu", backend="grouped_mm"
    )
    compiled: Callable[..., Tensor] = torch.compile(
        lambda *leaves: call(*leaves) + 1, backend="aot_eager", fullgraph=True
    )
    ours, expected = compiled(*leaves), call(*leaves) + 1
    assert torch.equal(ours, expected)
    gradients = (torch.autograd.grad(y, leaves, grad) for y in (ours, expected))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def test_what_cannot_be_is_refused() -> None:
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float16)):
        with pytest.raises(
            ValueError, match=rf"backend='grouped_mm' cannot run here: .*{dtype}: choose segments"
        ):
            resolve_backend("grouped_mm", torch.device(device), dtype)
    for device, dtype in (
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("cuda", torch.bfloat16),
    ):
        assert resolve_backend("grouped_mm", torch.device(device), dtype) == "grouped_mm"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_it_equals_the_reference(name: str) -> None:
    kernel_cases.check_on_a_gpu(CASES[name], backend="grouped_mm")


def test_more_experts_than_one_kernel_takes_are_refused_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, pretended: the operator itself has no such limit on CPUs."""
    starts = torch.arange(1025, dtype=torch.int32)
    routes = SortedRoutes(torch.ones(1024), None, None, starts, None, None, 1024, 1, 1, 1)
    x, w = torch.randn(1024, 4), torch.randn(1024, 4, 4)
    assert grouped_mm.linear_forward(x, w, routes)[0].shape == (1024, 4)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    with pytest.raises(ValueError, match="at most 1023 experts on CUDA, and these are 1024"):
        grouped_mm.linear_forward(x, w, routes)
