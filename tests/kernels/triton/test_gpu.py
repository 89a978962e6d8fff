"""Tests that need a GPU: every backend against the reference in both precisions, router and norm
kernels, sends, CUDA graphs, no host synchronisation, equal bits.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

import send_cases
from family import tiny_model
from kernel_cases import (
    CASES,
    Case,
    all_equal,
    check,
    head_routes,
    irregular,
    make_call,
    on_device,
    values_and_gradients,
)
from router_cases import GATES, ROUTERS, gates_of

from moebius.kernels import sends
from moebius.kernels.backend import reason_against
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.fused.norm import WIDEST, Copied, NormedRows, add_norm, add_norm_reference
from moebius.kernels.fused.router import Gate, route_top_k
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.permute import sort_by_expert
from moebius.kernels.reference import ACTIVATIONS
from moebius.kernels.triton.router import BOUND
from moebius.kernels.triton.routing import sort_routes
from moebius.model.execution.precision import forward_in

pytest_plugins = ["benchmarks.gpu.pytest_plugin"]
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [("triton", BF16), ("triton", FP32), ("grouped_mm", BF16), ("megablocks", BF16)]
LARGE = {
    "few rows per expert": Case(512, 1024, 128, 32, 4),
    "many rows per expert": Case(2048, 412, 128, 8, 2),
    "a hot expert": Case(9000, 64, 128, 16, 1, choice="first"),
}
every_kind = pytest.mark.parametrize(("backend", "dtype"), KINDS)


@pytest.fixture(autouse=True)
def can_run(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "backend" in parameters:
        reason = reason_against(parameters["backend"], "cuda", parameters["dtype"])
        if reason is not None and parameters["backend"] != "triton":
            pytest.skip(reason)
        assert reason is None


# The experts --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_mlp_equals_the_reference(name: str, backend: str, dtype: torch.dtype) -> None:
    case = (CASES | LARGE)[name]
    operation, x, weights, routes = make_call(case, "relu", "no bias", kink=False)
    weights = [w.to(dtype) for w in weights]
    for kind in (routes, irregular(routes)):
        check(operation, x.to(dtype), weights, kind, backend, device="cuda")


@every_kind
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, backend: str, dtype: torch.dtype) -> None:
    case = Case(300, 82, 100, 5, 2)
    operation, x, weights, routes = make_call(case, activation, "both biases", kink=False)
    x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    check(operation, x, weights, routes, backend, device="cuda")


@every_kind
@pytest.mark.parametrize("widths", [(1024, 128), (128, 1024), (412, 82), (82, 412)])
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_equals_the_reference(
    direction: str, widths: tuple[int, int], backend: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = head_routes(direction, generator, tokens=100)
    x = torch.randn(rows, widths[0], generator=generator).to(dtype)
    w = torch.randn(routes.num_experts, *widths, generator=generator).to(dtype)
    for kind in (routes, irregular(routes)):
        check(routed_linear, x, [w], kind, backend, device="cuda")


def large_call(dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """A forward and backward pass on the GPU."""
    operation, x, weights, routes = make_call(LARGE["few rows per expert"], "relu", "no bias")
    x, weights = x.to(dtype).cuda(), [w.to(dtype).cuda() for w in weights]
    grad, routes = torch.randn(len(x), weights[1].shape[2]).cuda(), on_device(routes, "cuda")
    return lambda: values_and_gradients(operation, x, weights, routes, grad, "triton")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_two_runs_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    run = large_call(dtype)
    assert all_equal(run(), run())


def test_deferred_weight_gradients_are_the_sum_of_all_calls() -> None:
    _, x, weights, routes = make_call(LARGE["many rows per expert"], "relu", "no bias", kink=False)
    x, weights = x.cuda(), [w.cuda().requires_grad_() for w in weights]
    call = partial(routed_mlp, x, routes=on_device(routes, "cuda"), backend="triton")
    once = torch.autograd.grad(call(*weights).sum(), weights)
    with accumulate_weight_gradients():
        loss = torch.stack([call(*weights, defer=True).sum() for _ in range(3)]).sum()
    for mine, theirs in zip(torch.autograd.grad(loss, weights), once, strict=True):
        assert (mine - 3 * theirs).norm() <= 1e-5 * mine.norm()


def test_a_call_is_captured_in_a_cuda_graph_and_asks_the_gpu_nothing() -> None:
    run = large_call(BF16)
    expected = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for value in found:
        value.fill_(torch.nan)
    graph.replay()
    assert all_equal(found, expected)


# Routes and routers -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5000])
@pytest.mark.parametrize("num_experts", [1, 155, 565])
def test_routes_are_sorted_stably(num_experts: int, tokens: int) -> None:
    expert_N = torch.randint(num_experts, (tokens,), device="cuda")
    order_N, place_N, starts_E1 = sort_routes(expert_N, num_experts)
    expected = sort_by_expert(expert_N, num_experts)
    assert torch.equal(order_N.long(), expected)
    assert torch.equal(place_N.long(), expected.argsort())
    assert torch.equal(starts_E1.diff().long(), torch.bincount(expert_N, minlength=num_experts))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("tokens", "width", "heads", "per_head", "top_k"), ROUTERS)
def test_router(tokens: int, width: int, heads: int, per_head: int, top_k: int, gate: Gate) -> None:
    """Logits within the bound; torch's choice of them; and gradients of logits, of gates, of both."""
    x = torch.randn(tokens, width, device="cuda").requires_grad_()
    weight = (torch.randn(heads * per_head, width, device="cuda") / width**0.5).requires_grad_()
    found = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads)[:3]
    logits, experts, gates = found
    first_H1 = torch.arange(heads, device="cuda")[:, None] * per_head
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    exact_logits = (exact[0] @ exact[1].T).view_as(logits)
    sizes = (x.abs() @ weight.abs().T).view_as(logits).double()
    assert ((logits.double() - exact_logits).abs() <= BOUND * sizes).all()
    chosen, places = logits.topk(top_k, dim=-1)
    assert torch.equal(logits.gather(-1, experts - first_H1), chosen)
    assert (experts == places + first_H1).float().mean().nan_to_num(1) > 0.999  # but for ties
    torch.testing.assert_close(gates, gates_of(logits, chosen, gate), rtol=1e-5, atol=1e-6)
    again = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads, given_THK=experts)
    assert all_equal(found, again[:3])
    exact_chosen = exact_logits.gather(-1, experts - first_H1)
    results = exact_logits, experts, gates_of(exact_logits, exact_chosen, gate)
    for parts in ((0,), (2,), (0, 2)):
        grads = [torch.randn_like(found[part]) for part in parts]
        outputs, wanted = [found[part] for part in parts], [results[part] for part in parts]
        back = partial(torch.autograd.grad, retain_graph=True)
        ours, same = (back(outputs, [x, weight], grads) for _ in range(2))
        assert all_equal(ours, same)
        for one, other in zip(ours, back(wanted, exact, [g.double() for g in grads]), strict=True):
            assert (one.double() - other).norm() <= 2e-4 * other.norm()


