"""The `brgemm` backend: C++ (brgemm.cpp) around torch's oneDNN micro-kernels for AVX2, AVX-512, AMX.

Both operations consist of two kinds of products: rows times a bank's matrices, and a bank's
gradient. Gathering, activations and their biases, gate weights and their gradients run block by block
with the products. Biases of outputs are torch operations. The outputs of a target row are added in
route order. The backward reads the same saved tensors as segments.py.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

import functools
import itertools
import os
import platform
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calls import (
    ROW_SLACK,
    Backend,
    GradientBuffers,
    LinearCall,
    MLPCall,
    RowGradients,
    SortedRoutes,
)
from ..permute import sum_to_sources, sum_to_targets
from ..reference import GATES
from .build import LoadedLibrary
from .library import AVX2, AVX512, BFLOAT16, HEADER, cpu_flags, is_x86, products, workspace

# largest relative error of an exact float32 product; rounded operands give about 2e-3
EXACT = 1e-5
_ACTIVATIONS = {"none": 0, "relu": 1, "relu2": 2, "gelu": 3, "silu": 4}
_ACTIVATIONS |= {"geglu": 3, "swiglu": 4, "clamped_swiglu": 5}  # of the gate


@dataclass(frozen=True)
class Epilogue:
    """Describes how brgemm.cpp changes a product's rows before it stores them."""

    activation: str = "none"
    gate_N: Tensor | None = None
    bias_EW: Tensor | None = None
    hidden_NF: Tensor | None = None  # the activation; in a gradient times the gate
    # gradients only
    saved: Tensor | None = None
    saved_rows_N: Tensor | None = None
    grad_gate_N: Tensor | None = None


