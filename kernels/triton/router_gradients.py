"""The router's backward pass: the gradient g of the logits and its two products, on tensor cores.

  1. `logit_gradient` adds the gradients through the gates and through the sums of softmax(logits) (of a
     balancing loss) to the logits' own. It writes g as two bfloat16 numbers, h and l, zero-padded to
     whole tiles. The same launch splits the weights again, because its tiles are others than the
     forward's.
  2. `row_gradient` computes grad_x = g W.
  3. `weight_gradient` computes gᵀ x as xᵀ g. x is split in registers, and only a product's first
     operand can come from there. The result has few tiles, so several programs share the rows of each.
     Their float32 sums are added in order, those of all calls at the end of a pass (gradients.py).

Products are three bfloat16 products (bf16x3), as exact as in router.py: given g in float32, the error
of a gradient is below `router.BOUND` · Σ|g·w|, or Σ|g·x|, plus the rounding of a float32 sum. There
are no atomics, and a row has each expert at most once, so gradients are deterministic.

An infinity in g, x or the weights, or a number beyond bfloat16's greatest (3.39 · 10³⁸), becomes NaN
in its sums, where float32 might keep the infinity. A NaN in g stays within its row of grad_x and its
expert's row of grad_W.

Legend: B sequences, T rows, D width, R routers, H heads of a router, A experts of a head, E = R·H·A
experts, K experts chosen, G (DEEP) padded columns of g, W (WIDTH) padded columns of the weights, S
parts of the rows. A line is one head of one row.
"""

# Launches know at compile time which gradients there are.
# pyright: reportPossiblyUnboundVariable=false

from torch import Tensor

from .guard import INTERPRETED, cdiv, launch, next_power_of_2, tl, triton
from .router import new_parts, round_to_bfloat16, split_block
from .tiles import Tile, round_up, router_gradient_tiles, rows_of_part, target, tiles_of_weights

_ELEMENTS = 2048  # of a program of `logit_gradient`
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit
def _store_split(out, low, at, value, mask, EMULATED: tl.constexpr):
    """Writes h of float32 numbers, and l at the offset `low` from it."""
    high = round_to_bfloat16(value, EMULATED)
    tl.store(out + at, high, mask=mask)
    rest = round_to_bfloat16(value - high.to(tl.float32), EMULATED)
    tl.store(out + low + at, rest, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "rows_each"])
