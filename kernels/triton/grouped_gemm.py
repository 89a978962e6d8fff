"""Grouped products over row tiles: each program owns one tile of one expert's rows.

K1  `gathered_*` multiplies rows gathered from (U, D) by W[e], to a narrow side. One column tile holds
    a whole row of F = 128 columns, so the epilogue computes the gate's gradient from registers,
    without atomics. For wider rows each column tile writes a partial sum. There are four epilogues:
    activation, gate, and the two of the backward pass.
K2  `rows_product` multiplies narrow rows by W[e], to wide rows. The narrow tile is read once and
    reused for all column tiles. Outputs are stored in route order, so `sum_rows` (routing.py) reads
    each target's consecutively: deterministic, without atomics.

With F = 128 a product has 128 FLOP per gathered byte, so it is memory-bound on an H200. Rows are read
through pointers (cp.async on the GPU). Widths are compile-time constants. Widths that no tile divides
are masked instead of padded, so there is no packed copy of the weights. Widths that are no multiple
of 16 bytes (412 or 82 columns in bfloat16) are read in narrower copies.

Legend: N routes in sorted order, D, K inner width, W columns of the first bank (F, or 2F if gated), O
output width; tiles ROWS × COLUMNS, DEPTH steps along the inner width.
"""

from ..reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from .guard import tl, triton
from .routing import find_tile, look_up, row_of

_LIMIT, _ALPHA = tl.core.constexpr(SWIGLU_LIMIT), tl.core.constexpr(SWIGLU_ALPHA)


@triton.jit
def smooth(z, ACT: tl.constexpr):
    """Returns value and slope of silu, gelu (with erf), relu2 (squared) or a gate, float32."""
    if ACT == "relu2":
        slope = 2.0 * tl.maximum(z, 0.0)
        value = 0.5 * slope * z
    elif ACT == "silu" or ACT == "swiglu":
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        value = z * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif ACT == "clamped_swiglu":
        gate = tl.where(z > _LIMIT, _LIMIT, z)  # unlike tl.minimum, NaN passes
        sigmoid = 1.0 / (1.0 + tl.exp(gate * -_ALPHA))
        value = gate * sigmoid
        slope = tl.where(z > _LIMIT, 0.0, sigmoid + value * (1.0 - sigmoid) * _ALPHA)
    else:
        cumulative = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        value = z * cumulative
        slope = cumulative + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    return value, slope


@triton.jit
def factor(content, ACT: tl.constexpr):
    """Returns what a gated activation multiplies its gate's value by, float32."""
    content = content.to(tl.float32)
    if ACT == "clamped_swiglu":
        content = tl.where(content > _LIMIT, _LIMIT, tl.where(content < -_LIMIT, -_LIMIT, content))
        content += 1.0
    return content


