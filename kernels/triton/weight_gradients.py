"""K3: weight gradients as ragged products dW[e] = Σ u[rows of e]ᵀ · v[rows of e], over one or more calls.

  1. `_list_rows` lists the row addresses of every expert, call after call: 20 bytes per row.
  2. `ragged_product` loops over that list. Work is cut into (expert, chunk of its rows, tile of dW),
     so an expert with many rows does not delay the others. An expert's first chunk writes dW; later
     chunks write separate tiles.
  3. `_add_chunks` adds these in order: deterministic, and no traffic unless an expert has several
     chunks.

Several calls (the repeats of a layer group in a Universal Transformer) share one launch, so dW is
read and written once, and loads overlap across calls. The kernel applies the activation to u, and
the gate to the narrower of u and v, as it loads them, so it needs only what the forward saved.

Legend: C calls, N routes of all calls, E experts, M columns of u, K of v; tiles ROWS × COLUMNS, DEPTH
rows at a time; CHUNK rows of an expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calls import SortedRoutes
from .grouped_gemm import factor, smooth
from .guard import cdiv, launch, next_power_of_2, tl, triton
from .routing import experts_of, find_tile, look_up, num_tiles, row_of
from .tiles import Tile, choose

_LEAST_CHUNK = 2048
_PROGRAMS = 4 * 132  # of K3: fewer would leave multiprocessors of large GPUs idle
_FIELDS = tl.core.constexpr(7)  # tensors of a call
_LISTED = 512  # rows of an expert that are listed at a time


@dataclass(frozen=True)
class Operands:
    """One call's operands of dW[e] += Σ gate[n] · a(u[source of n])ᵀ · v[target of n].

    The sum runs over expert e's routes n. Rows of u and v may be sorted already (`ragged_gradient`).
    """

    u: Tensor
    v: Tensor
    routes: SortedRoutes


@triton.jit
def _of_call(tensors, call, FIELD: tl.constexpr, CALLS: tl.constexpr):
    """Returns one of a call's tensors."""
    found = tensors[FIELD]
    for each in tl.static_range(1, CALLS):
        found = tl.where(call == each, tensors[_FIELDS * each + FIELD], found)
    return found


