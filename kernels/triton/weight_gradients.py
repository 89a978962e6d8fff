"""K3: the weights' gradients, ragged products dW[e] = Σ u[rows of e]ᵀ · v[rows of e], over one call
or several at once.

Work is cut into (expert, chunk of its rows, tile of dW), so that an expert with many rows does not
hold up the rest. The first chunk of an expert writes dW; later ones write tiles of their own, which
`_add_chunks` adds in order: deterministic, and no traffic at all where no expert has more than one
chunk.

Several calls (the repeats of a layer group in a Universal Transformer) are one launch: an expert's
rows are those of the first call, then those of the second …; a table of addresses says where each
has its operands. dW is then read and written once for all of them, not once for each. The
activation is applied to u, and the gate to the narrower of both, on their way to the tensor cores,
so nothing but what the forward saved is needed.

Legend: C calls, N routes, E experts, M columns of u, K of v; tiles TALL × WIDE, DEPTH rows at a
time; CHUNK rows of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .grouped_gemm import smooth
from .guard import launch, tl, triton
from .routing import TileTable, tile_table
from .tiles import choose

_LEAST_CHUNK = 2048
_FIELDS = 6


@dataclass(frozen=True)
class Operands:
    """Holds one call's share: dW[e] += Σ gate[n] · a(u[u_rows[n]])ᵀ · v[v_rows[n]].

    The sum is over expert e's sorted rows n. Rows of None are n itself.
    """

    u: Tensor
    v: Tensor
    u_rows_N: Tensor | None
    v_rows_N: Tensor | None
    gate_N: Tensor | None
    starts_E1: Tensor


@triton.jit
def _write_addresses(table, call, u, v, u_rows, v_rows, gate, starts, FIELDS: tl.constexpr):
    """Writes one call's addresses into the table."""
    at = table + call * FIELDS
    tl.store(at, u.to(tl.int64))
    tl.store(at + 1, v.to(tl.int64))
    if u_rows is not None:
        tl.store(at + 2, u_rows.to(tl.int64))
    if v_rows is not None:
        tl.store(at + 3, v_rows.to(tl.int64))
    if gate is not None:
        tl.store(at + 4, gate.to(tl.int64))
    tl.store(at + 5, starts.to(tl.int64))