@triton.jit
def _tile(starts, tile, E: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's expert, how many rows are left of it, its sorted rows, and a mask of them."""
    expert, _, first, end = find_tile(starts, tile, ROWS, E, BINS)
    rows = first + tl.arange(0, ROWS)
    return expert, end - first, rows, rows < end


@triton.jit
def _put(output, bias, gate, out, places, live, cols, expert, OUT: tl.constexpr):
    """Stores gate · (output + bias) in the rows `places`.

    `sum_rows` reads them once: their lines leave the L2 before those of rows that experts share.
    """
    mask = live[:, None] & (cols < OUT)[None, :]
    if bias is not None:
        values = tl.load(bias + expert * OUT + cols, mask=cols < OUT, other=0.0)
        output += values.to(tl.float32)[None, :]
    if gate is not None:
        output *= gate[:, None]
    at = out + places[:, None] * OUT + cols[None, :]
    tl.store(at, output.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _product(
    a,
    a_rows,
    w,
    cols,
    K: tl.constexpr,
    N: tl.constexpr,
    W_K: tl.constexpr,
    W_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes a[a_rows] (ROWS, K) times the columns `cols` of one expert's w (K, N), in float32.

    w's strides determine whether it is transposed.
    """
    depth = tl.arange(0, DEPTH)
    a_at = a + a_rows[:, None] * K + depth[None, :]
    w_at = w + depth[:, None] * W_K + cols[None, :] * W_N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        left = depth < K - k
        a_tile = tl.load(a_at + k, mask=left[None, :], other=0.0)
        w_tile = tl.load(w_at + k * W_K, mask=left[:, None] & (cols < N)[None, :], other=0.0)
        total = tl.dot(a_tile, w_tile, total, input_precision="ieee")
    return total


@triton.jit
def _two_products(
    a,
    a_rows,
    w,
    cols,
    K: tl.constexpr,
    N: tl.constexpr,
    W_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes `_product` with columns `cols` and `cols` + N of w (K, 2N), gathering rows once."""
    depth = tl.arange(0, DEPTH)
    a_at = a + a_rows[:, None] * K + depth[None, :]
    w_at = w + depth[:, None] * W_K + cols[None, :]
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        left = depth < K - k
        w_mask = left[:, None] & (cols < N)[None, :]
        a_tile = tl.load(a_at + k, mask=left[None, :], other=0.0)
        w_tile = tl.load(w_at + k * W_K, mask=w_mask, other=0.0)
        first = tl.dot(a_tile, w_tile, first, input_precision="ieee")
        w_tile = tl.load(w_at + k * W_K + N, mask=w_mask, other=0.0)
        second = tl.dot(a_tile, w_tile, second, input_precision="ieee")
    return first, second


@triton.jit
def gathered_activation(
    x,
    order,
    source,
    w,
    bias,
    saved,
    hidden,
    starts,
    D: tl.constexpr,
    F: tl.constexpr,
    ACT: tl.constexpr,
    PER_SOURCE: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes hidden = a(x[source] · w[e] + bias[e]), (N, F).

    `saved` receives relu's hidden rows (`hidden` is then None), else the rows before the activation.
    """
    GATED: tl.constexpr = ACT == "swiglu" or ACT == "geglu" or ACT == "clamped_swiglu"
    W: tl.constexpr = 2 * F if GATED else F
    TILES: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    dtype: tl.constexpr = saved.dtype.element_ty
    expert, left, rows, live = _tile(starts, tl.program_id(0) // TILES, E, BINS, ROWS)
    if left <= 0:
        return
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    sources = row_of(order, source, rows, live, PER_SOURCE)
    mask = live[:, None] & (cols < F)[None, :]
    saved_at = saved + rows.to(tl.int64)[:, None] * W + cols[None, :]
    w += expert.to(tl.int64) * D * W
    if GATED:
        z, content = _two_products(x, sources, w, cols, D, F, W, ROWS, COLUMNS, DEPTH)
        if bias is not None:
            values = tl.load(bias + expert * W + F + cols, mask=cols < F, other=0.0)
            content += values.to(tl.float32)[None, :]
        content = content.to(dtype)
        tl.store(saved_at + F, content, mask=mask)
    else:
        content = None
        z = _product(x, sources, w, cols, D, F, W, 1, ROWS, COLUMNS, DEPTH)
    if bias is not None:
        values = tl.load(bias + expert * W + cols, mask=cols < F, other=0.0)
        z += values.to(tl.float32)[None, :]
    if ACT == "relu":
        tl.store(saved_at, tl.maximum(z, 0.0).to(dtype), mask=mask)
    else:
        z = z.to(dtype)  # as the backward reads it, so that both compute the same hidden rows
        tl.store(saved_at, z, mask=mask)
        activated, _ = smooth(z.to(tl.float32), ACT)
        if content is not None:
            activated *= factor(content, ACT)
        at = hidden + rows.to(tl.int64)[:, None] * F + cols[None, :]
        tl.store(at, activated.to(dtype), mask=mask)


@triton.jit
def gathered_gate(
    x,
    order,
    source,
    w,
    gates,
    saved,
    out,
    starts,
    D: tl.constexpr,
    OUT: tl.constexpr,
    PER_SOURCE: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes saved = x[source] · w[e], (N, O) in sorted order, and out[order] = gate · saved."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    expert, left, rows, live = _tile(starts, tl.program_id(0) // TILES, E, BINS, ROWS)
    if left <= 0:
        return
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    sources = row_of(order, source, rows, live, PER_SOURCE)
    w += expert.to(tl.int64) * D * OUT
    output = _product(x, sources, w, cols, D, OUT, OUT, 1, ROWS, COLUMNS, DEPTH)
    mask = live[:, None] & (cols < OUT)[None, :]
    saved_at = saved + rows.to(tl.int64)[:, None] * OUT + cols[None, :]
    tl.store(saved_at, output.to(saved.dtype.element_ty), mask=mask)
    places = look_up(order, rows, live).to(tl.int64)
    gate = tl.load(gates + places, mask=live, other=0.0).to(tl.float32)
    _put(output, None, gate, out, places, live, cols, expert, OUT)


@triton.jit
def _bias_products(a, a_rows, bias, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Multiplies gathered rows by one expert's bias (K,), returns (ROWS,)."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS,), tl.float32)
    for k in range(0, K, DEPTH):
        left = depth < K - k
        a_at = a + a_rows[:, None] * K + depth[None, :] + k
        a_tile = tl.load(a_at, mask=left[None, :], other=0.0).to(tl.float32)
        values = tl.load(bias + depth + k, mask=left, other=0.0).to(tl.float32)
        total += tl.sum(a_tile * values[None, :], 1)
    return total


@triton.jit
def gathered_hidden_gradient(
    grad,
    order,
    target,
    w,
    bias,
    saved,
    gates,
    d_z,
    grad_gate,
    starts,
    num_routes,
    OUT: tl.constexpr,
    F: tl.constexpr,
    ACT: tl.constexpr,
    PER_TARGET: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes a perceptron's d_h = grad[target] · w_down[e]ᵀ, its d_z, and the gate's gradient.

    d_z is the gradient of z given gate · d_h. The gate's gradient is Σ h · d_h, plus the bias's part.
    `grad_gate` (column tiles, N) receives a partial sum per column tile, in route order.
    """
    GATED: tl.constexpr = ACT == "swiglu" or ACT == "geglu" or ACT == "clamped_swiglu"
    W: tl.constexpr = 2 * F if GATED else F
    TILES: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    dtype: tl.constexpr = d_z.dtype.element_ty
    expert, left, rows, live = _tile(starts, tl.program_id(0) // TILES, E, BINS, ROWS)
    if left <= 0:
        return
    column_tile = tl.program_id(0) % TILES
    grad_gate += column_tile.to(tl.int64) * num_routes
    cols = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    targets = row_of(order, target, rows, live, PER_TARGET)
    w += expert.to(tl.int64) * F * OUT
    d_hidden = _product(grad, targets, w, cols, OUT, F, 1, OUT, ROWS, COLUMNS, DEPTH)
    mask = live[:, None] & (cols < F)[None, :]
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    places = look_up(order, rows, live)
    gate = tl.load(gates + places, mask=live, other=0.0).to(tl.float32)
    z = tl.load(saved + at, mask=mask, other=0.0).to(tl.float32)
    if ACT == "relu":
        d_gate = tl.sum(z * d_hidden, 1)
        tl.store(d_z + at, tl.where(z > 0, gate[:, None] * d_hidden, 0.0).to(dtype), mask=mask)
    else:
        value, slope = smooth(z, ACT)
        if GATED:
            content = tl.load(saved + at + F, mask=mask, other=0.0).to(tl.float32)
            d_gate = tl.sum(value * factor(content, ACT) * d_hidden, 1)
            d_content = gate[:, None] * d_hidden * value
            if ACT == "clamped_swiglu":
                d_content = tl.where(tl.abs(content) > _LIMIT, 0.0, d_content)
            tl.store(d_z + at + F, d_content.to(dtype), mask=mask)
            slope *= factor(content, ACT)
        else:
            d_gate = tl.sum(value * d_hidden, 1)
        tl.store(d_z + at, (gate[:, None] * d_hidden * slope).to(dtype), mask=mask)
    if bias is not None and column_tile == 0:
        d_gate += _bias_products(grad, targets, bias + expert.to(tl.int64) * OUT, OUT, ROWS, DEPTH)
    tl.store(grad_gate + places, d_gate, mask=live)


@triton.jit
def gathered_input_gradient(
    grad,
    order,
    target,
    w,
    x,
    source,
    gates,
    out,
    grad_gate,
    starts,
    num_routes,
    OUT: tl.constexpr,
    D: tl.constexpr,
    PER_SOURCE: tl.constexpr,
    PER_TARGET: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes d_x = grad[target] · w[e]ᵀ for a matrix with a narrow input.

    The gate's gradient is Σ x · d_x, and out[order] = gate · d_x.
    """
    TILES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    expert, left, rows, live = _tile(starts, tl.program_id(0) // TILES, E, BINS, ROWS)
    if left <= 0:
        return
    column_tile = tl.program_id(0) % TILES
    grad_gate += column_tile.to(tl.int64) * num_routes
    cols = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    targets = row_of(order, target, rows, live, PER_TARGET)
    w += expert.to(tl.int64) * D * OUT
    d_x = _product(grad, targets, w, cols, OUT, D, 1, OUT, ROWS, COLUMNS, DEPTH)
    mask = live[:, None] & (cols < D)[None, :]
    sources = row_of(order, source, rows, live, PER_SOURCE)
    inputs = tl.load(x + sources[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    places = look_up(order, rows, live).to(tl.int64)
    tl.store(grad_gate + places, tl.sum(inputs * d_x, 1), mask=live)
    gate = tl.load(gates + places, mask=live, other=0.0).to(tl.float32)
    _put(d_x, None, gate, out, places, live, cols, expert, D)


@triton.jit
def rows_product(
    a,
    order,
    index,
    w,
    bias,
    gates,
    out,
    saved,
    grad_gate,
    starts,
    K: tl.constexpr,
    OUT: tl.constexpr,
    PER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes out[order] = gate · (a · w[e] + bias[e]), (…, O), with the rows of a by `index` or PER.

    `w` is (E, K, O), or (E, O, K) if TRANSPOSED. With `saved` (N, K) in sorted order, also computes
    grad_gate[order] = Σ saved · a.
    """
    W_K: tl.constexpr = 1 if TRANSPOSED else OUT
    W_N: tl.constexpr = K if TRANSPOSED else 1
    expert, left, rows, live = _tile(starts, tl.program_id(0), E, BINS, ROWS)
    if left <= 0:
        return
    sources = row_of(order, index, rows, live, PER)
    places = look_up(order, rows, live).to(tl.int64)
    gate = None
    if gates is not None:
        gate = tl.load(gates + places, mask=live, other=0.0).to(tl.float32)
    w += expert.to(tl.int64) * K * OUT
    depth = tl.arange(0, DEPTH)
    if saved is not None:
        d_gate = tl.zeros((ROWS,), tl.float32)
        for k in range(0, K, DEPTH):
            mask = live[:, None] & (depth < K - k)[None, :]
            outputs = tl.load(
                saved + rows.to(tl.int64)[:, None] * K + depth[None, :] + k, mask=mask, other=0.0
            )
            grads = tl.load(a + sources[:, None] * K + depth[None, :] + k, mask=mask, other=0.0)
            d_gate += tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
        tl.store(grad_gate + places, d_gate, mask=live)
    if K <= DEPTH:
        a_tile = tl.load(
            a + sources[:, None] * K + depth[None, :], mask=(depth < K)[None, :], other=0.0
        )
        for n in range(0, OUT, COLUMNS):
            cols = n + tl.arange(0, COLUMNS)
            w_mask = (depth < K)[:, None] & (cols < OUT)[None, :]
            w_tile = tl.load(w + depth[:, None] * W_K + cols[None, :] * W_N, mask=w_mask, other=0.0)
            output = tl.dot(a_tile, w_tile, input_precision="ieee")
            _put(output, bias, gate, out, places, live, cols, expert, OUT)
    else:
        for n in range(0, OUT, COLUMNS):
            cols = n + tl.arange(0, COLUMNS)
            output = _product(a, sources, w, cols, K, OUT, W_K, W_N, ROWS, COLUMNS, DEPTH)
            _put(output, bias, gate, out, places, live, cols, expert, OUT)
