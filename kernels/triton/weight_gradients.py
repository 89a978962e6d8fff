"""K3: weight gradients as ragged products dW[e] = Σ u[rows of e]ᵀ · v[rows of e], over one or more calls.

  1. `_write_addresses` writes the addresses of all calls' operands into one table.
  2. `_list_rows` lists the row addresses of every expert, call after call: 20 bytes per row.
  3. `ragged_product` loops over that list. Work is cut into (expert, chunk of its rows, tile of dW),
     so an expert with many rows does not delay the others. An expert's first chunk writes dW; later
     chunks write separate tiles.
  4. `_add_chunks` adds these in order: deterministic, and no traffic unless an expert has several
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
from typing import Any

import torch
from torch import Tensor

from .grouped_gemm import factor, smooth
from .guard import cdiv, launch, next_power_of_2, tl, triton
from .routing import TileTable, tile_table
from .tiles import Tile, choose

_LEAST_CHUNK = 2048
_PROGRAMS = 4 * 132  # of K3: fewer would leave multiprocessors of large GPUs idle
_FIELDS = 6
_LISTED = 512  # rows of an expert that are listed at a time


@dataclass(frozen=True)
class Operands:
    """One call's operands of dW[e] += Σ gate[n] · a(u[u_rows[n]])ᵀ · v[v_rows[n]].

    The sum runs over expert e's sorted rows n. A row index of None means n itself.
    """

    u: Tensor
    v: Tensor
    u_rows_N: Tensor | None
    v_rows_N: Tensor | None
    gate_N: Tensor | None
    starts_E1: Tensor


@triton.jit
def _write_addresses(table, tensors, COUNT: tl.constexpr):
    """Writes the addresses of all calls' operands into the table, skipping absent ones."""
    for field in tl.static_range(COUNT):
        if tensors[field] is not None:
            tl.store(table + field, tensors[field].to(tl.int64))