class Brgemm(Backend):
    """Implements the operations on x86-64 CPUs, in float32 and bfloat16."""

    writes = True

    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        num_routes = call.num_routes
        saved = call.x_UD.new_empty(num_routes + ROW_SLACK, call.w_up_EDW.shape[2])
        z, source_rows = saved[:num_routes], _int32(call.source_rows())
        gate = call.gates(torch.float32)
        # a ReLU's gradient needs only its result
        shape = num_routes, call.w_down_EFO.shape[1]
        hidden = z if call.activation == "relu" else workspace("hidden", shape, z)
        written = None if hidden is z else hidden
        epilogue = Epilogue(call.activation, None, call.b_up_EW, written)
        _rows_times_bank(call.x_UD, source_rows, call.w_up_EDW, call.starts_E1, z, epilogue)
        outputs = _outputs(hidden, None, call.w_down_EFO, call, gate)
        if call.b_down_EO is not None:
            outputs += _of_rows(call.b_down_EO, call) * gate[:, None].to(outputs.dtype)
        return _own(sum_to_targets(outputs, call), call), saved

    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.mlp_backward`; the gate's gradient is h · (dy·Wᵀ)."""
        source_rows, target_rows = _int32(call.source_rows()), _int32(call.target_rows())
        gate, saved = call.gates(torch.float32), saved[: call.num_routes]
        d_z = workspace("d_z", saved.shape, saved)
        gated = workspace("hidden", (call.num_routes, call.w_down_EFO.shape[1]), saved)
        grad_gate = torch.empty_like(gate)
        epilogue = Epilogue(call.activation, gate, None, gated, saved, None, grad_gate)
        _rows_times_bank(
            grad_TO,
            target_rows,
            call.w_down_EFO,
            call.starts_E1,
            d_z,
            epilogue,
            transposed=True,
        )
        grad_b_up = grad_b_down = None
        if call.b_down_EO is not None:
            dy = grad_TO.index_select(0, target_rows)
            grad_gate += (dy * _of_rows(call.b_down_EO, call)).sum(-1)
            grad_b_down = _sum_of_experts(dy * gate[:, None].to(dy.dtype), call)
        if call.b_up_EW is not None:
            grad_b_up = _sum_of_experts(d_z, call)
        (into_up, into_down), add = into.weights, not into.are_new
        _bank_gradient(gated, None, grad_TO, target_rows, call.starts_E1, into_down, add=add)
        _bank_gradient(call.x_UD, source_rows, d_z, None, call.starts_E1, into_up, add=add)
        grad_rows = _outputs(d_z, None, call.w_up_EDW, call, None, transposed=True)
        grad_x = _own(sum_to_sources(grad_rows, call, call.x_UD.shape[0]), call)
        return RowGradients(grad_x, call.gate_gradient(grad_gate), grad_b_up, grad_b_down)

    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        num_routes, (_, width_in, width_out) = call.num_routes, call.w_EDO.shape
        source_rows, gate = _int32(call.source_rows()), call.gates(torch.float32)
        if width_out > width_in:
            outputs = _outputs(call.x_UD, source_rows, call.w_EDO, call, gate)
            return _own(sum_to_targets(outputs, call), call), call.x_UD.new_empty(0)
        saved = call.x_UD.new_empty(num_routes + ROW_SLACK, width_out)
        ungated = saved[:num_routes]
        _rows_times_bank(call.x_UD, source_rows, call.w_EDO, call.starts_E1, ungated, Epilogue())
        gated = ungated * gate[:, None].to(ungated.dtype)
        return _own(sum_to_targets(gated, call), call), saved

    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Implements `Backend.linear_backward`; computes the gate's gradient on the narrow side."""
        x_UD, num_routes, (_, width_in, width_out) = call.x_UD, call.num_routes, call.w_EDO.shape
        source_rows, target_rows = _int32(call.source_rows()), _int32(call.target_rows())
        gate, starts_E1 = call.gates(torch.float32), call.starts_E1
        [into_EDO] = into.weights
        if width_out <= width_in:
            dy = workspace("dy", (num_routes, width_out), grad_TO)
            torch.index_select(grad_TO, 0, target_rows, out=dy)
            grad_gate = (saved[:num_routes] * dy).sum(-1, dtype=torch.float32)
            dy.mul_(gate[:, None].to(dy.dtype))
            grad_rows = _outputs(dy, None, call.w_EDO, call, None, transposed=True)
            _bank_gradient(x_UD, source_rows, dy, None, starts_E1, into_EDO)
        else:
            gated = workspace("gated", (num_routes, width_in), x_UD)
            grad_gate, grad_rows = torch.empty_like(gate), x_UD.new_empty(num_routes, width_in)
            epilogue = Epilogue("none", gate, None, gated, x_UD, source_rows, grad_gate)
            _rows_times_bank(
                grad_TO, target_rows, call.w_EDO, starts_E1, grad_rows, epilogue, transposed=True
            )
            _bank_gradient(gated, None, grad_TO, target_rows, starts_E1, into_EDO)
        grad_x = _own(sum_to_sources(grad_rows, call, x_UD.shape[0]), call)
        return RowGradients(grad_x, call.gate_gradient(grad_gate))


def product(rows_NK: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """Returns rows · matrix, or rows · matrixᵀ, (N, C); each row's result is independent of the others."""
    rows_NK, bank = rows_NK.contiguous(), matrix.contiguous()[None]
    out_NC = rows_NK.new_empty(len(rows_NK), bank.shape[1 if transposed else 2])
    starts = _one_expert(rows_NK)
    _rows_times_bank(rows_NK, None, bank, starts, out_NC, Epilogue(), transposed=transposed)
    return out_NC


def product_gradient(a_NK: Tensor, b_NC: Tensor) -> Tensor:
    """Returns aᵀ · b, (K, C)."""
    a_NK, b_NC = a_NK.contiguous(), b_NC.contiguous()
    into = a_NK.new_empty(1, a_NK.shape[1], b_NC.shape[1])
    _bank_gradient(a_NK, None, b_NC, None, _one_expert(a_NK), into, add=False)
    return into[0]


def _one_expert(rows: Tensor) -> Tensor:
    """Returns the row bounds of a bank with one expert."""
    return torch.tensor([0, len(rows)], dtype=torch.int32)


def _rows_times_bank(
    rows: Tensor,
    index_N: Tensor | None,
    bank_EKC: Tensor,
    starts_E1: Tensor,
    out_NC: Tensor,
    epilogue: Epilogue,
    *,
    transposed: bool = False,
) -> None:
    """Computes out[n] = epilogue(rows[index[n]] · bank[e]) for all sorted places n.

    `transposed` uses bank[e]ᵀ.
    """
    num_experts, k, columns = bank_EKC.shape
    k, columns = (columns, k) if transposed else (k, columns)
    e, saved = epilogue, epilogue.saved
    _call(
        "rows_times_bank",
        rows,
        *(rows, rows.stride(0), index_N, bank_EKC, k, columns, transposed, starts_E1, num_experts),
        *(_ACTIVATIONS[e.activation], e.activation in GATES),
        *(e.gate_N, e.bias_EW, e.hidden_NF),
        *(saved, e.saved_rows_N, 0 if saved is None else saved.stride(0), e.grad_gate_N, out_NC),
    )


def _outputs(
    rows: Tensor,
    index_N: Tensor | None,
    bank_EKC: Tensor,
    routes: SortedRoutes,
    gate_N: Tensor | None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Computes gate[n] · rows[index[n]] · bank[e] for all sorted places n, in a workspace."""
    columns = bank_EKC.shape[1 if transposed else 2]
    outputs = workspace("outputs", (routes.num_routes, columns), rows)
    epilogue = Epilogue(gate_N=gate_N)
    starts_E1 = routes.starts_E1
    _rows_times_bank(rows, index_N, bank_EKC, starts_E1, outputs, epilogue, transposed=transposed)
    return outputs


def _bank_gradient(
    a: Tensor,
    a_index_N: Tensor | None,
    b: Tensor,
    b_index_N: Tensor | None,
    starts_E1: Tensor,
    into: Tensor,
    *,
    add: bool = True,
) -> None:
    """Adds Σ a[a_index[n]]ᵀ · b[b_index[n]] over expert e's places n to into[e].

    Without `add`, overwrites into[e].
    """
    _call(
        "bank_gradient",
        a,
        *(a, a.shape[1], a_index_N, b, b.shape[1], b_index_N, starts_E1, into.shape[0], add, into),
    )


def _call(name: str, like: Tensor, *arguments: Tensor | int | None) -> None:
    """Calls a function of the library.

    Raises:
        RuntimeError: torch has no micro-kernel for the product.
    """
    prepare()
    dtype = str(like.dtype).removeprefix("torch.")
    if _loaded().call(f"{name}_{dtype}", *arguments, torch.get_num_threads()):
        raise RuntimeError(
            f"torch has no micro-kernel for a product in {dtype} here; is oneDNN switched off "
            "(torch.backends.mkldnn)? Leave it on, or set kernels.backend=segments"
        )


def _int32(index_N: Tensor) -> Tensor:
    return index_N.to(torch.int32)


def _of_rows(bias_EW: Tensor, routes: SortedRoutes) -> Tensor:
    """Returns the bias of each sorted row's expert, (N, W)."""
    return bias_EW.repeat_interleave(routes.starts_E1.diff(), dim=0, output_size=routes.num_routes)


def _sum_of_experts(rows_NW: Tensor, routes: SortedRoutes) -> Tensor:
    """Sums each expert's rows in order, (E, W)."""
    sums = rows_NW.new_zeros(routes.num_experts, rows_NW.shape[1])
    for expert, (start, end) in enumerate(itertools.pairwise(routes.starts())):
        torch.sum(rows_NW[start:end], 0, out=sums[expert])
    return sums


def _own(summed: Tensor, routes: SortedRoutes) -> Tensor:
    """Copies sums that may be a view of a workspace."""
    return summed.clone() if routes.place_N is None else summed


# torch's micro-kernels ----------------------------------------------------------------------------
# `at::native::cpublas::brgemm` (tested with torch 2.13). oneDNN compiles the micro-kernels at run time
# for the CPU's instruction sets.

# CPU flags that oneDNN's micro-kernels need. Without AVX512_BF16 oneDNN supports bfloat16 on AVX-512,
# but not in these kernels: "could not generate a kernel".
_WANTED = {torch.float32: AVX2, torch.bfloat16: AVX512 | {BFLOAT16}}


def reason_against(dtype: torch.dtype) -> str | None:
    """Returns why this machine cannot run brgemm.cpp in `dtype`, or None; compiles nothing."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in _WANTED:
        return f"it supports float32 and bfloat16, not {name}"
    if not is_x86():
        return f"torch has micro-kernels on x86-64 only, and this CPU is {platform.machine()}"
    if missing := sorted(_WANTED[dtype] - cpu_flags()):
        allowed = os.environ.get("ONEDNN_MAX_CPU_ISA")
        limit = f" (with ONEDNN_MAX_CPU_ISA={allowed})" if allowed else ""
        return f"for {name} this CPU has no {', '.join(missing)}{limit}"
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if not HEADER.exists() or "brgemm_release" not in HEADER.read_text():
        return (
            f"torch {torch.__version__} lacks at::native::cpublas::brgemm in {HEADER}, where the wheel "
            "of 2.13 has it"
        )
    return products().reason_against()


@functools.cache
def _loaded() -> LoadedLibrary:
    return products().load()


@functools.cache
def prepare() -> None:
    """Loads the library, compiling it if needed.

    Raises:
        ValueError: compilation failed (with the compiler's output), or a trial shows that this CPU
            rounds float32 operands.
    """
    _loaded()
    if not (error := relative_error()) < EXACT:
        raise ValueError(
            f"float32 products of torch's micro-kernels have a relative error of {error:.1e} on this CPU, "
            f"above the limit of {EXACT:.0e}: its matrix units round the operands. Set kernels.backend=segments"
        )


def relative_error() -> float:
    """Measures the relative error of float32 micro-kernel products; infinite if there are none."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(77, 412, generator=generator)
    b, out = torch.randn(1, 412, 128, generator=generator), torch.empty(77, 128)
    starts = torch.tensor([0, len(a)], dtype=torch.int32)
    no_epilogue: list[Tensor | int | None] = [0, 0, None, None, None, None, None, 0, None]
    status = _loaded().call(
        "rows_times_bank_float32",
        *(a, 412, None, b, 412, 128, False, starts, 1, *no_epilogue, out, 1),
    )
    expected = a.double() @ b[0].double()
    return float("inf") if status else float((out - expected).norm() / expected.norm())
