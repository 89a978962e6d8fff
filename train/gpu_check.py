"""Looks whether this machine's GPUs compute what they should: every kernel of the experts against plain
PyTorch, and a CUDA graph.

In under a minute, of which most is compiling. Speed is not looked at: that is `python -m
benchmarks.gpu`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..kernels.backend import reason_against
from ..kernels.functional import routed_linear, routed_mlp
from ..model.routing import Routes, token_routes

TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 300, 8, 2, 64, 32
# Relative errors of the norms; `segments` on a CPU has up to 3e-7 and 4.4e-3 in these calls.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Both, for they launch different kernels.
_BACKENDS = ("triton", "triton+fused+scatter_add")


@dataclass(frozen=True)
class GpuCheck:
    """One thing that was tried on a GPU."""

    name: str
    is_ok: bool
    found: str
    advice: str = ""  # where it is not ok


@dataclass(frozen=True)
class _Call:
    """A call of the experts, and its weights in float64."""

    name: str
    weights: list[Tensor]
    run: Callable[[Tensor, list[Tensor], Routes, str], Tensor]


def check_kernels(device: torch.device, dtype: torch.dtype) -> GpuCheck:
    """Compares outputs and gradients of Triton's kernels of the experts with the reference."""
    check, began_s = f"kernels, {str(dtype).removeprefix('torch.')}", time.perf_counter()
    if reason := reason_against("triton", device.type, dtype):
        return GpuCheck(check, False, f"Triton's cannot run: {reason}", "see docs/kernels.md")
    worst = 0.0
    for call, backend in product(_calls(), _BACKENDS):
        expected = _outputs(call, torch.device("cpu"), dtype, "reference")
        for name, value in _outputs(call, device, dtype, backend).items():
            error = ((value - expected[name]).norm() / expected[name].norm()).item()
            if not error <= TOLERANCE[dtype]:  # NaN is not
                found = f"{backend}, {call.name}: {name} is off by {error:.1e} (at most {TOLERANCE[dtype]:g})"
                return GpuCheck(
                    check, False, found, "report it, with the GPU's name; kernels.backend=segments"
                )
            worst = max(worst, error)
    seconds = time.perf_counter() - began_s
    return GpuCheck(
        check, True, f"within {worst:.0e} of plain PyTorch; {seconds:.0f} s with compiling"
    )


def _calls() -> Iterator[_Call]:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5

    def mlp(activation: str) -> _Call:
        columns = 2 * HIDDEN if activation == "swiglu" else HIDDEN
        return _Call(
            f"perceptrons with {activation}",
            [new(EXPERTS, WIDTH, columns), new(EXPERTS, HIDDEN, WIDTH)],
            lambda x, weights, routes, backend: routed_mlp(
                x, weights[0], weights[1], routes, activation=activation, backend=backend
            ),
        )

    yield from (mlp(activation) for activation in ("relu", "gelu", "swiglu"))
    for width in (HIDDEN, 2 * WIDTH):  # the gate's gradient is taken on the narrow side
        yield _Call(
            f"matrices from {WIDTH} to {width}",
            [new(EXPERTS, WIDTH, width)],
            lambda x, weights, routes, backend: routed_linear(
                x, weights[0], routes, backend=backend
            ),
        )


def _outputs(
    call: _Call, device: torch.device, dtype: torch.dtype, backend: str
) -> dict[str, Tensor]:
    """Output and gradients, float64 on the CPU; the reference computes in float64 with the operands of
    `dtype`.
    """
    wide = torch.float64 if backend == "reference" else dtype
    generator = torch.Generator().manual_seed(1)

    def operand(value: Tensor) -> Tensor:
        return value.to(dtype).to(device, wide).requires_grad_()

    x = operand(torch.randn(TOKENS, WIDTH, generator=generator))
    weights = [operand(weight) for weight in call.weights]
    choice = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].to(device)
    gates = torch.rand(TOKENS, TOP_K, generator=generator).to(device).requires_grad_()
    y = call.run(x, weights, token_routes(choice, gates, num_experts=EXPERTS), backend)
    grad = torch.randn(y.shape, generator=generator).to(dtype).to(device, y.dtype)
    gradients = torch.autograd.grad(y, [x, gates, *weights], grad)
    names = ["output", "gradient of rows", "gradient of gates", "gradient of weights", "of w_down"]
    found = [y.detach(), *gradients]
    return {name: each.double().cpu() for name, each in zip(names, found, strict=False)}


def check_graph(device: torch.device) -> GpuCheck:
    """Captures a forward and backward pass in a CUDA graph, and replays it with other rows."""
    check = "CUDA graph"
    if reason := reason_against("triton", device.type, torch.bfloat16):
        return GpuCheck(check, False, f"not tried: {reason}", "see docs/kernels.md")
    call = next(_calls())
    weights = [weight.to(device, torch.bfloat16).requires_grad_() for weight in call.weights]
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
    choice = torch.arange(TOKENS * TOP_K, device=device).view(TOKENS, TOP_K) % EXPERTS
    gates = torch.rand(TOKENS, TOP_K, device=device)

    def step() -> list[Tensor]:
        y = call.run(x, weights, token_routes(choice, gates, num_experts=EXPERTS), "triton")
        return [y, *torch.autograd.grad(y.float().square().mean(), [x, *weights])]

    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        same = all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    except RuntimeError as error:
        words = str(error).strip().splitlines()[0]
        return GpuCheck(check, False, f"could not be captured: {words}", "run without graphs")
    if not same:
        return GpuCheck(check, False, "a replay gives other numbers", "run without graphs")
    return GpuCheck(check, True, "a layer's forward and backward replay with the same bits")
