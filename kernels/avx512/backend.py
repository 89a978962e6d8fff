"""The expert operations in C++ for CPUs with AVX-512: rows are read through their index, and
nothing is gathered (avx512.cpp).

Float32 everywhere AVX-512 is, bfloat16 where AVX512_BF16 is too. Forward and backward of both
operations are three products of two kinds: rows times a bank's matrices, and a bank's gradient;
ReLU, gate weights and their gradients happen in registers. Other activations and biases are torch
operations on the hidden rows between the products. Outputs of a target row are added in route
order, as in the other backends. Saved for the backward is what segments.py saves.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

import ctypes
import itertools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from ..activations import hidden_and_pullback, hidden_in_place
from ..interface import ROW_SLACK
from ..operands import MLPBank, MLPGradients, SortedRoutes
from ..permute import add_rows
from ..workspace import workspace
from .build import load_library

_PLAIN, _RELU, _GRADIENT, _RELU_GRADIENT = range(4)
_PANEL = 32  # columns


class _Epilogue(ctypes.Structure):
    _fields_ = (
        ("mode", c_int32),
        ("gate", c_void_p),
        ("wide_stride", c_int64),
        ("hidden", c_void_p),
        ("hidden_rows", c_void_p),
        ("hidden_stride", c_int64),
        ("gated", c_void_p),
        ("gate_gradient", c_void_p),
    )


def mlp_forward(x_UD: Tensor, bank: MLPBank, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.mlp_forward`."""
    num_routes = routes.num_routes
    saved = x_UD.new_empty(num_routes + ROW_SLACK, bank.w_up_EDW.shape[2])
    z = saved[:num_routes]
    source_rows, gate = _int32(routes.source_rows()), routes.gates(torch.float32)
    fused = bank.activation == "relu" and bank.b_up_EW is None
    _rows_times_bank(
        x_UD, source_rows, bank.w_up_EDW, routes, z, _Epilogue(mode=_RELU if fused else _PLAIN)
    )
    if bank.b_up_EW is not None:
        z += _of_rows(bank.b_up_EW, routes)
    hidden = z if fused else hidden_in_place(z, bank.activation)
    outputs = _wide_rows_times_bank(hidden, None, bank.w_down_EFO, routes, gate)
    if bank.b_down_EO is not None:
        gate_N1 = gate[:, None].to(outputs.dtype)
        outputs[:, : bank.b_down_EO.shape[1]] += _of_rows(bank.b_down_EO, routes) * gate_N1
    return _sum_to_targets(outputs, bank.w_down_EFO.shape[2], routes), saved


def mlp_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    bank: MLPBank,
    routes: SortedRoutes,
    saved: Tensor,
    into: MLPGradients,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Implements `Backend.mlp_backward`.

    The gate's gradient is taken in the hidden space: h · (dy·Wᵀ).
    """
    num_routes = routes.num_routes
    source_rows, target_rows = _int32(routes.source_rows()), _int32(routes.target_rows())
    gate, saved = routes.gates(torch.float32), saved[:num_routes]
    hidden, pullback = hidden_and_pullback(saved, bank.activation)
    d_hidden, gated = (workspace(name, hidden.shape, x_UD) for name in ("d_hidden", "gated"))
    grad_gate = torch.empty_like(gate)
    mode = _RELU_GRADIENT if bank.activation == "relu" else _GRADIENT
    epilogue = _gradient_epilogue(mode, gate, hidden, None, gated, grad_gate)
    _rows_times_bank(
        grad_TO, target_rows, bank.w_down_EFO, routes, d_hidden, epilogue, transposed=True
    )
    d_z = d_hidden if bank.activation == "relu" else pullback(d_hidden)
    grad_b_up = grad_b_down = None
    if bank.b_down_EO is not None:
        dy = grad_TO.index_select(0, target_rows)
        grad_gate += (dy * _of_rows(bank.b_down_EO, routes)).sum(-1)
        grad_b_down = _sum_of_experts(dy * gate[:, None].to(dy.dtype), bank.b_down_EO, routes)
    if bank.b_up_EW is not None:
        grad_b_up = _sum_of_experts(d_z, bank.b_up_EW, routes)
    _bank_gradient(gated, None, grad_TO, target_rows, routes, into.w_down_EFO)
    _bank_gradient(x_UD, source_rows, d_z, None, routes, into.w_up_EDW)
    grad_rows = _wide_rows_times_bank(d_z, None, bank.w_up_EDW, routes, None, transposed=True)
    grad_x = _sum_to_sources(grad_rows, x_UD.shape[1], routes, x_UD.shape[0])
    return grad_x, _grad_gate(grad_gate, routes), grad_b_up, grad_b_down


def linear_forward(x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_forward`."""
    num_routes, width = routes.num_routes, w_EDO.shape[2]
    source_rows, gate = _int32(routes.source_rows()), routes.gates(torch.float32)
    if width <= w_EDO.shape[1]:
        saved = x_UD.new_empty(num_routes + ROW_SLACK, width)
        _rows_times_bank(
            x_UD, source_rows, w_EDO, routes, saved[:num_routes], _Epilogue(mode=_PLAIN)
        )
        outputs = saved[:num_routes] * gate[:, None].to(x_UD.dtype)
    else:
        saved = x_UD.new_empty(0)
        outputs = _wide_rows_times_bank(x_UD, source_rows, w_EDO, routes, gate)
    return _sum_to_targets(outputs, width, routes), saved


