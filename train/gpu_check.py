"""Checks this machine's GPU kernels (experts, norms, rotation, routers) against plain PyTorch.

It takes less than a minute, mostly compiling. `python -m benchmarks.gpu` measures speed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..kernels.backend import reason_against
from ..kernels.functional import routed_linear, routed_mlp
from ..kernels.fused.norm import NormedRows, add_norm, add_norm_reference
from ..kernels.fused.rotary import rotate_pair, rotate_reference
from ..kernels.fused.router import route_top_k
from ..model.config.attention_config import RotaryConfig
from ..model.layers import rotary_table
from ..model.routing import token_routes

TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 300, 8, 2, 64, 32
WIDE = torch.float64
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
    for case in _cases(dtype):
        what, most = f"triton, {case.name}", case.tolerance or TOLERANCE[dtype]
        try:
            errors = _errors(case, device, dtype)
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


@dataclass(frozen=True)
class _Case:
    """Describes an operation: it takes operands, from rows on, and returns outputs."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    run: Callable[..., tuple[Tensor, ...]]  # in the products' dtype, on the GPU
    exact: Callable[..., tuple[Tensor, ...]]  # in float64, on the CPU
    outputs: tuple[str, ...] = ("output",)
    wide: tuple[str, ...] = ()  # operands in float32 whatever the products' dtype
    tolerance: float | None = None  # None: the dtype's


def _cases(dtype: torch.dtype) -> Iterator[_Case]:
    yield from _expert_cases()
    names = ("sum", "norm", "copy of the norm", "copy of the sum")
    shapes = {"rows": (TOKENS, WIDTH), "added rows": (TOKENS, WIDTH)}
    shapes |= {"weight": (WIDTH,), "bias": (WIDTH,)}
    run, exact = partial(_normed, add_norm, dtype), partial(_normed, add_norm_reference, WIDE)
    yield _Case("residual and norm", shapes, run, exact, names, ("rows", "weight", "bias"))
    shapes = {"queries": (2, 60, 3, WIDTH), "keys": (2, 60, 3, WIDTH)}
    yield _Case("rotation", shapes, _rotated, partial(_rotated, exact=True), ("queries", "keys"))
    if dtype is torch.float32:  # routers always compute in float32
        shapes = {"rows": (TOKENS, WIDTH), "weights": (2 * EXPERTS, WIDTH)}
        names = ("logits", "gates")
        yield _Case("router", shapes, _routed, _routed_exactly, names, tolerance=ROUTER_TOLERANCE)


def _expert_cases() -> Iterator[_Case]:
    rows = {"rows": (TOKENS, WIDTH), "gates": (TOKENS, TOP_K)}
    for activation in ("relu", "gelu", "swiglu"):
        columns = 2 * HIDDEN if activation == "swiglu" else HIDDEN
        shapes = {"weights": (EXPERTS, WIDTH, columns), "w_down": (EXPERTS, HIDDEN, WIDTH)}
        run = partial(_experts, partial(routed_mlp, activation=activation))
        name = f"perceptrons with {activation}"
        yield _Case(name, rows | shapes, run, partial(run, exact=True), wide=("gates",))
    for width in (HIDDEN, 2 * WIDTH):  # the gate's gradient is computed on the narrow side
        shapes, run = {"weights": (EXPERTS, WIDTH, width)}, partial(_experts, routed_linear)
        name = f"matrices from {WIDTH} to {width}"
        yield _Case(name, rows | shapes, run, partial(run, exact=True), wide=("gates",))


def _experts(
    operation: Callable[..., Tensor],
    x: Tensor,
    gates: Tensor,
    *weights: Tensor,
    exact: bool = False,
) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    choice = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    routes = token_routes(choice.to(x.device), gates, num_experts=EXPERTS)
    return (operation(x, *weights, routes, backend="reference" if exact else "triton"),)


def _normed(
    operation: Callable[..., NormedRows], low: torch.dtype, *operands: Tensor
) -> tuple[Tensor, ...]:
    rows = operation(*operands, 1e-5, low=low, copies=("normed", "total"))
    assert rows.normed is not None, "the norm was requested"
    return rows.total, rows.normed, *rows.copies


def _rotated(q_BSHC: Tensor, k_BSHC: Tensor, *, exact: bool = False) -> tuple[Tensor, ...]:
    positions = torch.arange(3, 63, device=q_BSHC.device, dtype=WIDE if exact else torch.float32)
    cos, sin = rotary_table(positions, WIDTH // 2, RotaryConfig())
    rows = q_BSHC.transpose(1, 2), k_BSHC.transpose(1, 2)
    if exact:
        return tuple(rotate_reference(x, cos, sin, scale=0.5) for x in rows)
    return rotate_pair(*rows, cos, sin, scale=0.5)


def _routed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found = route_top_k(x, weight, top_k=TOP_K, gate="sigmoid", heads=2)
    return found.logits_THA, found.gates_THK


def _routed_exactly(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """No row is so close to another choice that rounding could change it."""
    logits_THA = (x @ weight.T).unflatten(1, (2, EXPERTS))
    return logits_THA, logits_THA.topk(TOP_K, dim=-1).values.sigmoid()


def _errors(case: _Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns the relative errors of outputs and gradients; both sides read rounded operands."""
    generator = torch.Generator().manual_seed(2)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator) / (shape[1] ** 0.5 if len(shape) == 3 else 1)

    given = {
        name: draw(shape).to(torch.float32 if name in case.wide else dtype)
        for name, shape in case.shapes.items()
    }
    exact = [value.to(WIDE).requires_grad_() for value in given.values()]
    operands = [value.to(device).requires_grad_() for value in given.values()]
    expected, found = case.exact(*exact), case.run(*operands)
    grads = [draw(tuple(out.shape)).to(out.dtype).to(device) for out in found]
    wide_grads = [grad.to("cpu", WIDE) for grad in grads]
    expected = [*expected, *torch.autograd.grad(expected, exact, wide_grads)]
    found = [*found, *torch.autograd.grad(found, operands, grads)]
    names = [*case.outputs, *(f"gradient of {name}" for name in given)]
    return {
        name: ((mine.detach().to("cpu", WIDE) - right).norm() / right.norm()).item()
        for name, mine, right in zip(names, found, expected, strict=True)
    }
