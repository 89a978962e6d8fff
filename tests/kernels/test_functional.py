"""Every backend of the operations against the reference: values and all gradients, for routings that
nobody would choose too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BIASES,
    CASES,
    Case,
    Perceptrons,
    away_from_the_kink,
    check,
    equal_counts,
    head_routes,
    irregular,
    make_routes,
    values_and_gradients,
)
from pairwise import parametrize_pairs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels import ops, segments
from moebius.kernels.activations import ACTIVATIONS, GATES
from moebius.kernels.backend import reason_against, resolve_backend
from moebius.kernels.cpu import brgemm
from moebius.kernels.cpu.workspace import workspace
from moebius.kernels.functional import _flat, routed_linear, routed_mlp
from moebius.kernels.interface import ROW_SLACK
from moebius.model.routing import Routes, token_routes

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
KINDS = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend, dtypes in {
        "segments": TOLERANCES,
        "brgemm": (torch.float32, torch.bfloat16),
    }.items()
    for dtype in dtypes
]
every_kind = pytest.mark.parametrize(("backend", "dtype"), KINDS)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """What nobody has written is not a number, in fresh memory and in workspaces. A backend that
    cannot run is no pass.
    """
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "backend" in parameters:
        reason = reason_against(
            parameters["backend"], "cpu", parameters.get("dtype", torch.float32)
        )
        if reason is not None:
            pytest.skip(f"{parameters['backend']}: {reason}")
    for module in (segments, brgemm):
        monkeypatch.setattr(module, "workspace", lambda *args: workspace(*args).fill_(float("nan")))
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)


@parametrize_pairs(
    {
        "name": CASES,
        "activation": ACTIVATIONS,
        "biases": ["no bias", "both biases"],
        ("backend", "dtype"): KINDS,
    }
)
def test_mlp_equals_the_reference(
    name: str, activation: str, biases: str, backend: str, dtype: torch.dtype
) -> None:
    operation, case, generator = (
        Perceptrons(activation, BIASES[biases]),
        CASES[name],
        torch.Generator().manual_seed(1),
    )
    routes, x = (
        make_routes(case, generator),
        torch.randn(case.tokens, case.d_in, generator=generator),
    )
    weights = operation.weights(case, generator)
    if dtype is torch.bfloat16 and activation == "relu":
        x, weights = away_from_the_kink(x, weights, operation)
    for kind in (routes, irregular(routes)):
        check(
            operation, x.to(dtype), [w.to(dtype) for w in weights], kind, TOLERANCES[dtype], backend
        )


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
        check(routed_linear, x, [w], kind, TOLERANCES[dtype], backend)


@pytest.mark.parametrize("backend", ["segments", "brgemm"])
def test_rows_and_weights_may_lie_in_any_way(backend: str) -> None:
    generator, case = torch.Generator().manual_seed(3), CASES["odd widths"]
    operation, routes = Perceptrons("relu"), make_routes(case, generator)
    x, weights = (
        torch.randn(case.d_in, case.tokens, generator=generator).T,
        operation.weights(case, generator),
    )
    turned = [w.mT.contiguous().mT for w in weights]
    routes = routes.with_weights(torch.rand(len(routes.weight_N), 2, generator=generator)[:, 1])
    assert not any(tensor.is_contiguous() for tensor in (x, *turned, routes.weight_N))
    check(operation, x, turned, routes, 1e-5, backend)
    check(routed_linear, x, turned[:1], routes, 1e-5, backend)


@pytest.mark.parametrize("backend", ["segments", "brgemm"])
def test_a_target_without_a_route_is_zero_and_a_source_without_one_has_no_gradient(
    backend: str,
) -> None:
    routes = Routes(
        torch.tensor([3, 3, 0]),
        torch.tensor([1, 0, 1]),
        torch.tensor([0.5, 2.0, 1.0]),
        torch.tensor([4, 1, 4]),
        num_experts=2,
        num_targets=6,
        per_source=0,
        per_target=0,
    )
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, 4)
    y = routed_linear(x, w, routes, backend=backend)
    assert torch.equal(y[[0, 2, 3, 5]], torch.zeros(4, 4))
    torch.testing.assert_close(y[4], 0.5 * x[3] @ w[1] + x[0] @ w[1])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[[1, 2, 4]], torch.zeros(3, 3))


@every_kind
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.integers(1, 150),
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
    case, generator = (
        Case(tokens, d_in, d_hidden, experts, min(top_k, experts)),
        torch.Generator().manual_seed(seed),
    )
    operation, x = Perceptrons("relu"), torch.randn(tokens, d_in, generator=generator)
    x, weights = away_from_the_kink(x, operation.weights(case, generator), operation)
    routes = make_routes(case, generator)
    check(
        operation, x.to(dtype), [w.to(dtype) for w in weights], routes, TOLERANCES[dtype], backend
    )


@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_perceptrons(activation: str, backend: str) -> None:
    """Numerical derivatives by every argument; the same ones for the reference, which so is no
    oracle by decree.
    """
    case, generator = Case(7, 4, 3, 4, 2), torch.Generator().manual_seed(3)
    operation, routes = Perceptrons(activation, BIASES["both biases"]), make_routes(case, generator)
    leaves = [
        torch.randn(7, 4, generator=generator),
        *operation.weights(case, generator),
        routes.weight_N,
    ]
    assert torch.autograd.gradcheck(
        lambda *leaves: operation(*leaves[:-1], routes.with_weights(leaves[-1]), backend=backend),
        [leaf.double().requires_grad_() for leaf in leaves],
    )


def test_gradcheck_of_linears() -> None:
    case, generator = Case(7, 4, 3, 4, 2), torch.Generator().manual_seed(3)
    routes = make_routes(case, generator)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gate = routes.weight_N.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, u, g: routed_linear(x, u, routes.with_weights(g), backend="segments"),
        (x, w, gate),
    )


def test_the_activations_are_what_their_names_say() -> None:
    """One expert that passes its row on: torch's own functions, spelled out."""
    z = torch.linspace(-30, 30, 601, dtype=torch.float64)[:, None]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    routes = token_routes(torch.zeros(601, 1, dtype=torch.int64), torch.ones(601, 1), num_experts=1)
    gate_and_content = torch.tensor([[[1.0, -0.5]]], dtype=torch.float64)
    erf, sigmoid = 0.5 * (1 + torch.special.erf(z / 2**0.5)), torch.special.expit(z)
    expected = {"relu": z.clamp(min=0), "gelu": z * erf, "silu": z * sigmoid}
    expected |= {"swiglu": expected["silu"] * -0.5 * z, "geglu": expected["gelu"] * -0.5 * z}
    for activation in ACTIVATIONS:
        w_up = gate_and_content if activation in GATES else one
        for backend in ("reference", "segments"):
            y = routed_mlp(z, w_up, one, routes, activation=activation, backend=backend)
            torch.testing.assert_close(y, expected[activation], rtol=1e-12, atol=1e-12)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@parametrize_pairs(
    {"activation": ACTIVATIONS, ("backend", "dtype"): KINDS, "threads": [1, 2]},
)
def test_a_row_does_not_depend_on_how_many_rows_share_its_expert(
    activation: str,
    backend: str,
    dtype: torch.dtype,
    threads: int,
    use_threads: Callable[[int], None],
) -> None:
    """What makes expert parallelism bitwise: a row computed among 1, 2, 3, … or 600 others is the
    same, as its gradients are.

    Widths of 40, and of 13: no multiple of any vector's width.
    """
    use_threads(threads)
    operation = Perceptrons(activation, BIASES["both biases"])
    for hidden in (40, 13):
        generator = torch.Generator().manual_seed(4)
        case = Case(600, 47, hidden, 1, 1)
        x, grad = (torch.randn(600, width, generator=generator).to(dtype) for width in (47, 48))
        weights = [w.to(dtype) for w in operation.weights(case, generator)]
        whole = run_one_expert(operation, x, weights, grad, backend)
        for count in (*range(1, 20), 63, 64, 65, 300):
            some = run_one_expert(operation, x[:count], weights, grad[:count], backend)
            for name, mine, theirs in zip(("y", "x", "gate"), some, whole, strict=True):
                assert torch.equal(mine, theirs[:count]), (name, hidden, count)


