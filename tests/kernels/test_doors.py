"""Every backend of the doors against the reference: values and all gradients, for routings that nobody would choose too."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebius.kernels.backend import resolve_backend
from moebius.kernels.doors import _routed_linear, _routed_mlp, routed_linear, routed_mlp
from moebius.model.routing import Routes, head_to_token_routes, token_routes, token_to_head_routes


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
    leaves = [value.clone().requires_grad_() for value in (x, *weights, routes.weight_N)]
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
    for name, mine, theirs in zip(("y", "x", "w", "w2 or gate", "gate"), ours, expected, strict=False):
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


def test_gradcheck_of_both_doors() -> None:
    case, generator = Case(7, 4, 3, 4, 2), torch.Generator().manual_seed(3)
    routes = make_routes(case, generator)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    w_up = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    w_down = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    gate = routes.weight_N.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, u, d, g: routed_mlp(x, u, d, routes.with_weights(g), backend="segments"), (x, w_up, w_down, gate)
    )
    assert torch.autograd.gradcheck(
        lambda x, u, g: routed_linear(x, u, routes.with_weights(g), backend="segments"), (x, w_up, gate)
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_how_many_rows_share_its_expert() -> None:
    """What makes expert parallelism bitwise: a row computed among 1, 2, 3, … or 600 others is the same."""
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(600, 48, generator=generator).to(dtype)
        w_up, w_down = (torch.randn(1, *s, generator=generator).to(dtype) for s in ((48, 40), (40, 48)))
        whole = run_one_expert(x, w_up, w_down)
        for count in (*range(1, 20), 63, 64, 65, 300):
            assert torch.equal(run_one_expert(x[:count], w_up, w_down), whole[:count]), (dtype, count)


def run_one_expert(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    routes = token_routes(torch.zeros(len(x), 1, dtype=torch.int64), torch.full((len(x), 1), 0.7), num_experts=1)
    return routed_mlp(x, w_up, w_down, routes, backend="segments")


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


def test_the_ops_are_well_behaved_custom_operators() -> None:
    """Schema, fake tensors and autograd registration, as torch's own checker sees them."""
    case, generator = Case(9, 6, 4, 3, 2), torch.Generator().manual_seed(7)
    r = make_routes(case, generator)
    x, w = torch.randn(9, 6, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    down = torch.randn(3, 4, 6, requires_grad=True)
    index = (r.source_N, r.expert_N, r.weight_N.requires_grad_(), r.target_N, r.num_targets, r.per_source, r.per_target)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_routed_mlp, (x, w, down, *index), test_utils=checks)
    torch.library.opcheck(_routed_linear, (x, w, *index), test_utils=checks)


def test_doors_run_without_data_and_under_compile() -> None:
    case, generator = Case(9, 6, 4, 3, 2), torch.Generator().manual_seed(8)
    routes = make_routes(case, generator)
    x, w = torch.randn(9, 6, generator=generator), torch.randn(3, 6, 4, generator=generator)
    compiled = torch.compile(lambda x, w: routed_linear(x, w, routes) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w), routed_linear(x, w, routes) + 1)
    meta = Routes(
        *(t.to("meta") for t in (routes.source_N, routes.expert_N, routes.weight_N, routes.target_N)), 3, 9, 2, 2
    )
    assert routed_linear(x.to("meta"), w.to("meta"), meta).shape == (9, 4)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'cuda9' is unknown: choose auto, reference, segments"):
        resolve_backend("cuda9")
    routes = make_routes(Case(3, 4, 2, 2, 1), torch.Generator().manual_seed(9))
    with pytest.raises(ValueError, match="activation='gelu'"):
        routed_mlp(torch.randn(3, 4), torch.randn(2, 4, 2), torch.randn(2, 2, 4), routes, activation="gelu")
