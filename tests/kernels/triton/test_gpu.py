"""The Triton backend on a GPU: values and gradients in both precisions, CUDA graphs, no word to the
host, equal bits.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from kernel_cases import Case, make_routes
from router_cases import GATES
from triton_cases import (
    CASES,
    Values,
    as_sorted,
    check,
    expected_linear,
    expected_mlp,
    head_routes,
    make_bank,
    our_linear,
    our_mlp,
)

from moebius.kernels.calls import MLPBank, MLPCall
from moebius.kernels.fused.router import MOST_EXPERTS, Gate, route_top_k
from moebius.kernels.permute import sort_by_expert
from moebius.kernels.triton import backend as ours
from moebius.kernels.triton.router import BOUND
from moebius.kernels.triton.routing import sort_routes
from moebius.model.routing import Routes

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCES = {FP32: 1e-5, BF16: 2e-2}
LARGE = {
    "few rows per expert": Case(512, 1024, 128, 32, 4),
    "many rows per expert": Case(2048, 412, 128, 8, 2),
}
# tokens, width, heads, experts of a head, top_k
ROUTERS = [
    (20_000, 1024, 1, 387, 16),
    (3000, 412, 1, 155, 12),
    (17_000, 412, 10, 5, 2),
    (100, 64, 1, MOST_EXPERTS, 24),
    (1, 8, 1, 4, 1),
    (0, 8, 1, 4, 1),
]
OPTIONS = {
    "default": ours.DEFAULT,
    "fused": ours.Options(fused=True),
    "scattered": ours.Options(scatter_add=True),
    "fused and scattered": ours.Options(fused=True, scatter_add=True),
}


def on_gpu(routes: Routes) -> Routes:
    names = ("source_N", "expert_N", "weight_N", "target_N")
    return replace(routes, **{name: getattr(routes, name).cuda() for name in names})


def make_problem(case: Case, activation: str, dtype: torch.dtype, *, biased: bool = False):
    """grad, x, bank, routes. relu's inputs are away from its kink, where rounding would change more
    than a rounding.
    """
    generator = torch.Generator().manual_seed(1)
    routes, bank = make_routes(case, generator), make_bank(case, activation, biased, generator)
    x, grad = (torch.randn(case.tokens, case.d_in, generator=generator) for _ in range(2))
    w_up, w_down = bank.w_up_EDW / case.d_in**0.5, bank.w_down_EFO / case.d_hidden**0.5
    if activation == "relu" and (dtype is BF16 or case.tokens > 100):
        signs = torch.ones(w_up.shape[2])
        signs[::3] = -1
        x, w_up = x.abs() + 0.1, (w_up.abs() + 0.1) * signs
    b_up, b_down = (
        None if bias is None else bias.cuda().to(dtype) for bias in (bank.b_up_EW, bank.b_down_EO)
    )
    bank = MLPBank(w_up.cuda().to(dtype), w_down.cuda().to(dtype), b_up, b_down, activation)
    return grad.cuda().to(dtype), x.cuda().to(dtype), bank, on_gpu(routes)


@pytest.mark.parametrize("tokens", [0, 1, 5000])
@pytest.mark.parametrize("num_experts", [1, 155, 565])
def test_routes_are_sorted_stably(num_experts: int, tokens: int) -> None:
    expert_N = torch.randint(num_experts, (tokens,), device="cuda")
    order_N, place_N, starts_E1 = sort_routes(expert_N, num_experts)
    expected = sort_by_expert(expert_N, num_experts)
    assert torch.equal(order_N.long(), expected)
    assert torch.equal(place_N.long(), expected.argsort())
    assert torch.equal(starts_E1.diff().long(), torch.bincount(expert_N, minlength=num_experts))


def gates_of(logits_THA: Tensor, chosen_THK: Tensor, gate: Gate) -> Tensor:
    """The gates of chosen logits, by torch."""
    if gate == "sigmoid":
        return chosen_THK.sigmoid()
    if gate == "softmax":
        return (chosen_THK - logits_THA.logsumexp(-1, keepdim=True)).exp()
    return chosen_THK.softmax(-1)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("tokens", "width", "heads", "per_head", "top_k"), ROUTERS)
def test_router(tokens: int, width: int, heads: int, per_head: int, top_k: int, gate: Gate) -> None:
    x = torch.randn(tokens, width, device="cuda")
    weight = torch.randn(heads * per_head, width, device="cuda") / width**0.5
    logits, experts, gates = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads)
    exact = (x.double() @ weight.double().T).view_as(logits)
    sizes = (x.abs() @ weight.abs().T).view_as(logits).double()
    assert ((logits.double() - exact).abs() <= BOUND * sizes).all()
    # what it chose is torch's choice of its own logits
    chosen, places = logits.topk(top_k, dim=-1)
    first_H1 = torch.arange(heads, device="cuda")[:, None] * per_head
    assert torch.equal(logits.gather(-1, experts - first_H1), chosen)
    assert (experts == places + first_H1).float().mean().nan_to_num(1) > 0.999  # but for ties
    torch.testing.assert_close(gates, gates_of(logits, chosen, gate), rtol=1e-5, atol=1e-6)
    again = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads, given_THK=experts)
    for first, second in zip((logits, experts, gates), again, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("parts", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("tokens", "width", "heads", "per_head", "top_k"), ROUTERS)
def test_gradients_of_a_router(
    tokens: int,
    width: int,
    heads: int,
    per_head: int,
    top_k: int,
    gate: Gate,
    parts: tuple[int, ...],
) -> None:
    """`parts`: which results have a gradient, the logits, the gates or both."""
    x = torch.randn(tokens, width, device="cuda").requires_grad_()
    weight = (torch.randn(heads * per_head, width, device="cuda") / width**0.5).requires_grad_()
    found = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads)
    outputs = [found[part] for part in parts]
    grads = [torch.randn_like(output) for output in outputs]
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    logits = (exact[0] @ exact[1].T).unflatten(1, (heads, per_head))
    chosen = logits.gather(-1, found[1] - torch.arange(heads, device="cuda")[:, None] * per_head)
    results = logits, found[1], gates_of(logits, chosen, gate)
    expected = torch.autograd.grad(
        [results[part] for part in parts], exact, [grad.double() for grad in grads]
    )
    ours, again = (
        torch.autograd.grad(outputs, [x, weight], grads, retain_graph=True) for _ in range(2)
    )
    for one, same, other in zip(ours, again, expected, strict=True):
        assert torch.equal(one, same)
        assert (one.double() - other).norm() <= 2e-4 * other.norm()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_mlp_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    problem = make_problem((CASES | LARGE)[name], "relu", dtype)
    check(our_mlp(*problem), expected_mlp(*problem), TOLERANCES[dtype])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu", "geglu"])
def test_every_activation_and_option(activation: str, dtype: torch.dtype, options: str) -> None:
    problem = make_problem(Case(300, 82, 100, 5, 2), activation, dtype, biased=activation != "relu")
    check(our_mlp(*problem, OPTIONS[options]), expected_mlp(*problem), TOLERANCES[dtype])


def test_tensorfloat32_is_near() -> None:
    problem = make_problem(LARGE["few rows per expert"], "gelu", FP32)
    check(our_mlp(*problem, ours.Options(tf32=True)), expected_mlp(*problem), 5e-3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("widths", [(1024, 128), (128, 1024), (412, 82), (82, 412)])
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(
    direction: str, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, tokens = (
        on_gpu(head_routes(direction, 100, generator)),
        100 if direction == "token to head" else 300,
    )
    x, w, grad = (
        torch.randn(*shape, generator=generator).cuda().to(dtype)
        for shape in (
            (tokens, widths[0]),
            (routes.num_experts, *widths),
            (routes.num_targets, widths[1]),
        )
    )
    check(our_linear(grad, x, w, routes), expected_linear(grad, x, w, routes), TOLERANCES[dtype])
    irregular = replace(routes, per_source=0, per_target=0)
    check(our_linear(grad, x, w, irregular), expected_linear(grad, x, w, routes), TOLERANCES[dtype])


def test_a_hot_expert_is_done_in_chunks() -> None:
    problem = make_problem(Case(9000, 64, 128, 16, 1, choice="first"), "relu", BF16)
    check(our_mlp(*problem), expected_mlp(*problem), TOLERANCES[BF16])


def test_deferred_weight_gradients_are_the_sum_of_all_calls() -> None:
    grad, x, bank, routes = make_problem(LARGE["many rows per expert"], "relu", BF16)
    places = as_sorted(routes)
    _, saved = ours.mlp_forward(x, bank, places)
    *_, d_z = ours.mlp_backward_rows(grad, x, bank, places, saved)
    found = ours.mlp_weight_gradients([MLPCall(grad, x, places, saved, d_z, bank)] * 3)
    expected = expected_mlp(grad, x, bank, routes)
    names = ("w_up", "w_down")
    check(
        dict(zip(names, found, strict=True)),
        {name: 3 * times(expected, name) for name in names},
        TOLERANCES[BF16],
    )


def times(values: Values, name: str) -> Tensor:
    value = values[name]
    assert value is not None
    return value


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_runs_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    problem = make_problem(LARGE["few rows per expert"], "relu", dtype)
    first, second = our_mlp(*problem), our_mlp(*problem)
    assert all(
        value is None or torch.equal(value, times(second, name)) for name, value in first.items()
    )


def test_a_call_is_captured_in_a_cuda_graph_and_asks_the_gpu_nothing() -> None:
    problem = make_problem(LARGE["few rows per expert"], "relu", BF16)
    expected = our_mlp(*problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        our_mlp(*problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = our_mlp(*problem)
    for value in found.values():
        if value is not None:
            value.fill_(torch.nan)
    graph.replay()
    assert all(
        value is None or torch.equal(value, times(expected, name)) for name, value in found.items()
    )