@triton.jit
def _pointer(at, DTYPE: tl.constexpr):
    """Reads an address from the table.

    Tensors start at multiples of 16 bytes (`_addresses` sees to it).
    """
    return tl.multiple_of(tl.load(at).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _operand(base, rows, live, cols, gate, WIDTH: tl.constexpr, ACT: tl.constexpr):
    """Loads (DEPTH, columns): gate · a(base[rows]), zero where not live.

    What has no activation and no gate is passed on as it is.
    """
    STRIDE: tl.constexpr = 2 * WIDTH if ACT == "swiglu" or ACT == "geglu" else WIDTH
    mask = live[:, None] & (cols < WIDTH)[None, :]
    at = base + rows.to(tl.int64)[:, None] * STRIDE + cols[None, :]
    tile = tl.load(at, mask=mask, other=0.0)
    if ACT is not None or gate is not None:
        value = tile.to(tl.float32)
        if ACT is not None:
            value, _ = smooth(value, ACT)
        if ACT == "swiglu" or ACT == "geglu":
            value *= tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        if gate is not None:
            value *= gate[:, None]
        tile = value.to(tile.dtype)
    return tile


@triton.jit
def ragged_product(
    table,
    out,
    chunks,
    total_starts,
    chunk_expert,
    chunk_first,
    chunk_slot,
    num_calls,
    chunk_rows,
    M: tl.constexpr,
    K: tl.constexpr,
    U_GATHERED: tl.constexpr,
    V_GATHERED: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes one tile of dW[e] over one chunk of an expert's rows, over all calls."""
    TILES_K: tl.constexpr = (K + WIDE - 1) // WIDE
    TILES: tl.constexpr = (M + TALL - 1) // TALL * TILES_K
    entry = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(chunk_expert + entry)
    if expert < 0:
        return
    tall = (tile // TILES_K) * TALL + tl.arange(0, TALL)
    wide = (tile % TILES_K) * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, DEPTH)
    # of the expert's rows, counted over all calls
    first = tl.load(chunk_first + entry) - tl.load(total_starts + expert)
    before = 0
    total = tl.zeros((TALL, WIDE), tl.float32)
    for call in range(num_calls):
        fields = table + call * FIELDS
        u = _pointer(fields, DTYPE)
        v = _pointer(fields + 1, DTYPE)
        starts = _pointer(fields + 5, tl.int32)
        start = tl.load(starts + expert)
        count = tl.load(starts + expert + 1) - start
        begin = start + tl.maximum(first - before, 0)
        end = start + tl.minimum(first + chunk_rows - before, count)
        before += count
        for row in range(begin, end, DEPTH):
            rows = row + depth
            live = rows < end
            u_rows, v_rows, gate = rows, rows, None
            if U_GATHERED:
                u_rows = tl.load(_pointer(fields + 2, tl.int32) + rows, mask=live, other=0)
            if V_GATHERED:
                v_rows = tl.load(_pointer(fields + 3, tl.int32) + rows, mask=live, other=0)
            if GATED:
                gate = tl.load(_pointer(fields + 4, tl.float32) + rows, mask=live, other=0.0)
            u_tile = _operand(u, u_rows, live, tall, gate if M <= K else None, M, ACT)
            v_tile = _operand(v, v_rows, live, wide, None if M <= K else gate, K, None)
            total = tl.dot(tl.trans(u_tile), v_tile, total, input_precision=PRECISION)
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
        total += tl.load(chunk_at, mask=at < SIZE, other=0.0)
        chunk_at += SIZE
    tl.store(out_at, total.to(out.dtype.element_ty), mask=at < SIZE)


@dataclass(frozen=True)
class Work:
    """Holds what the products of a pass share: how the rows of all calls are cut into chunks."""

    table: TileTable
    chunk: int
    num_rows: int

    @property
    def most_slots(self) -> int:
        """Returns the most chunks that are not their expert's first."""
        return self.num_rows // self.chunk


def cut_work(starts_CE1: Sequence[Tensor], num_rows: int) -> Work:
    """Cuts rows into chunks of twice an expert's mean load, and of 2048 rows at least.

    So few experts have a second one.
    """
    total_starts = (
        starts_CE1[0]
        if len(starts_CE1) == 1
        else torch.stack(list(starts_CE1)).sum(0, dtype=torch.int32)
    )
    num_experts = total_starts.shape[0] - 1
    chunk = max(_LEAST_CHUNK, triton.next_power_of_2(2 * triton.cdiv(num_rows, num_experts)))
    return Work(tile_table(total_starts, num_rows, rows=chunk, least=1), chunk, num_rows)


def ragged_gradient(
    calls: Sequence[Operands],
    work: Work,
    precision: str,
    weights: Tensor,
    *,
    into: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Computes (E, M, K), shaped as the weights: the sum over the calls.

    It is added to `into` where given. `activation`: of u; None: rows as they are.
    """
    if into is not None and not into.is_contiguous():
        return into.add_(ragged_gradient(calls, work, precision, weights, activation=activation))
    (num_experts, tall, wide), sample = weights.shape, calls[0]
    out = weights.new_empty(weights.shape) if into is None else into
    chunks = sample.u.new_empty(work.most_slots, tall, wide, dtype=torch.float32)
    element = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[sample.u.dtype]
    # narrow copies want more addresses, an activation more values: neither leaves the registers for
    # large tiles
    small = activation is not None or any(
        width * weights.element_size() % 16 for width in (tall, wide)
    )
    tile = choose("ragged_small" if small else "ragged", weights.dtype, work.num_rows, num_experts)
    if tall < wide:  # the longer side along the wider operand
        tile = replace(tile, rows=tile.columns, columns=tile.rows)
    tile, table = tile.fit(rows=tall, columns=wide), work.table
    tiles = triton.cdiv(tall, tile.rows) * triton.cdiv(wide, tile.columns)
    launch(
        ragged_product,
        table.length * tiles,
        _addresses(calls),
        out,
        chunks,
        table.starts_E1,
        table.expert_L,
        table.first_L,
        table.slot_L,
        len(calls),
        work.chunk,
        M=tall,
        K=wide,
        U_GATHERED=sample.u_rows_N is not None,
        V_GATHERED=sample.v_rows_N is not None,
        GATED=sample.gate_N is not None,
        ACT=activation,
        DTYPE=element,
        FIELDS=_FIELDS,
        ACCUMULATE=into is not None,
        TALL=tile.rows,
        WIDE=tile.columns,
        DEPTH=tile.depth,
        PRECISION=precision,
        **tile.options(),
    )
    if work.most_slots:
        size = tall * wide
        launch(
            _add_chunks,
            num_experts * triton.cdiv(size, 1024),
            chunks,
            out,
            table.slots_E1,
            SIZE=size,
            BLOCK=1024,
        )
    return out


def _addresses(calls: Sequence[Operands]) -> Tensor:
    """Writes the addresses of the calls' operands: (C, fields) int64.

    A kernel writes them: a copy from the host could not be captured in a CUDA graph.
    """
    table = torch.empty(len(calls), _FIELDS, dtype=torch.int64, device=calls[0].u.device)
    for number, call in enumerate(calls):
        tensors = (call.u, call.v, call.u_rows_N, call.v_rows_N, call.gate_N, call.starts_E1)
        # `_pointer` counts on it
        assert not any(tensor.data_ptr() % 16 for tensor in tensors if tensor is not None)
        launch(_write_addresses, 1, table, number, *tensors, FIELDS=_FIELDS)
    return table


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
    """Sums one tile of columns over one expert's rows, weighed by their gates."""
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
    """Computes a bias's gradient (E, O): Σ over an expert's rows of gate · rows.

    For the few models whose experts have biases.
    """
    width, num_experts = rows.shape[1], starts_E1.shape[0] - 1
    out = rows.new_empty(num_experts, width)
    columns = min(128, max(16, triton.next_power_of_2(width)))
    launch(
        _sum_segments,
        num_experts * triton.cdiv(width, columns),
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