def run_one_expert(
    operation: Perceptrons, x: Tensor, weights: list[Tensor], grad: Tensor, backend: str
) -> list[Tensor]:
    """The output, and the gradients of rows and gate weights."""
    routes = token_routes(
        torch.zeros(len(x), 1, dtype=torch.int64), torch.full((len(x), 1), 0.7), num_experts=1
    )
    y, grad_x, *_, grad_gate = values_and_gradients(operation, x, weights, routes, grad, backend)
    return [y, grad_x, grad_gate]


@every_kind
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_next_experts_rows_are_not_in_a_bias_gradient(
    activation: str, backend: str, dtype: torch.dtype
) -> None:
    """Expert 0's padding reaches into expert 1's rows; were these huge, its bias gradients would
    tell.
    """
    operation, case = Perceptrons(activation, BIASES["both biases"]), Case(7, 6, 5, 2, 1)
    generator = torch.Generator().manual_seed(12)
    x, grad = (torch.randn(7, width, generator=generator).to(dtype) for width in (6, 7))
    weights = [w.to(dtype) for w in operation.weights(case, generator)]
    routes = token_routes(
        torch.tensor([[0]] * 3 + [[1]] * 4), torch.rand(7, 1, generator=generator), num_experts=2
    )
    results = []
    for size in (1.0, 1e6, float("inf")):
        loud = torch.cat((x[:3], x[3:] * size)), torch.cat((grad[:3], grad[3:] * size))
        results.append(values_and_gradients(operation, loud[0], weights, routes, loud[1], backend))
    for index in (4, 5):
        assert results[0][index][0].abs().max() > 0
        for louder in results[1:]:
            assert torch.equal(louder[index][0], results[0][index][0])


