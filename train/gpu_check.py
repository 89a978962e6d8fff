"""Checks this machine's GPU kernels (experts, norms, rotation, routers) against plain PyTorch.

It takes less than a minute, mostly compiling. `python -m benchmarks.gpu` measures speed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
# Relative errors in norm; `segments` on a CPU reaches 3e-7 and 4.4e-3 in these calls.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROUTER_TOLERANCE = 5e-5  # logits come from bfloat16 products: 4e-6 in the interpreter


@dataclass(frozen=True)
class GpuCheck:
    """Reports one check on a GPU."""

    name: str
    is_ok: bool
    found: str
    advice: str = ""  # if it is not ok


@dataclass(frozen=True)
class _Call:
    """Holds a call of the experts, and its weights in float64."""

    name: str
    weights: list[Tensor]
    run: Callable[[Tensor, list[Tensor], Routes, str], Tensor]


def check_kernels(device: torch.device, dtype: torch.dtype) -> GpuCheck:
    """Compares Triton's kernels of experts, norms, rotation and routers with the references.

    It compares outputs and gradients.
    """
    check, began_s = f"kernels, {str(dtype).removeprefix('torch.')}", time.perf_counter()
    if reason := reason_against("triton", device.type, dtype):
        return GpuCheck(
            check, False, f"Triton's kernels cannot run: {reason}", "see docs/kernels.md"
        )
    worst, faults = 0.0, list[str]()
    for what, most, run in _comparisons(device, dtype):
        try:
            errors = run()
        except Exception as error:  # noqa: BLE001 (a compiler's have no common base)
            root: BaseException = error
            while root.__cause__ is not None:  # the compiler's innermost error has the reason
                root = root.__cause__
            faults.append(f"{what}: {type(error).__name__}: {' '.join(str(root).split())}")
            continue
        worst = max(worst, *errors.values())
        faults += [
            f"{what}: {name}: off by {error:.1e} (at most {most:g})"
            for name, error in errors.items()
            if not error <= most  # also if it is NaN
        ]
    if faults:
        advice = "report it, with the GPU's name; kernels.backend=segments"
        return GpuCheck(check, False, "; ".join(faults), advice)
    seconds = time.perf_counter() - began_s
    return GpuCheck(
        check, True, f"within {worst:.0e} of plain PyTorch; {seconds:.0f} s with compiling"
    )


def _comparisons(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, float, Callable[[], dict[str, float]]]]:
    """Yields operations, their tolerance, and functions that return the values' relative errors."""
    most, here, cpu = TOLERANCE[dtype], (device, dtype), (torch.device("cpu"), dtype)
    for call in _calls():
        of = partial(_outputs, call)
        run = partial(_compare, partial(of, *cpu, "reference"), partial(of, *here, "triton"))
        yield f"triton, {call.name}", most, run
    expected = partial(_norms, *cpu, add_norm_reference)
    norms = partial(_compare, expected, partial(_norms, *here, add_norm))
    yield "triton, residual and norm", most, norms
    expected = partial(_rotations, *cpu, _rotated_by_reference)
    rotations = partial(_compare, expected, partial(_rotations, *here, rotate_pair))
    yield "triton, rotation", most, rotations
    if dtype is torch.float32:  # routers always compute in float32
        yield "router", ROUTER_TOLERANCE, partial(_router_errors, device)


def _compare(
    expected: Callable[[], dict[str, Tensor]], found: Callable[[], dict[str, Tensor]]
) -> dict[str, float]:
    """Returns the relative error of every value."""
    right = expected()
    return {
        name: ((value - right[name]).norm() / right[name].norm()).item()
        for name, value in found().items()
    }


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
    for width in (HIDDEN, 2 * WIDTH):  # the gate's gradient is computed on the narrow side
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
    """Returns output and gradients, float64 on the CPU.

    The reference computes in float64 with operands rounded to `dtype`.
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
    """Returns a function that draws operands, rounded to `of` and widened if `exact`."""
    generator = torch.Generator().manual_seed(seed)

    def operand(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        value = torch.randn(shape, generator=generator).to(of)
        return value.to(device, torch.float64 if exact else of)

    return operand


def _norms(
    device: torch.device, dtype: torch.dtype, run: Callable[..., NormedRows]
) -> dict[str, Tensor]:
    """Returns outputs and gradients of addition and norm, float64 on the CPU.

    Rows are added and copied in `dtype`; the reference computes in float64.
    """
    exact = run is add_norm_reference
    operand = _operands(2, device, exact=exact)
    given = [operand(TOKENS, WIDTH), operand(TOKENS, WIDTH, of=dtype)]
    given += [operand(WIDTH), operand(WIDTH)]
    given = [value.requires_grad_() for value in given]
    low = torch.float64 if exact else dtype
    rows = run(*given, 1e-5, low=low, copies=("normed", "total"))
    names = ("sum", "norm", "copy of the norm", "copy of the sum")
    assert rows.normed is not None, "the norm was requested"
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
    """Returns partly rotated queries and keys and their gradients, float64 on the CPU.

    The reference computes in float64.
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
    """Returns relative errors of a router's logits, gates and gradients against float64.

    None of the 300 rows is close enough to another choice for rounding to change it.
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