def logit_gradient(
    grad_logits,
    grad_gates,
    grad_sums,
    gates,
    experts,
    logits,
    out,
    weight,
    parts,
    num_rows,
    num_blocks,
    rows_each,
    D: tl.constexpr,
    ROUTERS: tl.constexpr,
    HEADS: tl.constexpr,
    A: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    DEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Writes h and l of the logits' gradient, (2, T, DEEP), for a block of lines.

    HEADS are those of all routers; `rows_each` rows are a sequence, of which `grad_sums` has a row.
    Programs from `num_blocks` on write the weights' h and l, (2, DEEP, WIDTH).
    """
    E: tl.constexpr = HEADS * A
    H: tl.constexpr = HEADS // ROUTERS
    block = tl.program_id(0)
    if parts is not None:  # noqa: SIM102 - only the first condition is known at compile time
        if block >= num_blocks:
            split_block(weight, parts, block - num_blocks, E, D, DEEP, WIDTH, BLOCK, EMULATED)
            return
    line = block * LINES + tl.arange(0, LINES)
    live = line < num_rows * HEADS
    cols = tl.arange(0, COLUMNS)
    mask = live[:, None] & (cols < A)[None, :]
    line_at = line.to(tl.int64)[:, None] * A
    out_at = (line // HEADS).to(tl.int64)[:, None] * DEEP + (line % HEADS)[:, None] * A
    low = tl.cast(num_rows, tl.int64) * DEEP
    grad = tl.zeros((LINES, COLUMNS), tl.float32)
    if grad_logits is not None:
        grad = tl.load(grad_logits + line_at + cols[None, :], mask=mask, other=0.0)
    if grad_gates is not None:
        slots = tl.arange(0, SLOTS)
        slot_mask = live[:, None] & (slots < K)[None, :]
        router = line % HEADS // H
        at = router.to(tl.int64) * num_rows * (H * K)
        at += (line // HEADS * H + line % H).to(tl.int64) * K
        at = at[:, None] + slots[None, :]
        gate = tl.load(gates + at, mask=slot_mask, other=0.0)
        chosen = tl.load(grad_gates + at, mask=slot_mask, other=0.0) * gate
        if GATE == "sigmoid":
            chosen *= 1.0 - gate
        else:
            shared = tl.sum(chosen, 1)[:, None]
            chosen -= gate * shared
    if grad_sums is not None or (grad_gates is not None and GATE == "softmax"):
        share = tl.load(logits + line_at + cols[None, :], mask=mask, other=float("-inf"))
        most = tl.max(share, 1)[:, None]
        share = tl.exp(share - most)
        total = tl.sum(share, 1)[:, None]
        share = share / total
        if grad_gates is not None and GATE == "softmax":
            grad -= share * shared
    if grad_sums is not None:
        grad_sums += (line // HEADS // rows_each * E + line % HEADS * A)[:, None]
        pull = tl.load(grad_sums + cols[None, :], mask=mask, other=0.0)
        mean = tl.sum(share * pull, 1)[:, None]
        grad += share * (pull - mean)
    if grad_gates is not None:
        place = tl.load(experts + at, mask=slot_mask, other=0) - (line % H)[:, None] * A
        if grad_sums is not None:
            own = tl.load(logits + line_at + place, mask=slot_mask, other=float("-inf"))
            pull = tl.load(grad_sums + place, mask=slot_mask, other=0.0)
            chosen += tl.exp(own - most) / total * (pull - mean)
        if grad_logits is not None:
            chosen += tl.load(grad_logits + line_at + place, mask=slot_mask, other=0.0)
        _store_split(out, low, out_at + cols[None, :], grad, mask, EMULATED)
        tl.debug_barrier()  # the chosen entries overwrite other threads' stores
        _store_split(out, low, out_at + place, chosen, slot_mask, EMULATED)
    else:
        _store_split(out, low, out_at + cols[None, :], grad, mask, EMULATED)
    if PADDING:
        pad = tl.arange(0, PADDING)
        padded = (live & (line % HEADS == 0))[:, None] & (pad < DEEP - E)[None, :]
        zeros = tl.zeros((LINES, PADDING), tl.float32)
        _store_split(out, low, out_at + E + pad[None, :], zeros, padded, EMULATED)


@triton.jit(do_not_specialize=["num_rows"])
def row_gradient(
    g,
    parts,
    out,
    num_rows,
    D: tl.constexpr,
    DEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes a tile of g W, (ROWS, COLUMNS) float32, in three products, the small ones first."""
    TILES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // TILES * ROWS
    num_left = tl.minimum(ROWS, num_rows - first)
    low = tl.cast(num_rows, tl.int64) * DEEP
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    cols = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    g += first.to(tl.int64) * DEEP
    g_at = g + tl.minimum(row, num_left - 1)[:, None] * DEEP + depth[None, :]
    w_at = parts + depth[:, None] * WIDTH + cols[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, DEEP, DEPTH):
        g_high, g_low = tl.load(g_at + k), tl.load(g_at + low + k)
        w_high, w_low = tl.load(w_at + k * WIDTH), tl.load(w_at + (DEEP + k) * WIDTH)
        total = tl.dot(g_low, w_high, total, input_precision="ieee")
        total = tl.dot(g_high, w_low, total, input_precision="ieee")
        total = tl.dot(g_high, w_high, total, input_precision="ieee")
    out += first.to(tl.int64) * D
    mask = (row < num_left)[:, None] & (cols < D)[None, :]
    tl.store(out + row[:, None] * D + cols[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def weight_gradient(
    g,
    x,
    out,
    num_rows,
    rows_each,
    E: tl.constexpr,
    D: tl.constexpr,
    DEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Computes a tile of xᵀ g over a part of the rows and stores it transposed, (parts, E, D).

    ROWS are channels here, and COLUMNS experts.
    """
    TILES_E: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (D + ROWS - 1) // ROWS * TILES_E
    part, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    channel = tile // TILES_E * ROWS + tl.arange(0, ROWS)
    expert = tile % TILES_E * COLUMNS + tl.arange(0, COLUMNS)
    first = part * rows_each
    num_left = tl.minimum(rows_each, num_rows - first)
    low = tl.cast(num_rows, tl.int64) * DEEP
    depth = tl.arange(0, DEPTH)
    x_at = x + (first + depth).to(tl.int64)[:, None] * D + channel[None, :]
    g_at = g + (first + depth).to(tl.int64)[:, None] * DEEP + expert[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, num_left, DEPTH):
        live = (depth < num_left - k)[:, None]
        rows = tl.load(x_at, mask=live & (channel < D)[None, :], other=0.0)
        g_mask = live & (expert < DEEP)[None, :]
        g_high = tl.load(g_at, mask=g_mask, other=0.0)
        g_low = tl.load(g_at + low, mask=g_mask, other=0.0)
        x_high = round_to_bfloat16(rows, EMULATED)
        x_low = round_to_bfloat16(rows - x_high.to(tl.float32), EMULATED)
        total = tl.dot(tl.trans(x_low), g_high, total, input_precision="ieee")
        total = tl.dot(tl.trans(x_high), g_low, total, input_precision="ieee")
        total = tl.dot(tl.trans(x_high), g_high, total, input_precision="ieee")
        x_at += DEPTH * D
        g_at += DEPTH * DEEP
    out += part.to(tl.int64) * (E * D)
    mask = (channel < D)[:, None] & (expert < E)[None, :]
    tl.store(out + expert[None, :] * D + channel[:, None], total, mask=mask)


def route_top_k_backward(
    x_TD: Tensor,
    weight_ED: Tensor,
    made: tuple[Tensor, Tensor, Tensor | None],
    grads: Grads,
    *,
    gate: str,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the requested gradients of x, and of the weights in parts, (S, E, D).

    All tensors are contiguous float32 except the experts.

    Args:
        x_TD, weight_ED: the forward's inputs.
        made: the forward's outputs: experts (T, H, K) or (R, T, H, K) int64, gates, and logits (T, E),
            which only the gate "softmax" and the sums' gradient read.
        grads: of the logits (T, E), of the gates, and of the sums (B, E); not all of them are None.
        gate: as in `kernels.fused.router.route_top_k`.
        wants: whether to compute the gradients of x and of the weights.
    """
    num_rows, num_experts = len(x_TD), len(weight_ED)
    if not num_rows:
        return x_TD.new_empty(x_TD.shape), weight_ED.new_zeros(1, *weight_ED.shape)
    of_rows, of_weights = _tiles(num_rows, *weight_ED.shape)
    deep = round_up(num_experts, of_rows.depth)
    parts_2GW = None
    if wants[0]:
        parts_2GW = new_parts(x_TD, deep, round_up(x_TD.shape[1], of_rows.columns))
    g_2TG = _logit_gradient(weight_ED, parts_2GW, made, grads, deep=deep, gate=gate)
    return (
        None if parts_2GW is None else _row_gradient(g_2TG, parts_2GW, x_TD, of_rows),
        _weight_gradient(g_2TG, x_TD, weight_ED, of_weights) if wants[1] else None,
    )


def num_parts(num_rows: int, weight_ED: Tensor) -> int:
    """Returns S."""
    num_experts, width = weight_ED.shape
    _, tile = _tiles(num_rows, num_experts, width)
    return max(1, cdiv(num_rows, rows_of_part(num_rows, num_experts, width, tile)))


def _logit_gradient(
    weight_ED: Tensor,
    parts_2GW: Tensor | None,
    made: tuple[Tensor, Tensor, Tensor | None],
    grads: Grads,
    *,
    deep: int,
    gate: str,
) -> Tensor:
    """Returns h and l of the logits' gradient, (2, T, G), and fills `parts_2GW`."""
    experts, gates, logits_TE = made
    grad_TE, grad_gates, grad_BE = grads
    routers, num_rows, heads, top_k = (
        experts.shape[-4:] if experts.ndim == 4 else (1, *experts.shape)
    )
    heads *= routers
    num_experts, width = weight_ED.shape
    g_2TG = new_parts(gates, num_rows, deep)
    columns = next_power_of_2(num_experts // heads)
    lines = max(1, _ELEMENTS // columns)
    blocks = cdiv(num_rows * heads, lines)
    split = 0 if parts_2GW is None else cdiv(parts_2GW[0].numel(), _ELEMENTS)
    launch(
        logit_gradient,
        blocks + split,
        grad_TE,
        grad_gates,
        grad_BE,
        gates,
        experts,
        logits_TE if gate == "softmax" or grad_BE is not None else None,
        g_2TG,
        weight_ED,
        parts_2GW,
        num_rows,
        blocks,
        1 if grad_BE is None else num_rows // len(grad_BE),
        D=width,
        ROUTERS=routers,
        HEADS=heads,
        A=num_experts // heads,
        K=top_k,
        GATE=gate,
        DEEP=deep,
        WIDTH=0 if parts_2GW is None else parts_2GW.shape[2],
        LINES=lines,
        COLUMNS=columns,
        SLOTS=next_power_of_2(top_k),
        PADDING=next_power_of_2(deep - num_experts) if deep > num_experts else 0,
        BLOCK=_ELEMENTS,
        EMULATED=INTERPRETED,
    )
    return g_2TG


def _row_gradient(g_2TG: Tensor, parts_2GW: Tensor, x_TD: Tensor, tile: Tile) -> Tensor:
    grad_TD = x_TD.new_empty(x_TD.shape)
    num_rows, width = x_TD.shape
    launch(
        row_gradient,
        cdiv(num_rows, tile.rows) * cdiv(width, tile.columns),
        g_2TG,
        parts_2GW,
        grad_TD,
        num_rows,
        D=width,
        DEEP=g_2TG.shape[2],
        WIDTH=parts_2GW.shape[2],
        **tile.options(),
    )
    return grad_TD


def _weight_gradient(g_2TG: Tensor, x_TD: Tensor, weight_ED: Tensor, tile: Tile) -> Tensor:
    num_experts, width = weight_ED.shape
    parts_SED = weight_ED.new_empty(num_parts(len(x_TD), weight_ED), num_experts, width)
    launch(
        weight_gradient,
        len(parts_SED) * tiles_of_weights(num_experts, width, tile),
        g_2TG,
        x_TD,
        parts_SED,
        len(x_TD),
        rows_of_part(len(x_TD), num_experts, width, tile),
        E=num_experts,
        D=width,
        DEEP=g_2TG.shape[2],
        EMULATED=INTERPRETED,
        **tile.options(),
    )
    return parts_SED


def _tiles(num_rows: int, num_experts: int, width: int) -> tuple[Tile, Tile]:
    """Returns the tiles for grad_x and for the weights' gradient."""
    if INTERPRETED:
        return Tile(16, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1)
    return router_gradient_tiles(target(), num_rows, num_experts, width)
