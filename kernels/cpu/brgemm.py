"""The expert operations in C++ around torch's own micro-kernels for CPUs (brgemm.cpp), which torch
has from oneDNN: for AVX2, AVX-512 and AMX.

Forward and backward of both operations are three products of two kinds: rows times a bank's
matrices, and a bank's gradient; gathering, ReLU, gate weights and their gradients happen block by
block beside the products. Other activations and biases are torch operations on the hidden rows
between the products. Outputs of a target row are added in route order, as in the other backends.
Saved for the backward is what segments.py saves.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F or 2F), O output width.
"""

import ctypes
import itertools

import torch
from torch import Tensor

from ..activations import hidden_and_pullback, hidden_in_place
from ..calls import MLPBank, MLPGradients, SortedRoutes
from ..interface import ROW_SLACK
from ..permute import add_rows
from .library import Epilogue, load_library
from .workspace import workspace

_PLAIN, _RELU, _GRADIENT, _RELU_GRADIENT = range(4)


def mlp_forward(x_UD: Tensor, bank: MLPBank, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.mlp_forward`."""
    num_routes = routes.num_routes
    saved = x_UD.new_empty(num_routes + ROW_SLACK, bank.w_up_EDW.shape[2])
    z = saved[:num_routes]
    source_rows, gate = _int32(routes.source_rows()), routes.gates(torch.float32)
    fused = bank.activation == "relu" and bank.b_up_EW is None
    _rows_times_bank(
        x_UD,
        source_rows,
        bank.w_up_EDW,
        routes.starts_E1,
        z,
        Epilogue(mode=_RELU if fused else _PLAIN),
    )
    if bank.b_up_EW is not None:
        z += _of_rows(bank.b_up_EW, routes)
    hidden = z if fused else hidden_in_place(z, bank.activation)
    outputs = _outputs(hidden, None, bank.w_down_EFO, routes, gate)
    if bank.b_down_EO is not None:
        gate_N1 = gate[:, None].to(outputs.dtype)
        outputs += _of_rows(bank.b_down_EO, routes) * gate_N1
    return _sum_to_targets(outputs, routes), saved


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
        grad_TO, target_rows, bank.w_down_EFO, routes.starts_E1, d_hidden, epilogue, transposed=True
    )
    d_z = d_hidden if bank.activation == "relu" else pullback(d_hidden)
    grad_b_up = grad_b_down = None
    if bank.b_down_EO is not None:
        dy = grad_TO.index_select(0, target_rows)
        grad_gate += (dy * _of_rows(bank.b_down_EO, routes)).sum(-1)
        grad_b_down = _sum_of_experts(dy * gate[:, None].to(dy.dtype), bank.b_down_EO, routes)
    if bank.b_up_EW is not None:
        grad_b_up = _sum_of_experts(d_z, bank.b_up_EW, routes)
    add = not into.are_new
    _bank_gradient(gated, None, grad_TO, target_rows, routes.starts_E1, into.w_down_EFO, add=add)
    _bank_gradient(x_UD, source_rows, d_z, None, routes.starts_E1, into.w_up_EDW, add=add)
    grad_rows = _outputs(d_z, None, bank.w_up_EDW, routes, None, transposed=True)
    grad_x = _sum_to_sources(grad_rows, routes, x_UD.shape[0])
    return grad_x, _grad_gate(grad_gate, routes), grad_b_up, grad_b_down


def linear_forward(x_UD: Tensor, w_EDO: Tensor, routes: SortedRoutes) -> tuple[Tensor, Tensor]:
    """Implements `Backend.linear_forward`."""
    num_routes, width = routes.num_routes, w_EDO.shape[2]
    source_rows, gate = _int32(routes.source_rows()), routes.gates(torch.float32)
    if width <= w_EDO.shape[1]:
        saved = x_UD.new_empty(num_routes + ROW_SLACK, width)
        _rows_times_bank(
            x_UD, source_rows, w_EDO, routes.starts_E1, saved[:num_routes], Epilogue(mode=_PLAIN)
        )
        outputs = saved[:num_routes] * gate[:, None].to(x_UD.dtype)
    else:
        saved = x_UD.new_empty(0)
        outputs = _outputs(x_UD, source_rows, w_EDO, routes, gate)
    return _sum_to_targets(outputs, routes), saved


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
        grad_rows = _outputs(dy, None, w_EDO, routes, None, transposed=True)
        _bank_gradient(x_UD, source_rows, dy, None, routes.starts_E1, into_EDO)
    else:
        gated, grad_gate = workspace("gated", (num_routes, width), x_UD), torch.empty_like(gate)
        grad_rows = x_UD.new_empty(num_routes, width)
        epilogue = _gradient_epilogue(_GRADIENT, gate, x_UD, source_rows, gated, grad_gate)
        _rows_times_bank(
            grad_TO, target_rows, w_EDO, routes.starts_E1, grad_rows, epilogue, transposed=True
        )
        _bank_gradient(gated, None, grad_TO, target_rows, routes.starts_E1, into_EDO)
    grad_x = _sum_to_sources(grad_rows, routes, x_UD.shape[0])
    return grad_x, _grad_gate(grad_gate, routes)


def product(rows_NK: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """Returns rows · matrix, or rows · matrixᵀ, (N, C): a row's result depends on no other row."""
    rows_NK, bank = rows_NK.contiguous(), matrix.contiguous()[None]
    out_NC = rows_NK.new_empty(len(rows_NK), bank.shape[1 if transposed else 2])
    starts, plain = _one_expert(rows_NK), Epilogue(mode=_PLAIN)
    _rows_times_bank(rows_NK, None, bank, starts, out_NC, plain, transposed=transposed)
    return out_NC


def product_gradient(a_NK: Tensor, b_NC: Tensor) -> Tensor:
    """Returns aᵀ · b, (K, C)."""
    a_NK, b_NC = a_NK.contiguous(), b_NC.contiguous()
    into = a_NK.new_empty(1, a_NK.shape[1], b_NC.shape[1])
    _bank_gradient(a_NK, None, b_NC, None, _one_expert(a_NK), into, add=False)
    return into[0]


def _one_expert(rows: Tensor) -> Tensor:
    """Returns where the rows of a bank of one expert start and end."""
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
        starts_E1.data_ptr(),
        num_experts,
        ctypes.byref(epilogue),
        out_NC.data_ptr(),
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
    """Computes gate[n] · rows[index[n]] · bank[e] for all sorted places, in a workspace."""
    columns = bank_EKC.shape[1 if transposed else 2]
    outputs = workspace("outputs", (routes.num_routes, columns), rows)
    epilogue = Epilogue(mode=_PLAIN, gate=_pointer(gate_N))
    _rows_times_bank(
        rows, index_N, bank_EKC, routes.starts_E1, outputs, epilogue, transposed=transposed
    )
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
    """Adds Σ a[a_index[n]]ᵀ · b[b_index[n]] over the places n of expert e to into[e].

    Without `add` it is written there instead, whatever there was.
    """
    _call(
        "bank_gradient",
        a,
        a.data_ptr(),
        a.shape[1],
        _pointer(a_index_N),
        b.data_ptr(),
        b.shape[1],
        _pointer(b_index_N),
        starts_E1.data_ptr(),
        into.shape[0],
        add,
        into.data_ptr(),
    )


def _call(name: str, like: Tensor, *arguments: object) -> None:
    """Calls a function of the library.

    Raises:
        RuntimeError: torch gave no micro-kernel.
    """
    dtype = str(like.dtype).removeprefix("torch.")
    function = getattr(load_library(), f"moebius_{name}_{dtype}")
    if function(*arguments, torch.get_num_threads()):
        raise RuntimeError(
            f"torch has no micro-kernel for a product in {dtype} here; is oneDNN switched off "
            "(torch.backends.mkldnn)? Leave it on, or set kernels.backend=segments"
        )


def _gradient_epilogue(
    mode: int,
    gate: Tensor,
    hidden: Tensor,
    hidden_rows: Tensor | None,
    gated: Tensor,
    grad_gate: Tensor,
) -> Epilogue:
    return Epilogue(
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


def _sum_to_targets(rows: Tensor, routes: SortedRoutes) -> Tensor:
    """Adds up every target's rows in route order."""
    summed = add_rows(rows, routes.place_N, routes.target_N, routes.num_targets, routes.per_target)
    return _own(summed, routes)


def _sum_to_sources(rows: Tensor, routes: SortedRoutes, num_sources: int) -> Tensor:
    """Adds up every source's rows in route order."""
    summed = add_rows(rows, routes.place_N, routes.source_N, num_sources, routes.per_source)
    return _own(summed, routes)


def _own(summed: Tensor, routes: SortedRoutes) -> Tensor:
    """Makes a copy of sums that may be a view of a workspace."""
    return summed.clone() if routes.place_N is None else summed


def _grad_gate(grad_gate: Tensor, routes: SortedRoutes) -> Tensor:
    """Returns the gate weights' gradient in route order and in their dtype."""
    return routes.unsorted(grad_gate.to(routes.weight_N.dtype))