@triton.jit
def _list_rows(
    u_at,
    v_at,
    gates,
    total_starts,
    tensors,
    CALLS: tl.constexpr,
    E: tl.constexpr,
    U_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PER_SOURCE: tl.constexpr,
    PER_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Appends one call's rows of one expert to the list, after those of earlier calls.

    The first call's programs write where the experts' lists start.
    """
    call = tl.program_id(0) // E
    expert = tl.program_id(0) % E
    to = 0
    total_end = 0
    for each in tl.static_range(CALLS):
        starts = tensors[_FIELDS * each + 6]
        first, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        to += tl.where(each < call, end, first)
        total_end += end
    if call == 0:
        tl.store(total_starts + expert, to)
        tl.store(total_starts + E, total_end, mask=expert == E - 1)
    u, v = _of_call(tensors, call, 0, CALLS), _of_call(tensors, call, 1, CALLS)
    order, source, target = tensors[2], tensors[3], tensors[4]
    if order is not None:
        order = _of_call(tensors, call, 2, CALLS)
    if source is not None:
        source = _of_call(tensors, call, 3, CALLS)
    if target is not None:
        target = _of_call(tensors, call, 4, CALLS)
    weights, starts = _of_call(tensors, call, 5, CALLS), _of_call(tensors, call, 6, CALLS)
    first = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - first
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        live = place < count
        u_rows = row_of(order, source, first + place, live, PER_SOURCE)
        v_rows = row_of(order, target, first + place, live, PER_TARGET)
        if gates is not None:
            gate = tl.load(weights + look_up(order, first + place, live), mask=live, other=0.0)
            tl.store(gates + to + place, gate.to(tl.float32), mask=live)
        tl.store(u_at + to + place, (u + u_rows * U_STRIDE).to(tl.int64), mask=live)
        tl.store(v_at + to + place, (v + v_rows * V_STRIDE).to(tl.int64), mask=live)


@triton.jit
def _operand(
    rows_at,
    place,
    live,
    cols,
    gate,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
    ACT: tl.constexpr,
):
    """Loads a (DEPTH, columns) tile of gate · a(listed rows), zero where not live."""
    mask = live[:, None] & (cols < WIDTH)[None, :]
    rows = tl.load(rows_at + place, mask=live, other=0).to(tl.pointer_type(DTYPE))
    at = tl.multiple_of(rows, ALIGNED)[:, None] + cols[None, :]
    tile = tl.load(at, mask=mask, other=0.0)
    if ACT is not None or gate is not None:
        value = tile.to(tl.float32)
        if ACT is not None:
            value, _ = smooth(value, ACT)
        if ACT == "swiglu" or ACT == "geglu" or ACT == "clamped_swiglu":
            value *= factor(tl.load(at + WIDTH, mask=mask, other=0.0), ACT)
        if gate is not None:
            value *= gate[:, None]
        tile = value.to(tile.dtype)
    return tile


@triton.jit
def ragged_product(
    u_at,
    v_at,
    gates,
    out,
    chunks,
    total_starts,
    chunk_rows,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    U_ALIGNED: tl.constexpr,
    V_ALIGNED: tl.constexpr,
    ACT: tl.constexpr,
    DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes one tile of dW[e] over one chunk of an expert's listed rows."""
    TILES_K: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (M + ROWS - 1) // ROWS * TILES_K
    entry = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert, number, begin, end = find_tile(total_starts, entry, chunk_rows, E, BINS)
    if (number > 0) & (begin >= end):
        return
    tall = (tile // TILES_K) * ROWS + tl.arange(0, ROWS)
    wide = (tile % TILES_K) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    end = tl.minimum(begin + chunk_rows, end)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(begin, end, DEPTH):
        place = row + depth
        live = place < end
        gate = None
        if gates is not None:
            gate = tl.load(gates + place, mask=live, other=0.0)
        u_gate = gate if M <= K else None
        v_gate = None if M <= K else gate
        u_tile = _operand(u_at, place, live, tall, u_gate, M, U_ALIGNED, DTYPE, ACT)
        v_tile = _operand(v_at, place, live, wide, v_gate, K, V_ALIGNED, DTYPE, None)
        total = tl.dot(tl.trans(u_tile), v_tile, total, input_precision="ieee")
    out += expert.to(tl.int64) * M * K
    at = tall[:, None] * K + wide[None, :]
    mask = (tall < M)[:, None] & (wide < K)[None, :]
    if number > 0:  # every expert has one chunk that is none of these
        tl.store(chunks + (entry - expert - 1).to(tl.int64) * M * K + at, total, mask=mask)
    else:
        if ACCUMULATE:
            total += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_chunks(chunks, out, total_starts, chunk_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Adds an expert's later chunks to out[e], in order."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    expert = tl.program_id(0) // BLOCKS
    start = tl.load(total_starts + expert)
    later = (tl.load(total_starts + expert + 1) - start - 1) // chunk_rows
    if later <= 0:
        return
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    out_at = out + expert.to(tl.int64) * SIZE + at
    total = tl.load(out_at, mask=at < SIZE, other=0.0).to(tl.float32)
    chunk_at = chunks + (start // chunk_rows).to(tl.int64) * SIZE + at
    for _ in range(later):
        total += tl.load(chunk_at, mask=at < SIZE, other=0.0, eviction_policy="evict_first")
        chunk_at += SIZE
    tl.store(out_at, total.to(out.dtype.element_ty), mask=at < SIZE)


def chunk_of(calls: Sequence[Operands], weights: Tensor) -> int:
    """Returns a chunk's rows: twice an expert's mean load, so that few experts have several chunks.

    Chunks shrink, to 2048 rows at least, if there would be too few programs. `weights` is any matrix
    of the bank.
    """
    num_rows, num_experts = _num_rows(calls), len(weights)
    _, tiles = tile_of(weights, num_rows, None)
    chunk = next_power_of_2(2 * cdiv(num_rows, num_experts))
    while chunk > _LEAST_CHUNK and tiles * max(num_experts, num_rows // chunk) < _PROGRAMS:
        chunk //= 2
    return max(_LEAST_CHUNK, chunk)


def _num_rows(calls: Sequence[Operands]) -> int:
    return sum(call.routes.num_routes for call in calls)


def tile_of(weights: Tensor, num_rows: int, activation: str | None) -> tuple[Tile, int]:
    """Returns the tile of a gradient shaped like the weights (E, M, K), and the tiles per expert."""
    num_experts, tall, wide = weights.shape
    # narrow copies need registers for addresses, an activation for values: large tiles do not fit
    small = activation is not None or any(
        width * weights.element_size() % 16 for width in (tall, wide)
    )
    tile = choose("ragged_small" if small else "ragged", weights.dtype, num_rows, num_experts)
    if tall < wide:  # the longer side along the wider operand
        tile = replace(tile, rows=tile.columns, columns=tile.rows)
    tile = tile.fit(rows=tall, columns=wide)
    return tile, cdiv(tall, tile.rows) * cdiv(wide, tile.columns)


def ragged_gradient(
    calls: Sequence[Operands],
    weights: Tensor,
    chunk: int,
    *,
    of_sources: bool = True,
    of_targets: bool = True,
    into: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Computes the gradient summed over the calls, (E, M, K), and adds it to `into` if given.

    u has a row per source, or is sorted; v has a row per target, to be gated, or is sorted.
    `activation` applies to u; None leaves the rows unchanged.
    """
    if into is not None and not into.is_contiguous():
        gradient = ragged_gradient(
            *(calls, weights, chunk),
            of_sources=of_sources,
            of_targets=of_targets,
            activation=activation,
        )
        return into.add_(gradient)
    (num_experts, tall, wide), sample, num_rows = weights.shape, calls[0], _num_rows(calls)
    out = weights.new_empty(weights.shape) if into is None else into
    chunks = sample.u.new_empty(num_rows // chunk, tall, wide, dtype=torch.float32)
    tile, tiles = tile_of(weights, num_rows, activation)
    u_at_N, v_at_N, gate_N, starts_E1 = _listed(calls, of_sources, of_targets)
    launch(
        ragged_product,
        num_tiles(num_rows, num_experts, chunk) * tiles,
        *(u_at_N, v_at_N, gate_N, out, chunks, starts_E1, chunk),
        M=tall,
        K=wide,
        U_ALIGNED=_alignment(sample.u),
        V_ALIGNED=_alignment(sample.v),
        ACT=activation,
        DTYPE={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[sample.u.dtype],
        ACCUMULATE=into is not None,
        **experts_of(num_experts),
        **tile.options(),
    )
    if len(chunks):
        size = tall * wide
        num_programs = num_experts * cdiv(size, 1024)
        launch(_add_chunks, num_programs, chunks, out, starts_E1, chunk, SIZE=size, BLOCK=1024)
    return out


def _listed(
    calls: Sequence[Operands], of_sources: bool, of_targets: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Lists every expert's rows of all calls: addresses in u and v, (N,) int64, gates (N,), and starts.

    A kernel writes the list, because a CUDA graph cannot capture a copy from the host.
    """
    rules = {(of.order_N is None, of.per_source, of.per_target) for of in (c.routes for c in calls)}
    if len(rules) > 1:  # the kernel follows one
        calls = [replace(call, routes=_by_index(call.routes)) for call in calls]
    sample, num_rows = calls[0], _num_rows(calls)
    routes, device = sample.routes, sample.u.device
    u_at_N, v_at_N = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    gate_N = torch.empty(num_rows, dtype=torch.float32, device=device) if of_targets else None
    tensors = list[Tensor | None]()
    for call in calls:
        of = call.routes
        index = of.source_N if of_sources else None, of.target_N if of_targets else None
        lists = (each if each is None else aligned(each) for each in (*index, of.weight_N))
        tensors += [call.u, call.v, of.order_N, *lists, of.starts_E1]
    total_starts_E1 = torch.empty_like(routes.starts_E1)
    launch(
        _list_rows,
        len(calls) * routes.num_experts,
        *(u_at_N, v_at_N, gate_N, total_starts_E1, tuple(tensors)),
        CALLS=len(calls),
        E=routes.num_experts,
        U_STRIDE=sample.u.shape[1],
        V_STRIDE=sample.v.shape[1],
        PER_SOURCE=routes.per_source if of_sources else 0,
        PER_TARGET=routes.per_target if of_targets else 0,
        BLOCK=_LISTED,
    )
    return u_at_N, v_at_N, gate_N, total_starts_E1


def _by_index(routes: SortedRoutes) -> SortedRoutes:
    """Returns the same routes in sorted order, with indices instead of rules."""
    return replace(
        routes,
        order_N=None,
        source_N=routes.source_rows().long(),
        target_N=routes.target_rows().long(),
        weight_N=routes.gates(torch.float32),
        per_source=0,
        per_target=0,
    )


def aligned(rows: Tensor) -> Tensor:
    """Returns the rows contiguous and aligned to 16 bytes: a kernel compiles for other addresses again."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _alignment(rows: Tensor) -> int:
    """Returns the alignment of every row's address in bytes: a power of two, at most 16."""
    assert rows.data_ptr() % 16 == 0, "rows must begin at a multiple of 16 bytes"
    return math.gcd(16, rows.shape[1] * rows.element_size())


@triton.jit
def _sum_segments(
    rows,
    order,
    index,
    gates,
    starts,
    out,
    OUT: tl.constexpr,
    PER: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums one tile of columns over one expert's rows, weighted by their gates."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    expert = tl.program_id(0) // TILES
    cols = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(starts + expert + 1)
    total = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for first in range(tl.load(starts + expert), end, DEPTH):
        place = first + tl.arange(0, DEPTH)
        live = place < end
        at = row_of(order, index, place, live, PER)
        mask = live[:, None] & (cols < OUT)[None, :]
        values = tl.load(rows + at[:, None] * OUT + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        if gates is not None:
            gate = tl.load(gates + look_up(order, place, live), mask=live, other=0.0)
            values *= gate.to(tl.float32)[:, None]
        total += values
    tl.store(out + expert * OUT + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=cols < OUT)


def segment_sums(rows: Tensor, routes: SortedRoutes, *, of_targets: bool) -> Tensor:
    """Computes a bias's gradient, the sum of each expert's rows, (E, O).

    The rows are sorted, or `of_targets`, and then gated.
    """
    width, num_experts = rows.shape[1], routes.num_experts
    out = rows.new_empty(num_experts, width)
    columns = min(128, max(16, next_power_of_2(width)))
    given = (routes.target_N, routes.weight_N) if of_targets else (None, None)
    launch(
        _sum_segments,
        num_experts * cdiv(width, columns),
        *(rows, routes.order_N, *given, routes.starts_E1, out),
        OUT=width,
        PER=routes.per_target if of_targets else 0,
        DEPTH=32,
        COLUMNS=columns,
    )
    return out