@pytest.mark.parametrize("backend", ["segments", "brgemm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_saved_is_no_wider_than_the_hidden_rows(activation: str, backend: str) -> None:
    operation, case = Perceptrons(activation), Case(50, 29, 5, 4, 2)
    generator = torch.Generator().manual_seed(13)
    x, weights = (
        torch.randn(50, 29, requires_grad=True),
        [w.requires_grad_() for w in operation.weights(case, generator)],
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operation(x, *weights, make_routes(case, generator), backend=backend)
    given = {t.data_ptr() for t in (x, *weights)}
    own = [
        tuple(t.shape)
        for t in saved
        if t.is_floating_point() and t.ndim == 2 and t.data_ptr() not in given
    ]
    assert own == [(50 * 2 + ROW_SLACK, weights[0].shape[2])]


@pytest.mark.parametrize("backend", ["segments", "brgemm"])
@pytest.mark.parametrize("kind", ["slots", "expert choice", "two slots of a row"])
def test_known_counts_change_nothing_and_cost_no_sort_and_no_read(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (routes, rows), generator = equal_counts(kind), torch.Generator().manual_seed(15)
    x, grad = (
        torch.randn(rows, 12, generator=generator),
        torch.randn(routes.num_targets, 13, generator=generator),
    )
    operation = Perceptrons("swiglu", BIASES["both biases"])
    cases = [(operation, operation.weights(Case(rows, 12, 7, 5, 1), generator))]
    cases += [(routed_linear, [torch.randn(5, 12, 13, generator=generator)])]
    cases += [(routed_linear, [torch.randn(5, 12, 8, generator=generator)])]
    counted = replace(routes, per_expert=0)
    expected = [
        values_and_gradients(d, x, w, counted, grad[:, : w[-1].shape[-1]], backend)
        for d, w in cases
    ]
    for name in ("argsort", "sort", "bincount"):
        monkeypatch.setattr(torch, name, partial(pytest.fail, f"torch.{name} is called"))
    monkeypatch.setattr(Tensor, "tolist", partial(pytest.fail, "counts are read"))
    ours = [
        values_and_gradients(d, x, w, routes, grad[:, : w[-1].shape[-1]], backend) for d, w in cases
    ]
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_more_experts_than_16_bits_can_number() -> None:
    experts = torch.tensor([[32_999], [5], [32_768], [5]])
    routes = token_routes(experts, torch.ones(4, 1), num_experts=33_000)
    x, w = torch.randn(4, 2, dtype=torch.float64), torch.randn(33_000, 2, 3, dtype=torch.float64)
    expected = torch.stack([x[t] @ w[e] for t, e in enumerate(experts.flatten())])
    torch.testing.assert_close(routed_linear(x, w, routes, backend="segments"), expected)


@every_kind
def test_two_runs_are_bitwise_equal(backend: str, dtype: torch.dtype) -> None:
    case, generator = CASES["odd widths"], torch.Generator().manual_seed(6)
    operation, routes = Perceptrons("relu"), make_routes(case, generator)
    x, grad = (torch.randn(case.tokens, width, generator=generator).to(dtype) for width in (41, 42))
    weights = [w.to(dtype) for w in operation.weights(case, generator)]
    first, second = (
        values_and_gradients(operation, x, weights, routes, grad, backend) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def make_call(
    activation: str, biases: str, *, static: bool
) -> tuple[Perceptrons, list[Tensor], Routes]:
    """An operation, its leaves (x and weights) and routes: 9 tokens twice through 3 experts."""
    operation, case = Perceptrons(activation, BIASES[biases]), Case(9, 6, 4, 3, 2)
    generator = torch.Generator().manual_seed(7)
    routes = make_routes(case, generator)
    if static:
        routes = replace(routes, expert_N=torch.arange(18) // 6, per_expert=6)
    leaves = [torch.randn(9, 6, generator=generator), *operation.weights(case, generator)]
    return operation, [leaf.requires_grad_() for leaf in leaves], routes


@pytest.mark.parametrize("static", [False, True], ids=["counted", "known counts"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ops_are_well_behaved_custom_operators(activation: str, static: bool) -> None:
    """Schema, fake tensors and autograd registration, as torch's own checker sees them."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for biases in ("no bias", "both biases"):
        _, (x, w_up, w_down, *rest), r = make_call(activation, biases, static=static)
        r = r.with_weights(r.weight_N.detach().requires_grad_())
        torch.library.opcheck(
            ops.routed_mlp,
            (x, w_up, w_down, *(rest or (None, None)), activation, *_flat(r), "segments", 0),
            test_utils=checks,
        )
        torch.library.opcheck(
            ops.routed_linear, (x, w_up, *_flat(r), "segments", 0), test_utils=checks
        )


def to_meta(routes: Routes) -> Routes:
    names = ("source_N", "expert_N", "weight_N", "target_N")
    return replace(routes, **{name: getattr(routes, name).to("meta") for name in names})


def test_gradients_of_rows_alone_have_their_shapes_without_data() -> None:
    """Those of a perceptron's rows before the activation are laid out as the saved rows are."""
    _, (x, w_up, w_down, *_), routes = make_call("relu", "no bias", static=False)
    x, w_up, w_down = (tensor.to("meta") for tensor in (x, w_up, w_down))
    numbers = _flat(to_meta(routes))
    bank = (w_up, w_down, None, None, "relu")
    y, saved = ops.routed_mlp(x, *bank, *numbers, "segments", 0)
    grad_x, gate, *_, d_z = ops._mlp_backward_rows(
        y, x, *bank, *numbers, "segments", saved.bfloat16()
    )
    assert (grad_x.shape, gate.shape) == (x.shape, routes.weight_N.shape)
    assert (d_z.shape, d_z.dtype, d_z.device) == (saved.shape, torch.bfloat16, saved.device)


@pytest.mark.parametrize("static", [False, True], ids=["counted", "known counts"])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operations_run_without_data_forward_and_backward(
    activation: str, biases: str, static: bool
) -> None:
    operation, leaves, routes = make_call(activation, biases, static=static)
    leaves = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    y = operation(*leaves, to_meta(routes), backend="auto")
    assert y.shape == (9, 7)
    for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert (grad.shape, grad.device.type) == (leaf.shape, "meta")
    y = routed_linear(leaves[0], leaves[1], to_meta(routes))
    grads = torch.autograd.grad(y.sum(), leaves[:2])
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves[:2]]


def after_an_operation(operation: Perceptrons, routes: Routes, *leaves: Tensor) -> Tensor:
    return operation(*leaves, routes, backend="auto") + 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operations_compile_into_one_graph_forward_and_backward(activation: str) -> None:
    torch.compiler.reset()
    for biases, static in (("no bias", True), ("both biases", False)):
        operation, leaves, routes = make_call(activation, biases, static=static)
        call = partial(after_an_operation, operation, routes)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        ours, expected = compiled(*leaves), call(*leaves)
        assert torch.equal(ours, expected)
        pairs = zip(
            *(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, expected)), strict=True
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    compiled = torch.compile(
        lambda x, w: routed_linear(x, w, routes) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*leaves[:2]), routed_linear(leaves[0], leaves[1], routes) + 1)


def flops_of(operation, leaves: list[Tensor], routes: Routes, backend: str) -> int:
    """Of forward and backward together."""
    counter = FlopCounterMode(display=False)
    with counter:
        operation(*leaves, routes, backend=backend).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_counts_the_same_products_as_in_the_reference(activation: str) -> None:
    operation, leaves, routes = make_call(activation, "both biases", static=False)
    on_meta = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    for call, count in ((operation, len(leaves)), (routed_linear, 2)):
        expected = flops_of(call, leaves[:count], routes, "reference")
        assert expected > 0
        assert flops_of(call, leaves[:count], routes, "segments") == expected
        assert flops_of(call, on_meta[:count], to_meta(routes), "segments") == expected
    columns = leaves[1].shape[2]
    assert flops_of(operation, leaves, routes, "segments") == 3 * 2 * 18 * (6 * columns + 4 * 7)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda9' is unknown: choose auto, reference, segments"):
        resolve_backend("cuda9", torch.device("cpu"), torch.float32)
    routes = make_routes(Case(3, 4, 2, 2, 1), torch.Generator().manual_seed(9))
    x, w_up, w_down = torch.randn(3, 4), torch.randn(2, 4, 2), torch.randn(2, 2, 4)
    with pytest.raises(
        ValueError, match="activation='tanh' is unknown: choose relu, gelu, silu, swiglu, geglu"
    ):
        routed_mlp(x, w_up, w_down, routes, activation="tanh")
    with pytest.raises(
        ValueError, match=r"w_up has shape \(2, 4, 2\); activation='swiglu' .* wants \(2, 4, 4\)"
    ):
        routed_mlp(x, w_up, w_down, routes, activation="swiglu")
    with pytest.raises(ValueError, match=r"b_up has shape \(2, 3\); .* wants \(2, 2\)"):
        routed_mlp(x, w_up, w_down, routes, b_up_EF=torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"b_down has shape \(2, 3\); .* wants \(2, 4\)"):
        routed_mlp(x, w_up, w_down, routes, b_down_EO=torch.randn(2, 3))
    for call in (partial(routed_mlp, x, w_up, w_down), partial(routed_linear, x, w_up)):
        with pytest.raises(ValueError, match="per_expert=2 is not that of 3 routes over 2 experts"):
            call(replace(routes, per_expert=2))
