"""The router in one kernel: logits on tensor cores, top-k, gates.

A program owns a block of rows. It computes the logits tile by tile, stores them, synchronises its
warps, and reads whole rows back from the cache to select from. Selection needs complete rows, and the
logits of 565 experts do not fit in registers. For a balancing loss it then sums softmax(logits) over
its rows.

Each float32 product is three bfloat16 products (bf16x3). x is split into h = bfloat16(x) and
l = bfloat16(x − h), and so is w:

    x·w  ≈  l_x·h_w + h_x·l_w + h_x·h_w          (summed in float32)

bfloat16 has 8 bits, so |x − h| ≤ 2⁻⁸|x| and |x − h − l| ≤ 2⁻¹⁶|x|. The omitted terms are both
remainders and l_x·l_w, each at most about 2⁻¹⁶|x·w|: together less than 3.01 · 2⁻¹⁶|x·w|. A logit's
error is therefore below `BOUND` · Σ|x·w|, plus the rounding of a float32 sum. On random rows, where
the signs of remainders vary, it is about 2⁻¹⁷ · √Σ(x·w)². TensorFloat-32 in three products would have
2⁻²⁰ instead of 2⁻¹⁴, in twice the time. The split is explicit because `tl.dot`'s names for it differ
between chips and releases, and the interpreter supports none. (Method: Henry, Tang and Heinecke,
"Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations",
arXiv 1904.06376.) A row with an infinity yields NaN where float32 would keep the infinity.

Ties select the lowest expert. NaN is greater than any number, as in `torch.topk`.

Routers that read the same rows are one call on their concatenated weights: heads of all of them are
neighbours in logits and sums, but experts and gates are one list per router.

Legend: B sequences, T rows, D width, R routers, H heads of a router, A experts of a head, E = R·H·A
experts, K experts chosen.
"""

from functools import partial

import torch
from torch import Tensor

from ..gradients import once_per_pass
from .guard import INTERPRETED, cdiv, launch, next_power_of_2, tl, triton
from .tiles import Tile, round_up, router_tile, target

BOUND = 2.0**-14  # largest error of a logit, times Σ|x·w|
_SELECTED = 1024  # logits that a warp selects from at a time
_SPLIT = 1024


