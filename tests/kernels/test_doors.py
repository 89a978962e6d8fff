"""Every backend of the doors against the reference: values and all gradients, for routings that nobody would choose too."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels import ops
from moebius.kernels.activations import ACTIVATIONS, GATES
from moebius.kernels.backend import ROW_SLACK, resolve_backend
from moebius.kernels.doors import _flat, routed_linear, routed_mlp
from moebius.model.routing import Routes, head_to_token_routes, slot_routes, token_routes, token_to_head_routes

BIASES = {"no bias": (), "bias up": ("b_up_EF",), "bias down": ("b_down_EO",), "both biases": ("b_up_EF", "b_down_EO")}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """Shapes and a routing."""

    tokens: int
    d_in: int
    d_hidden: int
    experts: int
    top_k: int
    choice: str = "random"


CASES = {
    "random": Case(37, 12, 7, 5, 2),
    "empty experts": Case(6, 8, 4, 23, 2),
    "one expert takes all": Case(70, 8, 4, 6, 1, choice="zero"),
    "the last expert takes all": Case(70, 8, 4, 6, 1, choice="last"),
    "one token": Case(1, 8, 4, 6, 3),
    "no token": Case(0, 8, 4, 6, 3),
    "one expert": Case(19, 8, 4, 1, 1),
    "all experts": Case(11, 8, 4, 5, 5),
    "odd widths": Case(130, 41, 13, 9, 4),
    "width of the 44M model": Case(40, 412, 82, 6, 2),
}


def choose(case: Case, generator: torch.Generator) -> Tensor:
    if case.choice == "zero":
        return torch.zeros(case.tokens, case.top_k, dtype=torch.int64)
    if case.choice == "last":
        return torch.full((case.tokens, case.top_k), case.experts - 1)
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    return scores.argsort(-1)[:, : case.top_k]


def make_routes(case: Case, generator: torch.Generator) -> Routes:
    weights = torch.rand(case.tokens, case.top_k, generator=generator)
    return token_routes(choose(case, generator), weights, num_experts=case.experts)


def irregular(routes: Routes) -> Routes:
    """The same routes without the rule that says which rows they belong to."""
    return Routes(
        routes.source_N, routes.expert_N, routes.weight_N, routes.target_N, routes.num_experts, routes.num_targets, 0, 0
    )  # fmt: skip


def values_and_gradients(door, x: Tensor, weights: list[Tensor], routes: Routes, grad: Tensor, backend: str):
    leaves = [value.detach().clone().requires_grad_() for value in (x, *weights, routes.weight_N)]
    y = door(*leaves[:-1], routes.with_weights(leaves[-1]), backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)]


def relative(ours: Tensor, expected: Tensor) -> float:
    size = expected.double().norm()
    return ((ours.double() - expected.double()).norm() / (size if size > 0 else 1)).item()


def check(door, x: Tensor, weights: list[Tensor], routes: Routes, d_out: int, tolerance: float) -> None:
    grad = torch.randn(routes.num_targets, d_out, generator=torch.Generator().manual_seed(5))
    exact = [value.double() for value in (x, *weights)]
    expected = values_and_gradients(
        door, exact[0], exact[1:], routes.with_weights(routes.weight_N.double()), grad, "reference"
    )
    own_gate = routes.weight_N.to(torch.promote_types(x.dtype, torch.float32))
    ours = values_and_gradients(door, x, weights, routes.with_weights(own_gate), grad, "segments")
    for name, mine, theirs in zip(("y", "x", *range(len(weights)), "gate"), ours, expected, strict=True):
        assert mine is not None, name
        assert mine.shape == theirs.shape, name
        assert relative(mine, theirs) < tolerance, (name, relative(mine, theirs))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("name", CASES)
def test_mlp_equals_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    routes = make_routes(case, generator)
    x = torch.randn(case.tokens, case.d_in, generator=generator).to(dtype)
    w_up = torch.randn(case.experts, case.d_in, case.d_hidden, generator=generator).to(dtype)
    w_down = torch.randn(case.experts, case.d_hidden, case.d_in, generator=generator).to(dtype)
    if dtype is torch.bfloat16:
        x, w_up = keep_relu_away_from_zero(x, w_up)
    check(routed_mlp, x, [w_up, w_down], routes, case.d_in, tolerance)


def keep_relu_away_from_zero(x: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
    """Positive inputs and columns of one sign: rounding then never flips a ReLU, which would be no error of the kernel."""
    signs = torch.ones(w_up.shape[2])
    signs[::3] = -1
    return x.abs() + 0.1, (w_up.abs() + 0.1) * signs.to(w_up.dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("widths", [(24, 8), (8, 24), (8, 8)], ids=["narrow output", "narrow input", "square"])
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(
    direction: str, widths: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    tokens, heads, top_k, per_head = 29, 3, 2, 5
    generator = torch.Generator().manual_seed(2)
    choice = torch.rand(tokens, heads, per_head, generator=generator).argsort(-1)[..., :top_k]
    experts = choice + torch.arange(heads)[:, None] * per_head
    weights = torch.rand(tokens, heads, top_k, generator=generator)
    make = token_to_head_routes if direction == "token to head" else head_to_token_routes
    routes = make(experts, weights, num_experts=heads * per_head)
    rows = tokens if direction == "token to head" else tokens * heads
    x = torch.randn(rows, widths[0], generator=generator).to(dtype)
    w = torch.randn(heads * per_head, *widths, generator=generator).to(dtype)
    check(routed_linear, x, [w], routes, widths[1], tolerance)
    check(routed_linear, x, [w], irregular(routes), widths[1], tolerance)


def test_a_target_without_a_route_is_zero_and_a_source_without_one_has_no_gradient() -> None:
    routes = Routes(
        torch.tensor([3, 3, 0]), torch.tensor([1, 0, 1]), torch.tensor([0.5, 2.0, 1.0]), torch.tensor([4, 1, 4]),
        num_experts=2, num_targets=6, per_source=0, per_target=0,
    )  # fmt: skip
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, 4)
    y = routed_linear(x, w, routes, backend="segments")
    assert torch.equal(y[[0, 2, 3, 5]], torch.zeros(4, 4))
    torch.testing.assert_close(y[4], 0.5 * x[3] @ w[1] + x[0] @ w[1])
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[[1, 2, 4]], torch.zeros(3, 3))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 150), experts=st.integers(1, 12), top_k=st.integers(1, 12), d_in=st.integers(1, 20),
    d_hidden=st.integers(1, 20), seed=st.integers(0, 1000),
)  # fmt: skip
def test_mlp_equals_the_reference_for_any_shape(tokens, experts, top_k, d_in, d_hidden, seed) -> None:
    case, generator = Case(tokens, d_in, d_hidden, experts, min(top_k, experts)), torch.Generator().manual_seed(seed)
    routes = make_routes(case, generator)
    x = torch.randn(tokens, d_in, generator=generator)
    w_up = torch.randn(experts, d_in, d_hidden, generator=generator)
    w_down = torch.randn(experts, d_hidden, d_in, generator=generator)
    check(routed_mlp, x.double(), [w_up.double(), w_down.double()], routes, d_in, 1e-10)


@dataclass(frozen=True)
class Perceptrons:
    """Which door call: an activation, and the biases that `weights` has after w_up and w_down."""

    activation: str
    biases: tuple[str, ...] = ()

    def __call__(self, x: Tensor, w_up: Tensor, w_down: Tensor, *rest, backend: str = "segments") -> Tensor:
        *biases, routes = rest
        named = dict(zip(self.biases, biases, strict=True))
        return routed_mlp(x, w_up, w_down, routes, activation=self.activation, backend=backend, **named)

    def weights(self, case: Case, generator: torch.Generator) -> list[Tensor]:
        columns = case.d_hidden * (2 if self.activation in GATES else 1)
        shapes = {"b_up_EF": (columns,), "b_down_EO": (case.d_in + 1,)}
        all_shapes = [(case.d_in, columns), (case.d_hidden, case.d_in + 1), *(shapes[name] for name in self.biases)]
        return [torch.randn(case.experts, *shape, generator=generator) for shape in all_shapes]


def away_from_the_kink(x: Tensor, weights: list[Tensor], door: Perceptrons) -> tuple[Tensor, list[Tensor]]:
    x, w_up = keep_relu_away_from_zero(x, weights[0])
    weights = [w_up, *weights[1:]]
    if "b_up_EF" in door.biases:
        weights[2] = weights[2].abs() * w_up[:, 0].sign()
    return x, weights


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_and_without_biases_equals_the_reference(activation: str, biases: str) -> None:
    door = Perceptrons(activation, BIASES[biases])
    for case in CASES.values():
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
            generator = torch.Generator().manual_seed(10)
            routes, x = make_routes(case, generator), torch.randn(case.tokens, case.d_in, generator=generator)
            weights = door.weights(case, generator)
            if dtype is torch.bfloat16 and activation == "relu":
                x, weights = away_from_the_kink(x, weights, door)
            check(door, x.to(dtype), [w.to(dtype) for w in weights], routes, case.d_in + 1, tolerance)
        check(door, x.double(), [w.double() for w in weights], irregular(routes), case.d_in + 1, 1e-10)


@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_perceptrons(activation: str, backend: str) -> None:
    """Numerical derivatives by every argument; the same ones for the reference, which so is no oracle by decree."""
    case, generator = Case(7, 4, 3, 4, 2), torch.Generator().manual_seed(3)
    door, routes = Perceptrons(activation, BIASES["both biases"]), make_routes(case, generator)
    leaves = [torch.randn(7, 4, generator=generator), *door.weights(case, generator), routes.weight_N]
    assert torch.autograd.gradcheck(
        lambda *leaves: door(*leaves[:-1], routes.with_weights(leaves[-1]), backend=backend),
        [leaf.double().requires_grad_() for leaf in leaves],
    )


def test_gradcheck_of_linears() -> None:
    case, generator = Case(7, 4, 3, 4, 2), torch.Generator().manual_seed(3)
    routes = make_routes(case, generator)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gate = routes.weight_N.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, u, g: routed_linear(x, u, routes.with_weights(g), backend="segments"), (x, w, gate)
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


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_does_not_depend_on_how_many_rows_share_its_expert(activation: str, dtype: torch.dtype) -> None:
    """What makes expert parallelism bitwise: a row computed among 1, 2, 3, … or 600 others is the same, as its gradients are.

    Widths of 40, and of 13: no multiple of any vector's width.
    """
    door = Perceptrons(activation, BIASES["both biases"])
    for hidden in (40, 13):
        generator = torch.Generator().manual_seed(4)
        case = Case(600, 47, hidden, 1, 1)
        x, grad = (torch.randn(600, width, generator=generator).to(dtype) for width in (47, 48))
        weights = [w.to(dtype) for w in door.weights(case, generator)]
        whole = run_one_expert(door, x, weights, grad)
        for count in (*range(1, 20), 63, 64, 65, 300):
            some = run_one_expert(door, x[:count], weights, grad[:count])
            for name, mine, theirs in zip(("y", "x", "gate"), some, whole, strict=True):
                assert torch.equal(mine, theirs[:count]), (name, hidden, count)


def run_one_expert(door: Perceptrons, x: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The answer, and the gradients of rows and gate weights."""
    routes = token_routes(torch.zeros(len(x), 1, dtype=torch.int64), torch.full((len(x), 1), 0.7), num_experts=1)
    y, grad_x, *_, grad_gate = values_and_gradients(door, x, weights, routes, grad, "segments")
    return [y, grad_x, grad_gate]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_next_experts_rows_are_not_in_a_bias_gradient(activation: str, dtype: torch.dtype) -> None:
    """Expert 0's padding reaches into expert 1's rows; were these huge, its bias gradients would tell."""
    door, case = Perceptrons(activation, BIASES["both biases"]), Case(7, 6, 5, 2, 1)
    generator = torch.Generator().manual_seed(12)
    x, grad = (torch.randn(7, width, generator=generator).to(dtype) for width in (6, 7))
    weights = [w.to(dtype) for w in door.weights(case, generator)]
    routes = token_routes(torch.tensor([[0]] * 3 + [[1]] * 4), torch.rand(7, 1, generator=generator), num_experts=2)
    results = []
    for size in (1.0, 1e6, float("inf")):
        loud = torch.cat((x[:3], x[3:] * size)), torch.cat((grad[:3], grad[3:] * size))
        results.append(values_and_gradients(door, loud[0], weights, routes, loud[1], "segments"))
    for index in (4, 5):
        assert results[0][index][0].abs().max() > 0
        for louder in results[1:]:
            assert torch.equal(louder[index][0], results[0][index][0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_saved_is_no_wider_than_the_hidden_rows(activation: str) -> None:
    door, case = Perceptrons(activation), Case(50, 29, 5, 4, 2)
    generator = torch.Generator().manual_seed(13)
    x, weights = torch.randn(50, 29, requires_grad=True), [w.requires_grad_() for w in door.weights(case, generator)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        door(x, *weights, make_routes(case, generator))
    given = {t.data_ptr() for t in (x, *weights)}
    own = [tuple(t.shape) for t in saved if t.is_floating_point() and t.ndim == 2 and t.data_ptr() not in given]
    assert own == [(50 * 2 + ROW_SLACK, weights[0].shape[2])]


def equal_counts(kind: str) -> Routes:
    """Routes of 5 experts with 6 routes each, over 30 rows, or (expert choice) over 11, of which some are not chosen."""
    if kind == "slots":
        return slot_routes(30, num_experts=5, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(14)
    chosen = torch.rand(5, 11, generator=generator).argsort(-1)[:, :6].flatten() % 9
    weights = torch.rand(30, generator=generator)
    if kind == "two slots of a row":
        rows = torch.arange(15).repeat_interleave(2)
        return Routes(rows, torch.arange(30) // 6, weights, rows, 5, 15, 2, 2, per_expert=6)
    return Routes(chosen, torch.arange(30) // 6, weights, chosen, 5, 11, 0, 0, per_expert=6)


@pytest.mark.parametrize("kind", ["slots", "expert choice", "two slots of a row"])
def test_known_counts_change_nothing_and_cost_no_sort_and_no_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routes, generator = equal_counts(kind), torch.Generator().manual_seed(15)
    rows = int(routes.source_N.max()) + 1 if kind != "expert choice" else 11
    x, grad = torch.randn(rows, 12, generator=generator), torch.randn(routes.num_targets, 13, generator=generator)
    door = Perceptrons("swiglu", BIASES["both biases"])
    cases = [(door, door.weights(Case(rows, 12, 7, 5, 1), generator))]
    cases += [(routed_linear, [torch.randn(5, 12, 13, generator=generator)])]
    cases += [(routed_linear, [torch.randn(5, 12, 8, generator=generator)])]
    counted = replace(routes, per_expert=0)
    expected = [values_and_gradients(d, x, w, counted, grad[:, : w[-1].shape[-1]], "segments") for d, w in cases]
    for name in ("argsort", "sort", "bincount"):
        monkeypatch.setattr(torch, name, partial(pytest.fail, f"torch.{name} is called"))
    monkeypatch.setattr(Tensor, "tolist", partial(pytest.fail, "counts are read"))
    ours = [values_and_gradients(d, x, w, routes, grad[:, : w[-1].shape[-1]], "segments") for d, w in cases]
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_more_experts_than_16_bits_can_number() -> None:
    experts = torch.tensor([[32_999], [5], [32_768], [5]])
    routes = token_routes(experts, torch.ones(4, 1), num_experts=33_000)
    x, w = torch.randn(4, 2, dtype=torch.float64), torch.randn(33_000, 2, 3, dtype=torch.float64)
    expected = torch.stack([x[t] @ w[e] for t, e in enumerate(experts.flatten())])
    torch.testing.assert_close(routed_linear(x, w, routes, backend="segments"), expected)


def test_two_runs_are_bitwise_equal() -> None:
    case, generator = CASES["odd widths"], torch.Generator().manual_seed(6)
    routes = make_routes(case, generator)
    x = torch.randn(case.tokens, case.d_in, generator=generator)
    w = [torch.randn(case.experts, *s, generator=generator) for s in ((41, 13), (13, 41))]
    grad = torch.randn(case.tokens, 41, generator=generator)
    first, second = (values_and_gradients(routed_mlp, x, w, routes, grad, "segments") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def make_call(activation: str, biases: str, *, static: bool) -> tuple[Perceptrons, list[Tensor], Routes]:
    """A door, its leaves (x and weights) and routes: 9 tokens twice through 3 experts."""
    door, case = Perceptrons(activation, BIASES[biases]), Case(9, 6, 4, 3, 2)
    generator = torch.Generator().manual_seed(7)
    routes = make_routes(case, generator)
    if static:
        routes = replace(routes, expert_N=torch.arange(18) // 6, per_expert=6)
    leaves = [torch.randn(9, 6, generator=generator), *door.weights(case, generator)]
    return door, [leaf.requires_grad_() for leaf in leaves], routes


@pytest.mark.parametrize("static", [False, True], ids=["counted", "known counts"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ops_are_well_behaved_custom_operators(activation: str, static: bool) -> None:
    """Schema, fake tensors and autograd registration, as torch's own checker sees them."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for biases in ("no bias", "both biases"):
        _, (x, w_up, w_down, *rest), r = make_call(activation, biases, static=static)
        r = r.with_weights(r.weight_N.detach().requires_grad_())
        torch.library.opcheck(
            ops.routed_mlp, (x, w_up, w_down, *(rest or (None, None)), activation, *_flat(r), "segments", 0),
            test_utils=checks,
        )  # fmt: skip
        torch.library.opcheck(ops.routed_linear, (x, w_up, *_flat(r), "segments", 0), test_utils=checks)


def to_meta(routes: Routes) -> Routes:
    names = ("source_N", "expert_N", "weight_N", "target_N")
    return replace(routes, **{name: getattr(routes, name).to("meta") for name in names})


@pytest.mark.parametrize("static", [False, True], ids=["counted", "known counts"])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_doors_run_without_data_forward_and_backward(activation: str, biases: str, static: bool) -> None:
    door, leaves, routes = make_call(activation, biases, static=static)
    leaves = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    y = door(*leaves, to_meta(routes))
    assert y.shape == (9, 7)
    for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert (grad.shape, grad.device.type) == (leaf.shape, "meta")
    y = routed_linear(leaves[0], leaves[1], to_meta(routes))
    grads = torch.autograd.grad(y.sum(), leaves[:2])
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves[:2]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_doors_compile_into_one_graph_forward_and_backward(activation: str) -> None:
    torch.compiler.reset()
    for biases, static in (("no bias", True), ("both biases", False)):
        door, leaves, routes = make_call(activation, biases, static=static)
        compiled = torch.compile(lambda *leaves: door(*leaves, routes) + 1, backend="aot_eager", fullgraph=True)  # noqa: B023
        ours, expected = compiled(*leaves), door(*leaves, routes) + 1
        assert torch.equal(ours, expected)
        pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, expected)), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    compiled = torch.compile(lambda x, w: routed_linear(x, w, routes) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*leaves[:2]), routed_linear(*leaves[:2], routes) + 1)


def flops_of(door, leaves: list[Tensor], routes: Routes, backend: str) -> int:
    """Of forward and backward together."""
    counter = FlopCounterMode(display=False)
    with counter:
        door(*leaves, routes, backend=backend).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_counts_the_same_products_as_in_the_reference(activation: str) -> None:
    door, leaves, routes = make_call(activation, "both biases", static=False)
    on_meta = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    for call, count in ((door, len(leaves)), (routed_linear, 2)):
        expected = flops_of(call, leaves[:count], routes, "reference")
        assert expected > 0
        assert flops_of(call, leaves[:count], routes, "segments") == expected
        assert flops_of(call, on_meta[:count], to_meta(routes), "segments") == expected
    columns = leaves[1].shape[2]
    assert flops_of(door, leaves, routes, "segments") == 3 * 2 * 18 * (6 * columns + 4 * 7)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda9' is unknown: choose auto, reference, segments"):
        resolve_backend("cuda9", torch.device("cpu"), torch.float32)
    routes = make_routes(Case(3, 4, 2, 2, 1), torch.Generator().manual_seed(9))
    x, w_up, w_down = torch.randn(3, 4), torch.randn(2, 4, 2), torch.randn(2, 2, 4)
    with pytest.raises(ValueError, match="activation='tanh' is unknown: choose relu, gelu, silu, swiglu, geglu"):
        routed_mlp(x, w_up, w_down, routes, activation="tanh")
    with pytest.raises(ValueError, match=r"w_up has shape \(2, 4, 2\); activation='swiglu' .* wants \(2, 4, 4\)"):
        routed_mlp(x, w_up, w_down, routes, activation="swiglu")
    with pytest.raises(ValueError, match=r"b_up has shape \(2, 3\); .* wants \(2, 2\)"):
        routed_mlp(x, w_up, w_down, routes, b_up_EF=torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"b_down has shape \(2, 3\); .* wants \(2, 4\)"):
        routed_mlp(x, w_up, w_down, routes, b_down_EO=torch.randn(2, 3))
    for call in (partial(routed_mlp, x, w_up, w_down), partial(routed_linear, x, w_up)):
        with pytest.raises(ValueError, match="per_expert=2 is not that of 3 routes over 2 experts"):
            call(replace(routes, per_expert=2))
