"""`kernels/sends.py` on a GPU: five small Triton kernels that never synchronise with the host.

  1. `_mark`: each block of routes finds its destinations, marks the (destination, row) pairs, and
     counts its routes by destination;
  2. `_number`: one program per destination numbers the marks and sums the block counts; one program
     per block of rows counts the marks of these rows;
  3. `_describe`: each block of routes writes its metadata in destination order;
  4. `_list`: each block of rows lists its pairs by destination and by row; launched twice where the
     target rows are not the source rows;
  5. `_unpack`: reads a block of received routes.

All values are integers and no two programs write different values to one place, so runs agree bit
for bit.

Legend: N routes, E experts, P ranks, U source rows, T target rows, B blocks of
routes, b blocks of rows, R routes that came.
"""

from dataclasses import dataclass

from torch import Tensor, empty, full, int32, int64

from moebius.kernels.calls import INTEGERS, Addresses, PackedSends, RowPairs, SendCounts
from moebius.kernels.triton.guard import launch, tl, triton
from moebius.kernels.triton.routing import rank_in_block

_BLOCK = 256  # routes of a program
_COMPARED = 32
_ROWS = 512  # of a program
_SCAN = 1024
_LEAST_BINS = 128


@dataclass(frozen=True)
class BlockCounts:
    """What one program needs from the others: counts of blocks of routes and of blocks of rows."""

    base_PB: Tensor  # int32, as all: routes of a rank in earlier blocks
    sources_b: Tensor  # pairs of a block of source rows
    targets_b: Tensor | None


@triton.jit(do_not_specialize=["num_routes", "num_blocks", "num_sources", "num_targets"])
def _mark(
    source_N,
    target_N,
    expert_N,
    rank_E,
    destination_N,
    number_PU,
    number_PT,
    base_PB,
    num_routes,
    num_blocks,
    num_sources,
    num_targets,
    P: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the destinations of a block of routes, marks their rows, counts them."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)
    live = route < num_routes
    source = tl.load(source_N + route, mask=live, other=0)
    expert = tl.load(expert_N + route, mask=live, other=0)
    to = tl.load(rank_E + expert, mask=live, other=0).to(tl.int32)
    to = tl.where(live, to, P)
    tl.store(destination_N + route, to, mask=live)
    tl.store(number_PU + to.to(tl.int64) * num_sources + source, 0, mask=live)
    if number_PT is not None:
        target = tl.load(target_N + route, mask=live, other=0)
        tl.store(number_PT + to.to(tl.int64) * num_targets + target, 0, mask=live)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(to, BINS)  # bin P takes what lies past the end
    tl.store(base_PB + bins * num_blocks + block, counts, mask=bins < P)


@triton.jit
def _number_marks(number_PR, num_rows, destination, SCAN: tl.constexpr):
    """Numbers the marks of a destination; returns how many there are."""
    count = tl.full((), 0, tl.int32)
    for first in range(0, num_rows, SCAN):
        row = first + tl.arange(0, SCAN)
        at = number_PR + destination.to(tl.int64) * num_rows + row
        marked = tl.load(at, mask=row < num_rows, other=-1) >= 0
        ones = marked.to(tl.int32)
        tl.store(at, count + tl.cumsum(ones, 0) - ones, mask=(row < num_rows) & marked)
        count += tl.sum(ones)
    return count


@triton.jit
def _count_marks(number_PR, num_rows, counts_b, block, P: tl.constexpr, ROWS: tl.constexpr):
    """Counts the marks of a block of rows. Another program may be numbering them: all are ≥ 0."""
    row = block * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.int32)
    for v in range(P):
        at = number_PR + tl.full((), v, tl.int64) * num_rows + row
        number = tl.load(at, mask=row < num_rows, other=-1)
        total += (number >= 0).to(tl.int32)
    tl.store(counts_b + block, tl.sum(total))