@triton.jit
def round_to_bfloat16(x, EMULATED: tl.constexpr):
    """Rounds float32 to bfloat16, to nearest, ties to even.

    The interpreter's bfloat16 rounding and products are wrong. There the result stays float32, whose
    products of such numbers are exact, like a tensor core's.
    """
    if EMULATED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def split_block(
    w,
    parts,
    block,
    E: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Writes a block of the weights' h and l, (2, ROWS, WIDTH), zero in padding rows and columns."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert, channel = at // WIDTH, at % WIDTH
    mask = (expert < E) & (channel < D)
    value = tl.load(w + expert * D + channel, mask=mask, other=0.0)
    high = round_to_bfloat16(value, EMULATED)
    tl.store(parts + at, high, mask=expert < ROWS)
    low = round_to_bfloat16(value - high.to(tl.float32), EMULATED)
    tl.store(parts + ROWS * WIDTH + at, low, mask=expert < ROWS)


@triton.jit
def _split(
    w,
    parts,
    E: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Writes the weights' h and l."""
    split_block(w, parts, tl.program_id(0), E, D, ROWS, WIDTH, BLOCK, EMULATED)


@triton.jit
def _logits(
    x_at,
    w_at,
    low,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Computes a tile of x Wᵀ, (ROWS, COLUMNS) float32, in three products, the small ones first.

    `low` is the offset from the weights' h to their l.
    """
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, D, DEPTH):
        x = tl.load(x_at + k, mask=(depth < D - k)[None, :], other=0.0)
        w_high, w_low = tl.load(w_at + k), tl.load(w_at + k + low)
        x_high = round_to_bfloat16(x, EMULATED)
        x_low = round_to_bfloat16(x - x_high.to(tl.float32), EMULATED)
        total = tl.dot(x_low, w_high, total, input_precision="ieee")
        total = tl.dot(x_high, w_low, total, input_precision="ieee")
        total = tl.dot(x_high, w_high, total, input_precision="ieee")
    return total


@triton.jit
def _select(
    values,
    bins,
    slots,
    A: tl.constexpr,
    K: tl.constexpr,
    SELECT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Finds the K greatest values of each row, greatest first, and their places: (SELECT, SLOTS).

    Compares integers of the same order, in which negative numbers have all bits but the sign
    flipped. NaN is the greatest; selected and padding entries are the least.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # −0 is 0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(values == values, keys, 0x7FFFFFFF)
    keys = tl.where(bins < A, keys, -0x80000000)
    chosen = tl.zeros((SELECT, SLOTS), tl.int32)
    greatest = tl.zeros((SELECT, SLOTS), tl.int32)
    for k in range(K):
        key = tl.max(tl.max(keys, 0), 1)
        place = tl.where(keys == key[None, :, None], bins, A)
        place = tl.min(tl.min(place, 0), 1)
        greatest = tl.where((slots == k)[None, :], key[:, None], greatest)
        chosen = tl.where((slots == k)[None, :], place[:, None], chosen)
        keys = tl.where(bins == place[None, :, None], -0x80000000, keys)
    bits = greatest ^ ((greatest >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), chosen


@triton.jit
def _gates(values, chosen, slots, K: tl.constexpr, GATE: tl.constexpr):
    """Computes the gates of the chosen logits `chosen` (SELECT, SLOTS) of the rows `values`.

    Chosen logits are added one by one: threads hold given experts' logits otherwise than selected
    ones, and a reduction's order follows from that.
    """
    if GATE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-chosen))
    if GATE == "softmax_of_chosen":
        most = tl.max(tl.where((slots < K)[None, :], chosen, float("-inf")), 1)
        shares = tl.exp(chosen - most[:, None])
        total = tl.zeros_like(most)
        for k in range(K):
            total += tl.sum(tl.where((slots == k)[None, :], shares, 0.0), 1)
        return shares / total[:, None]
    most = tl.max(tl.max(values, 0), 1)
    total = tl.sum(tl.sum(tl.exp(values - most[None, :, None]), 0), 1)
    return tl.exp(chosen - most[:, None]) / total[:, None]


@triton.jit
def _sum_softmax(
    logits,
    sums,
    HEADS: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums softmax(logits) of every head over the rows of a full block, STRIP rows at a time."""
    row, cols = tl.arange(0, STRIP), tl.arange(0, COLUMNS)
    for head in range(HEADS):
        total = tl.zeros((STRIP, COLUMNS), tl.float32)
        for first in range(0, ROWS, STRIP):
            at = logits + ((first + row)[:, None] * HEADS + head) * A + cols[None, :]
            share = tl.load(at, mask=(cols < A)[None, :], other=float("-inf"))
            share = tl.exp(share - tl.max(share, 1)[:, None])
            total += share / tl.sum(share, 1)[:, None]
        tl.store(sums + head * A + cols, tl.sum(total, 0), mask=cols < A)


@triton.jit(do_not_specialize=["num_rows"])
def route(
    x,
    parts,
    given,
    logits,
    experts,
    gates,
    sums,
    num_rows,
    D: tl.constexpr,
    ROUTERS: tl.constexpr,
    HEADS: tl.constexpr,
    A: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SELECT: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    STRIP: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Writes logits (T, E), experts (R, T, H, K) and gates (R, T, H, K) of a block of rows.

    HEADS are those of all routers. Uses the `given` experts instead of a selection, if any. With
    `sums`, (blocks, E), every block is full.
    """
    E: tl.constexpr = HEADS * A
    H: tl.constexpr = HEADS // ROUTERS
    TILES: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    # Offsets within a block of rows are 32-bit; the block's own offset is 64-bit.
    first = tl.program_id(0) * ROWS
    num_left = tl.minimum(ROWS, num_rows - first)
    x += first.to(tl.int64) * D
    logits += first.to(tl.int64) * E
    experts += first.to(tl.int64) * (H * K)
    gates += first.to(tl.int64) * (H * K)
    if given is not None:
        given += first.to(tl.int64) * (H * K)
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    x_at = x + tl.minimum(row, num_left - 1)[:, None] * D + depth[None, :]
    for tile in range(TILES):
        cols = tile * COLUMNS + tl.arange(0, COLUMNS)
        w_at = parts + cols[None, :] * WIDTH + depth[:, None]
        total = _logits(x_at, w_at, TILES * COLUMNS * WIDTH, D, ROWS, COLUMNS, DEPTH, EMULATED)
        at = logits + row[:, None] * E + cols[None, :]
        tl.store(at, total, mask=(row < num_left)[:, None] & (cols < E)[None, :])
    # Reads other warps' stores. NVIDIA's bar.sync orders them; AMD's barrier does not wait for stores,
    # so this kernel is not used there (kernels/fused/router.py).
    tl.debug_barrier()
    # One head of one row is a line of A logits. Each lane of a warp holds one logit of a chunk, and a
    # warp holds whole lines, so warps exchange nothing.
    slots = tl.arange(0, SLOTS)
    bins = tl.arange(0, CHUNKS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    for part in range(0, ROWS * HEADS, SELECT):
        line = part + tl.arange(0, SELECT)
        live = line < num_left * HEADS
        line = tl.minimum(line, num_left * HEADS - 1)
        at = logits + line[None, :, None] * A + bins
        values = tl.load(at, mask=bins < A, other=float("-inf"))
        router = line % HEADS // H
        to = router.to(tl.int64) * num_rows * (H * K) + (line // HEADS * H + line % H) * K
        to = to[:, None] + slots[None, :]
        to_mask = live[:, None] & (slots < K)[None, :]
        first_expert = (line % H)[:, None] * A
        if given is None:
            chosen, places = _select(values, bins, slots, A, K, SELECT, SLOTS)
            tl.store(experts + to, (first_expert + places).to(tl.int64), mask=to_mask)
        else:
            expert = tl.load(given + to, mask=to_mask, other=0)
            tl.store(experts + to, expert, mask=to_mask)
            at = logits + line[:, None] * A + (expert - first_expert)
            chosen = tl.load(at, mask=to_mask, other=0.0)
        tl.store(gates + to, _gates(values, chosen, slots, K, GATE), mask=to_mask)
    if sums is not None:
        sums += tl.program_id(0).to(tl.int64) * E
        _sum_softmax(logits, sums, HEADS, A, ROWS, STRIP, LANES * CHUNKS)


def route_top_k(
    x_TD: Tensor,
    weight_ED: Tensor,
    given: Tensor | None,
    gate: str,
    top_k: int,
    heads: int,
    routers: int = 1,
    num_sequences: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements `kernels.fused.router.route_top_k` for contiguous float32 rows and weights.

    Returns logits, experts, gates, and the sums (B, E), which are empty without sequences.
    """
    num_rows, num_experts = x_TD.shape[0], weight_ED.shape[0]
    all_heads, per_head = routers * heads, num_experts // (routers * heads)
    logits_TE = x_TD.new_empty(num_rows, num_experts)
    gates = x_TD.new_empty(*[routers] * (routers > 1), num_rows, heads, top_k)
    experts = torch.empty_like(gates, dtype=torch.int64)
    tile, sums = _tile(num_rows, num_experts), None
    if num_sequences and num_rows % (num_sequences * tile.rows) == 0:  # a block is of one sequence
        sums = x_TD.new_empty(num_rows // tile.rows, num_experts)
    parts_2ED = once_per_pass(("split", tile), partial(_split_weights, tile=tile), weight_ED)
    bins = max(16, next_power_of_2(per_head))
    lines = next_power_of_2(tile.rows * all_heads)
    launch(
        route,
        cdiv(num_rows, tile.rows),
        x_TD,
        parts_2ED,
        given,
        logits_TE,
        experts,
        gates,
        sums,
        num_rows,
        D=x_TD.shape[1],
        ROUTERS=routers,
        HEADS=all_heads,
        A=per_head,
        K=top_k,
        GATE=gate,
        WIDTH=parts_2ED.shape[2],
        SELECT=max(1, min(lines, _SELECTED * tile.warps // bins)),
        CHUNKS=cdiv(bins, 32),
        LANES=min(bins, 32),
        SLOTS=next_power_of_2(top_k),
        STRIP=max(1, min(tile.rows, _SELECTED * tile.warps // bins)),
        EMULATED=INTERPRETED,
        **tile.options(),
    )
    if not num_sequences:
        return logits_TE, experts, gates, x_TD.new_empty(0)
    if sums is None:
        sums = logits_TE.unflatten(1, (all_heads, per_head)).softmax(-1).flatten(1)
    return logits_TE, experts, gates, sums.view(num_sequences, -1, num_experts).sum(1)


def _split_weights(weight_ED: Tensor, *, tile: Tile) -> Tensor:
    """Returns the weights' h and l, (2, E, D), zero-padded to whole tiles."""
    num_experts, width = weight_ED.shape
    rows, columns = round_up(num_experts, tile.columns), round_up(width, tile.depth)
    parts_2ED = new_parts(weight_ED, rows, columns)
    launch(
        _split,
        cdiv(parts_2ED[0].numel(), _SPLIT),
        weight_ED,
        parts_2ED,
        E=num_experts,
        D=width,
        ROWS=rows,
        WIDTH=columns,
        BLOCK=_SPLIT,
        EMULATED=INTERPRETED,
    )
    return parts_2ED


def _tile(num_rows: int, num_experts: int) -> Tile:
    if INTERPRETED:
        return Tile(16, 32, 32, 4, 1)
    return router_tile(target(), num_rows, num_experts)


def new_parts(like: Tensor, rows: int, columns: int) -> Tensor:
    """Allocates h and l of float32 numbers, (2, rows, columns)."""
    return like.new_empty(2, rows, columns, dtype=torch.float32 if INTERPRETED else torch.bfloat16)