def linear_backward(
    grad_TO: Tensor,
    x_UD: Tensor,
    w_EDO: Tensor,
    routes: SortedRoutes,
    saved: Tensor,
    into_EDO: Tensor,
) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_backward`.

    The gate's gradient is taken on whichever side is narrow.
    """
    num_routes, width = routes.num_routes, x_UD.shape[1]
    source_rows, target_rows = _int32(routes.source_rows()), _int32(routes.target_rows())
    gate = routes.gates(torch.float32)
    if w_EDO.shape[2] <= w_EDO.shape[1]:
        dy = torch.index_select(
            grad_TO, 0, target_rows, out=workspace("dy", (num_routes, grad_TO.shape[1]), grad_TO)
        )
        grad_gate = (saved[:num_routes] * dy).sum(-1, dtype=torch.float32)
        dy.mul_(gate[:, None].to(dy.dtype))
        grad_rows = _wide_rows_times_bank(dy, None, w_EDO, routes, None, transposed=True)
        _bank_gradient(x_UD, source_rows, dy, None, routes, into_EDO)
    else:
        gated, grad_gate = workspace("gated", (num_routes, width), x_UD), torch.empty_like(gate)
        grad_rows = x_UD.new_empty(num_routes, width)
        epilogue = _gradient_epilogue(_GRADIENT, gate, x_UD, source_rows, gated, grad_gate)
        _rows_times_bank(grad_TO, target_rows, w_EDO, routes, grad_rows, epilogue, transposed=True)
        _bank_gradient(gated, None, grad_TO, target_rows, routes, into_EDO)
    grad_x = _sum_to_sources(grad_rows, width, routes, x_UD.shape[0])
    return grad_x, _grad_gate(grad_gate, routes)


def _rows_times_bank(
    rows: Tensor,
    index_N: Tensor | None,
    bank_EKC: Tensor,
    routes: SortedRoutes,
    out_NC: Tensor,
    epilogue: _Epilogue,
    *,
    transposed: bool = False,
) -> None:
    """Computes out[n] = epilogue(rows[index[n]] · bank[e]) for all sorted places n.

    `transposed`: times bank[e]ᵀ.
    """
    num_experts, k, columns = bank_EKC.shape
    k, columns = (columns, k) if transposed else (k, columns)
    _call(
        "rows_times_bank",
        rows,
        rows.data_ptr(),
        rows.stride(0),
        _pointer(index_N),
        bank_EKC.data_ptr(),
        k,
        columns,
        transposed,
        routes.starts_E1.data_ptr(),
        num_experts,
        ctypes.byref(epilogue),
        out_NC.data_ptr(),
    )


def _wide_rows_times_bank(
    rows: Tensor,
    index_N: Tensor | None,
    bank_EKC: Tensor,
    routes: SortedRoutes,
    gate_N: Tensor | None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Computes gate[n] · rows[index[n]] · bank[e] for all sorted places, in a workspace.

    Past the columns is room to a full panel: whole cache lines can be written without being read
    first, and these are the most memory that a call touches.
    """
    columns = bank_EKC.shape[1 if transposed else 2]
    stride = -(-columns // _PANEL) * _PANEL
    outputs = workspace("outputs", (routes.num_routes, stride), rows)
    epilogue = _Epilogue(mode=_PLAIN, gate=_pointer(gate_N), wide_stride=stride)
    _rows_times_bank(rows, index_N, bank_EKC, routes, outputs, epilogue, transposed=transposed)
    return outputs


def _bank_gradient(
    a: Tensor,
    a_index_N: Tensor | None,
    b: Tensor,
    b_index_N: Tensor | None,
    routes: SortedRoutes,
    into: Tensor,
) -> None:
    """Adds Σ a[a_index[n]]ᵀ · b[b_index[n]] over the places n of expert e to into[e]."""
    _call(
        "bank_gradient",
        a,
        a.data_ptr(),
        a.shape[1],
        _pointer(a_index_N),
        b.data_ptr(),
        b.shape[1],
        _pointer(b_index_N),
        routes.starts_E1.data_ptr(),
        into.shape[0],
        into.data_ptr(),
    )


def _call(name: str, like: Tensor, *arguments: object) -> None:
    dtype = str(like.dtype).removeprefix("torch.")
    getattr(load_library(), f"moebius_{name}_{dtype}")(*arguments, torch.get_num_threads())


def _gradient_epilogue(
    mode: int,
    gate: Tensor,
    hidden: Tensor,
    hidden_rows: Tensor | None,
    gated: Tensor,
    grad_gate: Tensor,
) -> _Epilogue:
    return _Epilogue(
        mode=mode,
        gate=gate.data_ptr(),
        hidden=hidden.data_ptr(),
        hidden_rows=_pointer(hidden_rows),
        hidden_stride=hidden.stride(0),
        gated=gated.data_ptr(),
        gate_gradient=grad_gate.data_ptr(),
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _int32(index_N: Tensor) -> Tensor:
    return index_N.to(torch.int32)


def _of_rows(bias_EW: Tensor, routes: SortedRoutes) -> Tensor:
    """Returns (N, W): each sorted row's expert's bias."""
    return bias_EW.repeat_interleave(routes.starts_E1.diff(), dim=0, output_size=routes.num_routes)


def _sum_of_experts(rows_NW: Tensor, bias_EW: Tensor, routes: SortedRoutes) -> Tensor:
    """Adds up each expert's rows in order: (E, W)."""
    sums = torch.zeros_like(bias_EW)
    for expert, (start, end) in enumerate(itertools.pairwise(routes.starts())):
        torch.sum(rows_NW[start:end], 0, out=sums[expert])
    return sums


def _sum_to_targets(rows: Tensor, width: int, routes: SortedRoutes) -> Tensor:
    """Adds up the first `width` columns of every target's rows in route order."""
    summed = add_rows(rows, routes.place_N, routes.target_N, routes.num_targets, routes.per_target)
    return _own(summed[:, :width], routes)


def _sum_to_sources(rows: Tensor, width: int, routes: SortedRoutes, num_sources: int) -> Tensor:
    """Adds up the first `width` columns of every source's rows in route order."""
    summed = add_rows(rows, routes.place_N, routes.source_N, num_sources, routes.per_source)
    return _own(summed[:, :width], routes)


def _own(summed: Tensor, routes: SortedRoutes) -> Tensor:
    """Makes sums contiguous, and a copy where they may be a view of a workspace."""
    if routes.place_N is None:
        return summed.clone(memory_format=torch.contiguous_format)
    return summed.contiguous()


def _grad_gate(grad_gate: Tensor, routes: SortedRoutes) -> Tensor:
    """Returns the gate weights' gradient in route order and in their dtype."""
    return routes.unsorted(grad_gate.to(routes.weight_N.dtype))