def moved(value: Any, device: str) -> Any:
    """A tensor, or everything of a record, on that device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **own)
    return value


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("name", send_cases.CASES)
def test_sends_are_written_down_as_by_loops(name: str, shuffled: bool) -> None:
    to = send_cases.addresses(name, shuffled=shuffled)
    for dtype in (torch.float32, torch.float64):
        weight_N = send_cases.weights(to, dtype)
        counts = sends.count_sends(moved(to, "cuda"))
        packed = sends.pack_sends(moved(to, "cuda"), counts, weight_N.cuda())
        send_cases.check_sends(to, moved(counts, "cpu"), moved(packed, "cpu"), weight_N)
        came = sends.unpack_sends(packed.metadata_N4, counts.counts_P3, 7)
        received_P3 = counts.counts_P3.cpu()
        send_cases.check_received(moved(came, "cpu"), packed.metadata_N4.cpu(), received_P3)


# Residual and norm --------------------------------------------------------------------------------


def normed(
    function: Callable[..., NormedRows], given: list[Tensor | None], **options: Any
) -> list[Tensor]:
    """Its outputs that are wanted, and the gradients of what was given."""
    rows = function(*given, 1e-5, **options)
    found = [out for out in (rows.total, rows.normed, *rows.copies) if out is not None]
    grads = [
        (torch.arange(out.numel(), device="cuda") % 7 - 3).view(out.shape).to(out.dtype)
        for out in found
    ]
    leaves = [value for value in given if value is not None]
    return [*(out.detach() for out in found), *torch.autograd.grad(found, leaves, grads)]


def norm_operands(
    rows: int, width: int, stream: torch.dtype, added: torch.dtype | None
) -> list[Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(rows, width, device="cuda").to(stream)
    y = None if added is None else torch.randn(rows, width, device="cuda").to(added)
    weight, bias = (torch.randn(width, device="cuda").to(stream) for _ in range(2))
    return [None if value is None else value.requires_grad_() for value in (x, y, weight, bias)]


@pytest.mark.parametrize("copies", [("normed", "total"), ("normed", "normed"), ("total",)])
@pytest.mark.parametrize("width", [5, 412, 1024, 4096, WIDEST])
@pytest.mark.parametrize(
    ("stream", "added"), [(FP32, FP32), (FP32, BF16), (FP32, None), (BF16, BF16)]
)
def test_norms_and_their_gradients(
    stream: torch.dtype, added: torch.dtype | None, width: int, copies: tuple[Copied, ...]
) -> None:
    for rows in (0, 1, 3000):
        given = norm_operands(rows, width, stream, added)
        exact = [None if v is None else v.detach().double().requires_grad_() for v in given]
        found = normed(add_norm, given, low=BF16, copies=copies)
        expected = normed(add_norm_reference, exact, low=torch.float64, copies=copies)
        for one, other in zip(found, expected, strict=True):
            tolerance = 1e-5 if stream is FP32 and one.dtype is FP32 else 1e-2
            assert (one.double() - other).norm() <= tolerance * other.norm()


def test_norms_have_equal_bits_in_every_run_and_in_a_graph() -> None:
    given = norm_operands(5000, 412, FP32, BF16)
    call = partial(normed, add_norm, given, low=BF16, copies=("normed", "total"))
    first, second = call(), call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert all_equal(first, second)
    assert all_equal(first, captured)


@pytest.mark.parametrize("name", ["moeut", "moeut_pre", "moeut_post", "dense"])
def test_norms_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where nothing else of the pass differs."""
    tokens = torch.randint(61, (8, 16), device="cuda")

    def gradients() -> list[Tensor]:
        model = tiny_model(name).cuda()
        forward_in(model, FP32, tokens, targets_BS=tokens).cross_entropy.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    fused = gradients()
    monkeypatch.setattr("moebius.model.block.runs_fused", lambda *given: False)
    for mine, theirs in zip(fused, gradients(), strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6
