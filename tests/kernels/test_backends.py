"""Every backend against the reference: values and all gradients, with adversarial routings and with
uninitialised memory filled with NaN.

MegaBlocks' operators are a stand-in here; the Triton kernels have their own session
(triton/test_interpreted.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BIASES,
    CASES,
    Case,
    Operation,
    Perceptrons,
    all_equal,
    check,
    clamped_swiglu,
    equal_counts,
    gpt_oss_call,
    head_routes,
    irregular,
    make_call,
    values_and_gradients,
)
from megablocks_stand_in import StandIn, stand_in
from pairwise import parametrize_pairs
from torch import Tensor

from moebius.kernels import segments
from moebius.kernels.backend import reason_against
from moebius.kernels.calls import ROW_SLACK
from moebius.kernels.cpu import brgemm
from moebius.kernels.cpu.library import workspace
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.libraries import grouped_mm
from moebius.kernels.reference import ACTIVATIONS, GATES
from moebius.model.routing import Routes, token_routes

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend, dtypes in {
        "segments": (F64, F32, BF16),
        "brgemm": (F32, BF16),
        "grouped_mm": (F32, BF16),
        "megablocks": (F32,),
    }.items()
    for dtype in dtypes
]
BACKENDS = ["segments", "brgemm", "grouped_mm", "megablocks"]
every_kind = pytest.mark.parametrize(("backend", "dtype"), KINDS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
nan = float("nan")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fills unwritten memory with NaN: fresh memory, workspaces, and what torch's grouped product
    leaves unwritten. Skips backends that cannot run.
    """
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    backend, dtype = parameters.get("backend", "segments"), parameters.get("dtype", F32)
    if backend != "megablocks" and (reason := reason_against(backend, "cpu", dtype)):
        pytest.skip(f"{backend}: {reason}")
    for module in (segments, brgemm, grouped_mm):
        monkeypatch.setattr(module, "workspace", lambda *args: workspace(*args).fill_(nan))
    product = F.grouped_mm

    def poisoning(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        result = product(left, right, offs=offs)
        if result.ndim == 2:
            result[offs[-1] :] = nan  # rows past the last expert's
        else:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = nan  # experts without rows
        return result

    monkeypatch.setattr(F, "grouped_mm", poisoning)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def megablocks() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found


@pytest.mark.sample(40)
@parametrize_pairs(
    {
        "name": CASES,
        "activation": ACTIVATIONS,
        "biases": BIASES,
        ("backend", "dtype"): KINDS,
    }
)
def test_mlp_equals_the_reference(
    name: str, activation: str, biases: str, backend: str, dtype: torch.dtype
) -> None:
    operation, x, weights, routes = make_call(name, activation, biases, kink=dtype is not BF16)
    weights = [w.to(dtype) for w in weights]
    for kind in (routes, irregular(routes)):
        check(operation, x.to(dtype), weights, kind, backend)


@pytest.mark.parametrize("widths", [(1025, 70), (70, 2100), (513, 300)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(("backend", "dtype"), KINDS[3:5])
def test_experts_larger_than_a_panel_equal_the_reference(
    activation: str, widths: tuple[int, int], backend: str, dtype: torch.dtype
) -> None:
    """Widths around the edges of panels and of sums over k; the third expert is empty."""
    case = Case(560, *widths, experts=2, top_k=1)
    operation, x, weights, routes = make_call(case, activation, "no bias", kink=False)
    weights = [torch.cat((w, w[:1])).to(dtype) for w in weights]
    routes = replace(routes, num_experts=3)
    check(operation, x.to(dtype), weights, routes, backend)


@pytest.mark.sample(30)
@every_kind
@pytest.mark.parametrize("widths", [(24, 8), (8, 24), (8, 8), (412, 82), (82, 412)], ids=str)
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(
    direction: str, widths: tuple[int, int], backend: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = head_routes(direction, generator)
    x = torch.randn(rows, widths[0], generator=generator).to(dtype)
    w = torch.randn(routes.num_experts, *widths, generator=generator).to(dtype)
    for kind in (routes, irregular(routes)):
        check(routed_linear, x, [w], kind, backend)


@pytest.mark.quick(8)
@every_kind
@pytest.mark.parametrize("name", ["empty experts", "odd widths", "one expert"])
def test_gpt_oss_experts_equal_a_plain_loop_over_its_own_weights(
    name: str, backend: str, dtype: torch.dtype
) -> None:
    operation, x, weights, routes = gpt_oss_call(name)
    check(operation, x.to(dtype), [w.to(dtype) for w in weights], routes, backend)


@every_backend
def test_rows_and_weights_may_lie_in_any_way(backend: str) -> None:
    """Strided, and at any address: a shard's slice of a flat buffer may be unaligned."""
    operation, x, weights, routes = make_call("odd widths", "relu", "no bias", seed=3)
    x = x.T.contiguous().T
    gates = torch.rand(len(routes.weight_N), 2, generator=torch.Generator().manual_seed(3))[:, 1]
    turned = [w.mT.contiguous().mT for w in weights]
    shifted = [torch.cat((w.new_zeros(1), w.flatten()))[1:].view(w.shape) for w in weights]
    assert not any(tensor.is_contiguous() for tensor in (x, *turned, gates))
    for weights in (turned, shifted):
        check(operation, x, weights, routes.with_weights(gates), backend)
        check(routed_linear, x, weights[:1], routes.with_weights(gates), backend)


@every_backend
def test_a_target_without_a_route_is_zero_and_a_source_without_one_has_no_gradient(
    backend: str,
) -> None:
    sources, targets = torch.tensor([3, 3, 0]), torch.tensor([4, 1, 4])
    experts, gates = torch.tensor([1, 0, 1]), torch.tensor([0.5, 2.0, 1.0])
    routes = Routes(sources, experts, gates, targets, 2, 6, per_source=0, per_target=0)
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, 4)
    y = routed_linear(x, w, routes, backend=backend)
    assert torch.equal(y[[0, 2, 3, 5]], torch.zeros(4, 4))
    torch.testing.assert_close(y[4], 0.5 * x[3] @ w[1] + x[0] @ w[1])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[[1, 2, 4]], torch.zeros(3, 3))


@every_kind
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.integers(0, 150),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    d_in=st.integers(1, 70),
    d_hidden=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
@example(tokens=1, experts=1, top_k=1, d_in=7, d_hidden=54, seed=256)  # a gate by cancellation
@example(tokens=129, experts=1, top_k=1, d_in=1, d_hidden=37, seed=61)  # a weight by cancellation
def test_mlp_equals_the_reference_for_any_shape(
    tokens, experts, top_k, d_in, d_hidden, seed, backend, dtype
) -> None:
    case = Case(tokens, d_in, d_hidden, experts, min(top_k, experts))
    operation, x, weights, routes = make_call(case, "relu", "no bias", seed=seed, kink=False)
    check(operation, x.to(dtype), [w.to(dtype) for w in weights], routes, backend)


@pytest.mark.quick(3)
@pytest.mark.sample(7)
@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "linear"])
def test_gradients_are_numerical_derivatives(activation: str, backend: str) -> None:
    """By every argument, and for the reference too, which is thereby tested itself."""
    is_linear = activation == "linear"
    operation, x, weights, routes = make_call(
        Case(7, 4, 3, 4, 2), "relu" if is_linear else activation, "both biases", seed=3
    )
    call: Operation = routed_linear if is_linear else operation
    leaves = [x, *(weights[:1] if is_linear else weights), routes.weight_N]
    assert torch.autograd.gradcheck(
        lambda *leaves: call(*leaves[:-1], routes.with_weights(leaves[-1]), backend=backend),
        [leaf.double().requires_grad_() for leaf in leaves],
    )


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
    "gelu": F.gelu,
    "silu": F.silu,
    "swiglu": lambda z: F.silu(z) * -0.5 * z,
    "geglu": lambda z: F.gelu(z) * -0.5 * z,
    "clamped_swiglu": lambda z: clamped_swiglu(z, -0.5 * z),
}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param("reference", F64, id="reference-float64"), KINDS[0], *KINDS[3:5]],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activations_are_what_their_names_say(
    activation: str, backend: str, dtype: torch.dtype
) -> None:
    """One identity expert against torch's own functions, in values and slopes.

    Norms would show only the largest of these. At 7 and ±14 a gate and a content lie on their bounds.
    The last two overflow where an exponential is taken.
    """
    z = torch.cat((torch.linspace(-12, 12, 481), torch.tensor([7, 14, -14, 17, -17, -1e4, 1e4])))
    z = z.to(dtype)[:, None]
    w_up = torch.tensor([[[1.0, -0.5]]] if activation in GATES else [[[1.0]]], dtype=dtype)
    one, x = torch.ones(1, 1, 1, dtype=dtype), z.clone().requires_grad_()
    experts = torch.zeros(len(z), 1, dtype=torch.int64)
    routes = token_routes(experts, torch.ones(len(z), 1), num_experts=1)
    y = routed_mlp(x, w_up, one, routes, activation=activation, backend=backend)
    exact = z.double().requires_grad_()
    expected = FUNCTIONS[activation](exact)
    rtol, atol = {F64: (1e-12, 1e-12), F32: (1e-5, 1e-7), BF16: (2e-2, 1e-3)}[dtype]
    pairs = (
        (y, expected),
        (torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), exact)[0]),
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)