@triton.jit
def _list_rows(
    table,
    total_starts,
    u_at,
    v_at,
    gates,
    E: tl.constexpr,
    U_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    U_GATHERED: tl.constexpr,
    V_GATHERED: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Appends one call's rows of one expert to the list, after those of earlier calls."""
    call = tl.program_id(0) // E
    expert = tl.program_id(0) % E
    to = tl.load(total_starts + expert)
    for earlier in range(call):
        starts = tl.load(table + earlier * FIELDS + 5).to(tl.pointer_type(tl.int32))
        to += tl.load(starts + expert + 1) - tl.load(starts + expert)
    fields = table + call * FIELDS
    u = tl.load(fields).to(tl.pointer_type(DTYPE))
    v = tl.load(fields + 1).to(tl.pointer_type(DTYPE))
    starts = tl.load(fields + 5).to(tl.pointer_type(tl.int32))
    first = tl.load(starts + expert)
    count = tl.load(starts + expert + 1) - first
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        live = place < count
        rows = first + place
        u_rows, v_rows = rows, rows
        if U_GATHERED:
            index = tl.load(fields + 2).to(tl.pointer_type(tl.int32))
            u_rows = tl.load(index + rows, mask=live, other=0)
        if V_GATHERED:
            index = tl.load(fields + 3).to(tl.pointer_type(tl.int32))
            v_rows = tl.load(index + rows, mask=live, other=0)
        if GATED:
            weights = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
            gate = tl.load(weights + rows, mask=live, other=0.0)
            tl.store(gates + to + place, gate, mask=live)
        tl.store(u_at + to + place, (u + u_rows.to(tl.int64) * U_STRIDE).to(tl.int64), mask=live)
        tl.store(v_at + to + place, (v + v_rows.to(tl.int64) * V_STRIDE).to(tl.int64), mask=live)


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
    chunk_expert,
    chunk_first,
    chunk_slot,
    chunk_rows,
    M: tl.constexpr,
    K: tl.constexpr,
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
    expert = tl.load(chunk_expert + entry)
    if expert < 0:
        return
    tall = (tile // TILES_K) * ROWS + tl.arange(0, ROWS)
    wide = (tile % TILES_K) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    begin = tl.load(chunk_first + entry)
    end = tl.minimum(begin + chunk_rows, tl.load(total_starts + expert + 1))
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
    slot = tl.load(chunk_slot + entry)
    if slot >= 0:
        tl.store(chunks + slot.to(tl.int64) * M * K + at, total, mask=mask)
    else:
        if ACCUMULATE:
            total += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_chunks(chunks, out, slots, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Adds an expert's later chunks to out[e], in order."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    expert = tl.program_id(0) // BLOCKS
    first = tl.load(slots + expert)
    end = tl.load(slots + expert + 1)
    if first == end:
        return
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    out_at = out + expert.to(tl.int64) * SIZE + at
    total = tl.load(out_at, mask=at < SIZE, other=0.0).to(tl.float32)
    chunk_at = chunks + tl.cast(first, tl.int64) * SIZE + at
    for _ in range(first, end):
        total += tl.load(chunk_at, mask=at < SIZE, other=0.0, eviction_policy="evict_first")
        chunk_at += SIZE
    tl.store(out_at, total.to(out.dtype.element_ty), mask=at < SIZE)


@dataclass(frozen=True)
class Work:
    """How the rows of all calls are cut into chunks; shared by the products of a pass."""

    table: TileTable
    total_starts_E1: Tensor
    chunk: int
    num_rows: int

    @property
    def most_slots(self) -> int:
        """Returns the most chunks that are not their expert's first."""
        return self.num_rows // self.chunk


def cut_work(starts_CE1: Sequence[Tensor], num_rows: int, *, tiles: int) -> Work:
    """Cuts rows into chunks of twice an expert's mean load, so that few experts have several.

    Chunks shrink, to 2048 rows at least, if there would be too few programs. `tiles` is the number
    of tiles, and thus programs per chunk, of one expert's gradient.
    """
    total_starts = (
        starts_CE1[0]
        if len(starts_CE1) == 1
        else torch.stack(list(starts_CE1)).sum(0, dtype=torch.int32)
    )
    num_experts = total_starts.shape[0] - 1
    chunk = next_power_of_2(2 * cdiv(num_rows, num_experts))
    while chunk > _LEAST_CHUNK and tiles * max(num_experts, num_rows // chunk) < _PROGRAMS:
        chunk //= 2
    chunk = max(_LEAST_CHUNK, chunk)
    table = tile_table(total_starts, num_rows, rows=chunk, least=1)
    return Work(table, total_starts, chunk, num_rows)


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
    work: Work,
    weights: Tensor,
    *,
    into: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Computes the gradient summed over the calls, (E, M, K), and adds it to `into` if given.

    `activation` applies to u; None leaves the rows unchanged.
    """
    if into is not None and not into.is_contiguous():
        return into.add_(ragged_gradient(calls, work, weights, activation=activation))
    (num_experts, tall, wide), sample, table = weights.shape, calls[0], work.table
    out = weights.new_empty(weights.shape) if into is None else into
    chunks = sample.u.new_empty(work.most_slots, tall, wide, dtype=torch.float32)
    element = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[sample.u.dtype]
    tile, tiles = tile_of(weights, work.num_rows, activation)
    u_at_N, v_at_N, gate_N = _listed(calls, work, element)
    launch(
        ragged_product,
        table.length * tiles,
        u_at_N,
        v_at_N,
        gate_N,
        out,
        chunks,
        work.total_starts_E1,
        table.expert_L,
        table.first_L,
        table.slot_L,
        work.chunk,
        M=tall,
        K=wide,
        U_ALIGNED=_alignment(sample.u),
        V_ALIGNED=_alignment(sample.v),
        ACT=activation,
        DTYPE=element,
        ACCUMULATE=into is not None,
        **tile.options(),
    )
    if work.most_slots:
        size = tall * wide
        launch(
            _add_chunks,
            num_experts * cdiv(size, 1024),
            chunks,
            out,
            table.slots_E1,
            SIZE=size,
            BLOCK=1024,
        )
    return out


def _listed(
    calls: Sequence[Operands], work: Work, element: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lists every expert's rows of all calls: addresses in u and v, (N,) int64, and gates (N,).

    Kernels write the list, because a CUDA graph cannot capture a copy from the host.
    """
    sample, num_experts = calls[0], work.total_starts_E1.shape[0] - 1
    table, u_at_N, v_at_N = (
        torch.empty(length, dtype=torch.int64, device=sample.u.device)
        for length in (len(calls) * _FIELDS, work.num_rows, work.num_rows)
    )
    gate_N = None
    if sample.gate_N is not None:
        gate_N = torch.empty(work.num_rows, dtype=torch.float32, device=sample.u.device)
    tensors = tuple(
        tensor
        for call in calls
        for tensor in (call.u, call.v, call.u_rows_N, call.v_rows_N, call.gate_N, call.starts_E1)
    )
    launch(_write_addresses, 1, table, tensors, COUNT=len(tensors))
    launch(
        _list_rows,
        len(calls) * num_experts,
        table,
        work.total_starts_E1,
        u_at_N,
        v_at_N,
        gate_N,
        E=num_experts,
        U_STRIDE=sample.u.shape[1],
        V_STRIDE=sample.v.shape[1],
        U_GATHERED=sample.u_rows_N is not None,
        V_GATHERED=sample.v_rows_N is not None,
        GATED=gate_N is not None,
        DTYPE=element,
        FIELDS=_FIELDS,
        BLOCK=_LISTED,
    )
    return u_at_N, v_at_N, gate_N


def _alignment(rows: Tensor) -> int:
    """Returns the alignment of every row's address in bytes: a power of two, at most 16."""
    assert rows.data_ptr() % 16 == 0, "rows must begin at a multiple of 16 bytes"
    return math.gcd(16, rows.shape[1] * rows.element_size())


@triton.jit
def _sum_segments(
    rows,
    row_index,
    gate_rows,
    starts,
    out,
    OUT: tl.constexpr,
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
        at = place
        if row_index is not None:
            at = tl.load(row_index + place, mask=live, other=0)
        mask = live[:, None] & (cols < OUT)[None, :]
        values = tl.load(
            rows + at.to(tl.int64)[:, None] * OUT + cols[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        if gate_rows is not None:
            values *= tl.load(gate_rows + place, mask=live, other=0.0)[:, None]
        total += values
    tl.store(out + expert * OUT + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=cols < OUT)


def segment_sums(
    rows: Tensor, row_index_N: Tensor | None, gate_N: Tensor | None, starts_E1: Tensor
) -> Tensor:
    """Computes a bias's gradient, Σ gate · rows over each expert's rows, (E, O)."""
    width, num_experts = rows.shape[1], starts_E1.shape[0] - 1
    out = rows.new_empty(num_experts, width)
    columns = min(128, max(16, next_power_of_2(width)))
    launch(
        _sum_segments,
        num_experts * cdiv(width, columns),
        rows,
        row_index_N,
        gate_N,
        starts_E1,
        out,
        OUT=width,
        DEPTH=32,
        COLUMNS=columns,
    )
    return out
