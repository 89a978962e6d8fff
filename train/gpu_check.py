"""Checks that this machine's GPUs compute what they should: every kernel of the experts, of norms,
rotation and routers against plain PyTorch.

It takes less than a minute, most of which is compiling. `python -m benchmarks.gpu` measures speed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.backend import reason_against
from ..kernels.functional import routed_linear, routed_mlp
from ..kernels.fused.norm import NormedRows, add_norm, add_norm_reference
from ..kernels.fused.rotary import rotate_pair, rotate_reference
from ..kernels.fused.router import route_top_k
from ..model.layers import rotary_table
from ..model.routing import Routes, token_routes

TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 300, 8, 2, 64, 32
# Relative errors of the norms; `segments` on a CPU has up to 3e-7 and 4.4e-3 in these calls.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROUTER_TOLERANCE = 5e-5  # logits are made of bfloat16 products: 4e-6 in the interpreter


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
    """Compares outputs and gradients of Triton's kernels of experts, norms, rotation and routers with the references."""
    check, began_s = f"kernels, {str(dtype).removeprefix('torch.')}", time.perf_counter()
    if reason := reason_against("triton", device.type, dtype):
        return GpuCheck(check, False, f"Triton's cannot run: {reason}", "see docs/kernels.md")
    worst = 0.0
    for what, error, most in _errors(device, dtype):
        if not error <= most:  # NaN is not
            found = f"{what}: off by {error:.1e} (at most {most:g})"
            return GpuCheck(
                check, False, found, "report it, with the GPU's name; kernels.backend=segments"
            )
        worst = max(worst, error)
    seconds = time.perf_counter() - began_s
    return GpuCheck(
        check, True, f"within {worst:.0e} of plain PyTorch; {seconds:.0f} s with compiling"
    )


def _errors(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Yields what was computed, its relative error, and the most that it may have."""
    for what, name, value, expected in _compared(device, dtype):
        error = ((value - expected).norm() / expected.norm()).item()
        yield f"{what}: {name}", error, TOLERANCE[dtype]
    if dtype is torch.float32:  # routers compute in it, whatever the experts' dtype is
        for name, error in _router_errors(device).items():
            yield f"router: {name}", error, ROUTER_TOLERANCE


def _compared(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yields what was computed, the name of a value, what the kernels found and what is expected."""
    for call in _calls():
        expected = _outputs(call, torch.device("cpu"), dtype, "reference")
        for name, value in _outputs(call, device, dtype, "triton").items():
            yield f"triton, {call.name}", name, value, expected[name]
    expected = _norms(torch.device("cpu"), dtype, add_norm_reference)
    for name, value in _norms(device, dtype, add_norm).items():
        yield "triton, residual and norm", name, value, expected[name]
    expected = _rotations(torch.device("cpu"), dtype, _rotated_by_reference)
    for name, value in _rotations(device, dtype, rotate_pair).items():
        yield "triton, rotation", name, value, expected[name]


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


def _operands(seed: int, device: torch.device, *, exact: bool) -> Callable[..., Tensor]:
    """Returns what draws one operand after another: rounded to `of`, and then wide if `exact`."""
    generator = torch.Generator().manual_seed(seed)

    def operand(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        value = torch.randn(shape, generator=generator).to(of)
        return value.to(device, torch.float64 if exact else of)

    return operand


def _norms(
    device: torch.device, dtype: torch.dtype, run: Callable[..., NormedRows]
) -> dict[str, Tensor]:
    """Outputs and gradients of a norm after an addition, float64 on the CPU; the reference computes in
    float64. Rows are added, and copied, in `dtype`.
    """
    exact = run is add_norm_reference
    operand = _operands(2, device, exact=exact)
    given = [operand(TOKENS, WIDTH), operand(TOKENS, WIDTH, of=dtype)]
    given += [operand(WIDTH), operand(WIDTH)]
    given = [value.requires_grad_() for value in given]
    low = torch.float64 if exact else dtype
    rows = run(*given, 1e-5, low=low, copies=("normed", "total"))
    names = ("sum", "norm", "copy of the norm", "copy of the sum")
    assert rows.normed is not None, "it is wanted"
    outputs = dict(zip(names, (rows.total, rows.normed, *rows.copies), strict=True))
    grads = [operand(TOKENS, WIDTH) for _ in outputs]
    grads = [grad.to(out.dtype) for grad, out in zip(grads, outputs.values(), strict=True)]
    gradients = torch.autograd.grad(list(outputs.values()), given, grads)
    names = ("gradient of rows", "gradient of added rows", "gradient of weight", "of bias")
    found = outputs | dict(zip(names, gradients, strict=True))
    return {name: value.detach().double().cpu() for name, value in found.items()}


def _rotations(
    device: torch.device, dtype: torch.dtype, run: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Rotated queries and keys, of which some channels are not rotated, and their gradients, float64 on
    the CPU; the reference computes in float64.
    """
    exact = run is _rotated_by_reference
    operand = _operands(3, device, exact=exact)
    rows = [operand(2, 60, 3, WIDTH, of=dtype).transpose(1, 2).requires_grad_() for _ in range(2)]
    wide = torch.float64 if exact else torch.float32
    positions = torch.arange(3, 63, device=device, dtype=wide)
    table = rotary_table(positions, WIDTH // 2, 10_000.0)
    outputs = run(*rows, *table, scale=0.5)
    grads = [operand(*out.shape).to(out.dtype) for out in outputs]
    found = (*outputs, *torch.autograd.grad(outputs, rows, grads))
    names = ("queries", "keys", "gradient of queries", "gradient of keys")
    return {name: value.detach().double().cpu() for name, value in zip(names, found, strict=True)}


def _rotated_by_reference(
    q_BHSC: Tensor, k_BHSC: Tensor, cos: Tensor, sin: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    q_BHSC, k_BHSC = (rotate_reference(x, cos, sin, scale=scale) for x in (q_BHSC, k_BHSC))
    return q_BHSC, k_BHSC


def _router_errors(device: torch.device) -> dict[str, float]:
    """Returns relative errors of a router's logits, gates and gradients, against float64's.

    Of 300 rows none is so near to another choice that rounding could change it.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(2 * EXPERTS, WIDTH, generator=generator) / WIDTH**0.5
    exact_x, exact_weight = (each.double().requires_grad_() for each in (x, weight))
    logits_THA = (exact_x @ exact_weight.T).unflatten(1, (2, EXPERTS))
    gates_THK = logits_THA.topk(TOP_K, dim=-1).values.sigmoid()
    expected = (
        logits_THA,
        gates_THK,
        *_square_gradients(logits_THA, gates_THK, exact_x, exact_weight),
    )
    x, weight = (each.to(device).requires_grad_() for each in (x, weight))
    logits_THA, _, gates_THK = route_top_k(x, weight, top_k=TOP_K, gate="sigmoid", heads=2)
    found = (logits_THA, gates_THK, *_square_gradients(logits_THA, gates_THK, x, weight))
    names = ("logits", "gates", "gradients of rows", "gradients of weights")
    return {
        name: ((mine.detach().double().cpu() - other).norm() / other.norm()).item()
        for name, mine, other in zip(names, found, expected, strict=True)
    }


def _square_gradients(logits_THA: Tensor, gates_THK: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(logits_THA.square().sum() + 9 * gates_THK.square().sum(), of)