@every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_saved_is_no_wider_than_the_hidden_rows(activation: str, backend: str) -> None:
    operation, x, weights, routes = make_call(Case(50, 29, 5, 4, 2), activation, "no bias")
    x, weights = x.requires_grad_(), [w.requires_grad_() for w in weights]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operation(x, *weights, routes, backend=backend)
    given = {t.data_ptr() for t in (x, *weights)}
    own = [t for t in saved if t.is_floating_point() and t.ndim == 2 and t.data_ptr() not in given]
    assert [tuple(t.shape) for t in own] == [(50 * 2 + ROW_SLACK, weights[0].shape[2])]
    assert own[0].untyped_storage().nbytes() == own[0].nbytes


@every_backend
@pytest.mark.parametrize("kind", ["slots", "expert choice", "two slots of a row"])
def test_known_counts_change_nothing_and_cost_no_sort_and_no_read(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (routes, rows), generator = equal_counts(kind), torch.Generator().manual_seed(15)
    x = torch.randn(rows, 12, generator=generator)
    grad = torch.randn(routes.num_targets, 13, generator=generator)
    operation = Perceptrons("swiglu", BIASES["both biases"])
    cases: list[tuple[Operation, list[Tensor]]] = [
        (operation, operation.weights(Case(rows, 12, 7, 5, 1), generator)),
        (routed_linear, [torch.randn(5, 12, 13, generator=generator)]),
        (routed_linear, [torch.randn(5, 12, 8, generator=generator)]),
    ]

    def run(routes: Routes) -> list[list[Tensor]]:
        return [
            values_and_gradients(call, x, w, routes, grad[:, : w[-1].shape[-1]], backend)
            for call, w in cases
        ]

    expected = run(replace(routes, per_expert=0))
    for name in ("argsort", "sort", "bincount"):
        monkeypatch.setattr(torch, name, partial(pytest.fail, f"torch.{name} is called"))
    if backend != "megablocks":  # its stand-in reads; the counts are made on the host there
        monkeypatch.setattr(Tensor, "tolist", partial(pytest.fail, "counts are read"))
    for mine, theirs in zip(run(routes), expected, strict=True):
        assert all_equal(mine, theirs)


@every_kind
def test_two_runs_are_bitwise_equal(backend: str, dtype: torch.dtype) -> None:
    operation, x, weights, routes = make_call("odd widths", "gelu", "both biases", seed=6)
    grad = torch.randn(len(x), 42, generator=torch.Generator().manual_seed(6)).to(dtype)
    given = operation, x.to(dtype), [w.to(dtype) for w in weights], routes, grad, backend
    assert all_equal(values_and_gradients(*given), values_and_gradients(*given))


# Rows that are not finite -------------------------------------------------------------------------

expert_of = torch.tensor([0] * 3 + [1] * 2 + [2] * 4 + [3] * 3)  # of every token


@pytest.mark.quick(6)
@every_kind
@pytest.mark.parametrize("bad", [nan, float("inf")], ids=str)
def test_rows_that_are_not_finite_spoil_no_other_experts_gradients(
    bad: float, backend: str, dtype: torch.dtype
) -> None:
    """Poisons the input rows or the output gradient of each expert in turn.

    Under expert parallelism an expert's neighbours depend on the layout, and so would any leak.
    """
    gate = torch.full((len(expert_of), 1), 0.7, dtype=torch.promote_types(dtype, F32))
    routes = token_routes(expert_of[:, None], gate, num_experts=4)
    for operation, weights in finite_operations(dtype):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(len(expert_of), weights[0].shape[1], generator=generator).to(dtype)
        width = weights[min(1, len(weights) - 1)].shape[2]
        grad = torch.randn(len(expert_of), width, generator=generator).to(dtype)
        clean = values_and_gradients(operation, x, weights, routes, grad, backend)
        for sick in range(4):
            rows = expert_of == sick
            spoilt_x, spoilt_grad = x.clone(), grad.clone()
            spoilt_x[rows], spoilt_grad[rows] = bad, bad
            for rows_in, rows_back in ((spoilt_x, grad), (x, spoilt_grad)):
                spoilt = values_and_gradients(
                    operation, rows_in, weights, routes, rows_back, backend
                )
                assert any(not found.isfinite().all() for found in spoilt)
                assert unlike(clean, spoilt, sick) == []


def finite_operations(dtype: torch.dtype) -> list[tuple[Operation, list[Tensor]]]:
    """Perceptrons of three kinds, with biases, and matrices with wide and narrow outputs."""
    generator, case = torch.Generator().manual_seed(2), Case(len(expert_of), 6, 5, 4, 1)
    found: list[tuple[Operation, list[Tensor]]] = []
    for activation in ("relu", "gelu", "swiglu"):
        operation = Perceptrons(activation, BIASES["both biases"])
        found.append((operation, [w.to(dtype) for w in operation.weights(case, generator)]))
    up, down, *_ = found[0][1]
    return [*found, (routed_linear, [up]), (routed_linear, [down])]


def unlike(clean: list[Tensor], spoilt: list[Tensor], sick: int) -> list[int]:
    """Which results differ in the rows of other tokens, or in the gradients of other experts."""
    of_tokens, of_experts = expert_of != sick, torch.arange(4) != sick
    others = [of_tokens, of_tokens, *[of_experts] * (len(clean) - 3), of_tokens]
    return [
        place
        for place, (before, after) in enumerate(zip(clean, spoilt, strict=True))
        if not torch.equal(before[others[place]], after[others[place]])
    ]


# One library's own --------------------------------------------------------------------------------


def test_grouped_mm_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each of these would wait for the device."""
    monkeypatch.undo()  # the poison reads
    operation, x, weights, routes = make_call("odd widths", "gelu", "both biases", seed=6)
    grad = torch.randn(len(x), 42, generator=torch.Generator().manual_seed(6))
    expected = values_and_gradients(operation, x, weights, routes, grad, "grouped_mm")
    for name in ("item", "tolist", "__int__", "__bool__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(Tensor, name, partial(pytest.fail, f"Tensor.{name} is called"))
    ours = values_and_gradients(operation, x, weights, routes, grad, "grouped_mm")
    monkeypatch.undo()
    assert all_equal(ours, expected)


def test_grouped_mm_refuses_more_experts_than_one_kernel_takes_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, pretended: the operator itself has no such limit on CPUs."""
    experts = torch.arange(1024)[:, None]
    routes = token_routes(experts, torch.ones(1024, 1), num_experts=1024)
    call: Callable[[], Any] = partial(
        routed_linear, torch.randn(1024, 4), torch.randn(1024, 4, 4), routes, backend="grouped_mm"
    )
    assert call().shape == (1024, 4)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    with pytest.raises(ValueError, match="at most 1023 experts on CUDA, got 1024"):
        call()