@triton.jit(do_not_specialize=["num_blocks", "num_sources", "num_targets", "source_blocks"])
def _number(
    number_PU,
    number_PT,
    base_PB,
    counts_P3,
    source_counts_b,
    target_counts_b,
    num_blocks,
    num_sources,
    num_targets,
    source_blocks,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Numbers the marks of a destination and adds up its blocks; or counts those of some rows."""
    program = tl.program_id(0)
    if program < P:
        routes = tl.full((), 0, tl.int32)
        for first in range(0, num_blocks, SCAN):
            block = first + tl.arange(0, SCAN)
            at = base_PB + program * num_blocks + block
            counts = tl.load(at, mask=block < num_blocks, other=0)
            tl.store(at, routes + tl.cumsum(counts, 0) - counts, mask=block < num_blocks)
            routes += tl.sum(counts)
        rows = _number_marks(number_PU, num_sources, program, SCAN)
        targets = rows
        if number_PT is not None:
            targets = _number_marks(number_PT, num_targets, program, SCAN)
        tl.store(counts_P3 + 3 * program, rows.to(tl.int64))
        tl.store(counts_P3 + 3 * program + 1, routes.to(tl.int64))
        tl.store(counts_P3 + 3 * program + 2, targets.to(tl.int64))
    elif program < P + source_blocks:
        _count_marks(number_PU, num_sources, source_counts_b, program - P, P, ROWS)
    elif number_PT is not None:
        _count_marks(number_PT, num_targets, target_counts_b, program - P - source_blocks, P, ROWS)


@triton.jit(do_not_specialize=["num_routes", "num_blocks", "num_sources", "num_targets"])
def _describe(
    source_N,
    target_N,
    expert_N,
    slot_E,
    weight_N,
    destination_N,
    number_PU,
    number_PT,
    base_PB,
    counts_P3,
    integers_N4,
    weights_N4,
    place_N,
    num_routes,
    num_blocks,
    num_sources,
    num_targets,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Writes a block of routes at their places: destination, block, then the order of routes."""
    block = tl.program_id(0)
    route = block * BLOCK + tl.arange(0, BLOCK)
    live = route < num_routes
    to = tl.load(destination_N + route, mask=live, other=P)
    rank = rank_in_block(destination_N, to, block, num_routes, P, BLOCK, COMPARED)
    first_route = tl.zeros((BLOCK,), tl.int32)
    for v in range(P):
        routes = tl.load(counts_P3 + 3 * v + 1).to(tl.int32)
        first_route += tl.where(to > v, routes, 0)
    place = first_route + tl.load(base_PB + to * num_blocks + block, mask=live, other=0) + rank
    source = tl.load(source_N + route, mask=live, other=0)
    row = tl.load(number_PU + to.to(tl.int64) * num_sources + source, mask=live, other=0)
    target = row
    if number_PT is not None:
        at = tl.load(target_N + route, mask=live, other=0)
        target = tl.load(number_PT + to.to(tl.int64) * num_targets + at, mask=live, other=0)
    expert = tl.load(expert_N + route, mask=live, other=0)
    slot = tl.load(slot_E + expert, mask=live, other=0)
    word = integers_N4.dtype.element_ty
    at = place.to(tl.int64) * 4
    tl.store(integers_N4 + at, slot.to(word), mask=live)
    tl.store(integers_N4 + at + 1, row.to(word), mask=live)
    tl.store(integers_N4 + at + 2, target.to(word), mask=live)
    tl.store(weights_N4 + at + 3, tl.load(weight_N + route, mask=live, other=0.0), mask=live)
    tl.store(place_N + route, place, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _list(
    number_PR,
    counts_P3,
    counts_b,
    row_N,
    by_row_N,
    first_R,
    num_rows,
    COLUMN: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Lists the pairs of a block of rows, by destination and by row."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    before = tl.full((), 0, tl.int32)
    for first in range(0, block, SCAN):
        earlier = first + tl.arange(0, SCAN)
        before += tl.sum(tl.load(counts_b + earlier, mask=earlier < block, other=0))
    counts = tl.zeros((ROWS,), tl.int32)
    for v in range(P):
        at = number_PR + tl.full((), v, tl.int64) * num_rows + row
        counts += (tl.load(at, mask=live, other=-1) >= 0).to(tl.int32)
    listed = before + tl.cumsum(counts, 0) - counts
    tl.store(first_R + row, listed, mask=live)
    first_pair = tl.full((), 0, tl.int32)
    for v in range(P):
        at = number_PR + tl.full((), v, tl.int64) * num_rows + row
        number = tl.load(at, mask=live, other=-1)
        marked = live & (number >= 0)
        tl.store(row_N + first_pair + number, row, mask=marked)
        tl.store(by_row_N + listed, first_pair + number, mask=marked)
        listed += marked.to(tl.int32)
        first_pair += tl.load(counts_P3 + 3 * v + COLUMN).to(tl.int32)


@triton.jit(do_not_specialize=["num_routes"])
def _unpack(
    integers_R4,
    weights_R4,
    received_P3,
    places_3R,
    weight_R,
    num_routes,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads a block of routes that came: numbers of their source become numbers of all that came."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = route < num_routes
    end = tl.full((), 0, tl.int64)
    first_row, first_target = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for v in range(P):
        end += tl.load(received_P3 + 3 * v + 1)
        later = route >= end
        first_row += tl.where(later, tl.load(received_P3 + 3 * v), 0)
        first_target += tl.where(later, tl.load(received_P3 + 3 * v + 2), 0)
    at = route.to(tl.int64) * 4
    size = tl.full((), 1, tl.int64) * num_routes
    slot = tl.load(integers_R4 + at, mask=live, other=0).to(tl.int64)
    row = tl.load(integers_R4 + at + 1, mask=live, other=0).to(tl.int64)
    target = tl.load(integers_R4 + at + 2, mask=live, other=0).to(tl.int64)
    tl.store(places_3R + route, row + first_row, mask=live)
    tl.store(places_3R + size + route, slot, mask=live)
    tl.store(places_3R + 2 * size + route, target + first_target, mask=live)
    tl.store(weight_R + route, tl.load(weights_R4 + at + 3, mask=live, other=0.0), mask=live)


def count_sends(to: Addresses) -> tuple[SendCounts, BlockCounts]:
    """Returns what `kernels.sends.count_sends` does, and the counts of blocks for `pack_sends`."""
    num_routes, device = to.expert_N.shape[0], to.expert_N.device
    num_blocks = max(1, triton.cdiv(num_routes, _BLOCK))
    sizes = [to.num_sources] if to.into_sources else [to.num_sources, to.num_targets]
    marks = full((to.num_ranks * sum(sizes),), -1, dtype=int32, device=device)
    tables = [
        part.view(to.num_ranks, size)
        for part, size in zip(
            marks.split([to.num_ranks * size for size in sizes]), sizes, strict=True
        )
    ]
    number_PU, number_PT = tables[0], None if to.into_sources else tables[1]
    destination_N = empty(num_routes, dtype=int32, device=device)
    base_PB = empty((to.num_ranks, num_blocks), dtype=int32, device=device)
    counts_P3 = empty((to.num_ranks, 3), dtype=int64, device=device)
    bins = max(_LEAST_BINS, triton.next_power_of_2(to.num_ranks + 1))
    launch(
        _mark,
        num_blocks,
        *(to.source_N.contiguous(), to.target_N.contiguous(), to.expert_N.contiguous(), to.rank_E),
        *(destination_N, number_PU, number_PT, base_PB),
        *(num_routes, num_blocks, to.num_sources, to.num_targets),
        P=to.num_ranks,
        BINS=bins,
        BLOCK=_BLOCK,
    )
    blocks = [triton.cdiv(size, _ROWS) for size in sizes]
    row_counts = [empty(max(1, count), dtype=int32, device=device) for count in blocks]
    launch(
        _number,
        to.num_ranks + sum(blocks),
        *(number_PU, number_PT, base_PB, counts_P3, row_counts[0], row_counts[-1]),
        *(num_blocks, to.num_sources, to.num_targets, blocks[0]),
        P=to.num_ranks,
        ROWS=_ROWS,
        SCAN=_SCAN,
    )
    blocks = BlockCounts(base_PB, row_counts[0], None if to.into_sources else row_counts[1])
    return SendCounts(counts_P3, destination_N, number_PU, number_PT), blocks


def pack_sends(
    to: Addresses, counts: SendCounts, blocks: BlockCounts, weight_N: Tensor
) -> PackedSends:
    """Packs the routes by destination and lists the distinct rows, as `kernels.sends.pack_sends`."""
    num_routes = to.expert_N.shape[0]
    metadata_N4 = weight_N.new_empty(num_routes, 4)
    place_N = empty(num_routes, dtype=int32, device=weight_N.device)
    num_blocks = triton.cdiv(num_routes, _BLOCK)
    launch(
        _describe,
        num_blocks,
        *(to.source_N.contiguous(), to.target_N.contiguous(), to.expert_N.contiguous(), to.slot_E),
        *(weight_N.contiguous(), counts.destination_N, counts.number_PU, counts.number_PT),
        *(blocks.base_PB, counts.counts_P3, metadata_N4.view(INTEGERS[weight_N.dtype])),
        *(metadata_N4, place_N, num_routes, num_blocks, to.num_sources, to.num_targets),
        P=to.num_ranks,
        BLOCK=_BLOCK,
        COMPARED=_COMPARED,
    )
    sources = _list_pairs(counts.number_PU, counts.counts_P3, blocks.sources_b, num_routes, 0)
    targets = None
    if counts.number_PT is not None and blocks.targets_b is not None:
        targets = _list_pairs(counts.number_PT, counts.counts_P3, blocks.targets_b, num_routes, 2)
    return PackedSends(metadata_N4, place_N, sources, targets)


def _list_pairs(
    number_PR: Tensor, counts_P3: Tensor, counts_b: Tensor, num_routes: int, column: int
) -> RowPairs:
    num_ranks, num_rows = number_PR.shape
    row_N, by_row_N, first_R = (
        empty(size, dtype=int32, device=number_PR.device)
        for size in (num_routes, num_routes, num_rows)
    )
    launch(
        _list,
        triton.cdiv(num_rows, _ROWS),
        *(number_PR, counts_P3, counts_b, row_N, by_row_N, first_R, num_rows),
        COLUMN=column,
        P=num_ranks,
        ROWS=_ROWS,
        SCAN=_SCAN,
    )
    return RowPairs(row_N, by_row_N, first_R)


def unpack_sends(metadata_R4: Tensor, received_P3: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Unpacks received routes as `kernels.sends.unpack_sends`, without checking any number."""
    del num_slots
    metadata_R4, num_routes = metadata_R4.contiguous(), metadata_R4.shape[0]
    places_3R = empty((3, num_routes), dtype=int64, device=metadata_R4.device)
    weight_R = metadata_R4.new_empty(num_routes)
    launch(
        _unpack,
        triton.cdiv(num_routes, _BLOCK),
        *(metadata_R4.view(INTEGERS[metadata_R4.dtype]), metadata_R4, received_P3.contiguous()),
        *(places_3R, weight_R, num_routes),
        P=received_P3.shape[0],
        BLOCK=_BLOCK,
    )
    return places_3R, weight_R
