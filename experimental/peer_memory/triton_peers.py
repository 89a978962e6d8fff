"""Reads what the ranks of a node have written for each other, straight from their memory.

One kernel each; what they do is said in peers.py. Programs read a local copy of the
headers, and of the peers' memory only lists, routes and rows, of which headers may promise more than
there is room for: what would lie past a section is not read. Sums go over the ranks in their
order, in float32 (float64 for float64), so that two runs agree bit for bit.

Legend: P ranks, W words of a header, M room for rows, R room for routes, N routes, U rows, D width.
"""

from torch import Tensor, empty, float64, int64
from torch import bool as boolean

from experimental.peer_memory.peers import NUM_ROUTES, NUM_ROWS, TABLE, Peers, Room
from moebius.kernels.calls import INTEGERS, ROUTES
from moebius.kernels.triton.guard import launch, tl, triton

_BLOCK = 256  # routes of a program
_ROWS = 8
_COLUMNS = 256


@triton.jit
def _read_headers(address_P, header_PW, W: tl.constexpr, WORDS: tl.constexpr):
    """Copies the header of a rank."""
    rank = tl.program_id(0)
    word = tl.arange(0, WORDS)
    header = tl.load(address_P + rank).to(tl.pointer_type(tl.int64))
    values = tl.load(header + word, mask=word < W, other=0)
    tl.store(header_PW + rank * W + word, values, mask=word < W)


@triton.jit
def _source_of(
    place,
    header_PW,
    address_P,
    me,
    COLUMN: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
):
    """Whose rows (or routes) stand at these places among all that come here: the message's address,
    the place in the sender's own list; and how many come.
    """
    address = tl.zeros_like(place).to(tl.int64)
    listed = tl.zeros_like(place).to(tl.int64)
    start = tl.full((), 0, tl.int64)
    for p in range(P):
        first = tl.full((), 0, tl.int64)
        for q in range(P):
            count = tl.load(header_PW + p * W + T + 3 * q + COLUMN)
            first += tl.where(q < me, count, 0)
        count = tl.load(header_PW + p * W + T + 3 * me + COLUMN)
        here = (place >= start) & (place < start + count)
        address = tl.where(here, tl.load(address_P + p), address)
        listed = tl.where(here, first + place - start, listed)
        start += count
    return address, listed, start


@triton.jit(do_not_specialize=["num_rows", "me", "list_at", "rows_at"])
def _take_rows(
    address_P,
    header_PW,
    out_MD,
    num_rows,
    me,
    list_at,
    rows_at,
    COLUMN: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies a tile of rows from whoever has them."""
    tiles: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    place = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    address, listed, came = _source_of(place, header_PW, address_P, me, COLUMN, P, W, T)
    live = (place < num_rows) & (place < came)
    lists = (address + list_at).to(tl.pointer_type(tl.int32))
    row = tl.load(lists + listed, mask=live, other=0).to(tl.int64)
    rows = (address + rows_at).to(tl.pointer_type(out_MD.dtype.element_ty))
    mask = live[:, None] & (column < D)[None, :]
    values = tl.load(rows[:, None] + (row * D)[:, None] + column[None, :], mask=mask)
    tl.store(out_MD + place.to(tl.int64)[:, None] * D + column[None, :], values, mask=mask)


@triton.jit(
    do_not_specialize=["num_routes", "num_rows", "num_targets", "num_slots", "me", "routes_at"]
)
def _take_routes(
    address_P,
    header_PW,
    places_3R,
    weight_R,
    starts_3P1,
    is_over,
    num_routes,
    num_rows,
    num_targets,
    num_slots,
    me,
    routes_at,
    INTEGER: tl.constexpr,
    COLUMN: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads a block of routes from whoever has them; numbers of theirs become numbers of all."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address, listed, _ = _source_of(route, header_PW, address_P, me, COLUMN, P, W, T)
    first_row, first_target = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    rows, routes = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    targets = tl.full((), 0, tl.int64)
    is_first = tl.program_id(0) == 0
    for p in range(P):
        at = header_PW + p * W + T + 3 * me
        tl.store(starts_3P1 + p, rows, mask=is_first)
        tl.store(starts_3P1 + (P + 1) + p, routes, mask=is_first)
        tl.store(starts_3P1 + 2 * (P + 1) + p, targets, mask=is_first)
        rows += tl.load(at)
        routes += tl.load(at + 1)
        targets += tl.load(at + 2)
        first_row += tl.where(route >= routes, tl.load(at), 0)
        first_target += tl.where(route >= routes, tl.load(at + 2), 0)
    over = (rows > num_rows) | (routes > num_routes) | (targets > num_targets)
    tl.store(starts_3P1 + P, rows, mask=is_first)
    tl.store(starts_3P1 + (P + 1) + P, routes, mask=is_first)
    tl.store(starts_3P1 + 2 * (P + 1) + P, targets, mask=is_first)
    tl.store(is_over, over, mask=is_first)
    came = (route < num_routes) & (route < tl.where(over, 0, routes))
    integers = (address + routes_at).to(tl.pointer_type(INTEGER)) + 4 * listed
    weights = (address + routes_at).to(tl.pointer_type(weight_R.dtype.element_ty)) + 4 * listed
    size = tl.full((), 1, tl.int64) * num_routes
    slot = tl.load(integers, mask=came, other=0).to(tl.int64)
    row = tl.load(integers + 1, mask=came, other=0).to(tl.int64) + first_row
    target = tl.load(integers + 2, mask=came, other=0).to(tl.int64) + first_target
    live = route < num_routes
    tl.store(places_3R + route, tl.where(came, row, num_rows), mask=live)
    tl.store(places_3R + size + route, tl.where(came, slot, num_slots), mask=live)
    tl.store(places_3R + 2 * size + route, tl.where(came, target, num_targets), mask=live)
    tl.store(weight_R + route, tl.load(weights + 3, mask=came, other=0.0), mask=live)


@triton.jit(do_not_specialize=["num_rows", "me", "rows_at"])
def _sum_rows(
    address_P,
    header_PW,
    number_PU,
    out_UD,
    num_rows,
    me,
    rows_at,
    COLUMN: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up what the ranks have for a tile of rows."""
    tiles: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    live = row < num_rows
    total = tl.zeros((ROWS, COLUMNS), SUM)
    for p in range(P):
        number = tl.load(number_PU + tl.full((), p, tl.int64) * num_rows + row, mask=live, other=-1)
        start = tl.load(header_PW + p * W + T + COLUMN * (P + 1) + me)
        rows = (tl.load(address_P + p) + rows_at).to(tl.pointer_type(out_UD.dtype.element_ty))
        there = start + number < tl.load(header_PW + p * W + NUM_ROWS)
        mask = ((number >= 0) & there)[:, None] & (column < D)[None, :]
        at = (start + number) * D
        values = tl.load(rows + at[:, None] + column[None, :], mask=mask, other=0.0)
        total = tl.where(mask, total + values.to(SUM), total)
    mask = live[:, None] & (column < D)[None, :]
    out = out_UD + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out, total.to(out_UD.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_routes", "me", "routes_at"])
def _take_weights(
    address_P,
    header_PW,
    destination_N,
    place_N,
    counts_P3,
    out_N,
    num_routes,
    me,
    routes_at,
    COLUMN: tl.constexpr,
    NUM_ROUTES: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fetches the values of a block of routes from the ranks that they went to."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = route < num_routes
    to = tl.load(destination_N + route, mask=live, other=0)
    at = tl.load(place_N + route, mask=live, other=0).to(tl.int64)
    address, room = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for p in range(P):
        start = tl.load(header_PW + p * W + T + COLUMN * (P + 1) + me)
        address = tl.where(to == p, tl.load(address_P + p), address)
        room = tl.where(to == p, tl.load(header_PW + p * W + NUM_ROUTES), room)
        at += tl.where(to == p, start, 0)
        at -= tl.where(to > p, tl.load(counts_P3 + 3 * p + COLUMN), 0)
    values = (address + routes_at).to(tl.pointer_type(out_N.dtype.element_ty))
    tl.store(out_N + route, tl.load(values + at, mask=live & (at < room), other=0.0), mask=live)


def read_headers(peers: Peers) -> Tensor:
    """Copies all ranks' headers; as `peers.read_headers`."""
    words, num_ranks = peers.layout.words, peers.layout.num_ranks
    header_PW = empty((num_ranks, words), dtype=int64, device=peers.address_P.device)
    launch(
        _read_headers,
        num_ranks,
        *(peers.address_P, header_PW),
        W=words,
        WORDS=triton.next_power_of_2(words),
    )
    return header_PW


def take_rows(peers: Peers, header_PW: Tensor, column: int, num_rows: int, like: Tensor) -> Tensor:
    """Copies the rows that the ranks' lists have for this one; as `peers.take_rows`."""
    width, layout = like.shape[1], peers.layout
    out_MD, columns = like.new_empty(num_rows, width), _columns(width)
    launch(
        _take_rows,
        triton.cdiv(num_rows, _ROWS) * triton.cdiv(width, columns),
        *(peers.address_P, header_PW, out_MD, num_rows, peers.rank),
        *(layout.list_at, layout.rows_at),
        COLUMN=column,
        **_shape(peers),
        D=width,
        ROWS=_ROWS,
        COLUMNS=columns,
    )
    return out_MD


def take_routes(
    peers: Peers, header_PW: Tensor, room: Room, num_slots: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads the routes for this rank: the fields of a `ReceivedRoutes`."""
    places_3R = empty((3, room.routes), dtype=int64, device=like.device)
    starts_3P1 = empty((3, peers.layout.num_ranks + 1), dtype=int64, device=like.device)
    is_over = empty((), dtype=boolean, device=like.device)
    weight_R = like.new_empty(room.routes)
    is_double = INTEGERS[like.dtype] is int64
    launch(
        _take_routes,
        max(1, triton.cdiv(room.routes, _BLOCK)),
        *(peers.address_P, header_PW, places_3R, weight_R, starts_3P1, is_over),
        *(room.routes, room.rows, room.targets, num_slots),
        *(peers.rank, peers.layout.routes_at),
        INTEGER=tl.int64 if is_double else tl.int32,
        COLUMN=ROUTES,
        **_shape(peers),
        BLOCK=_BLOCK,
    )
    return places_3R, weight_R, starts_3P1, is_over


def sum_rows(
    peers: Peers, header_PW: Tensor, column: int, number_PU: Tensor, like: Tensor
) -> Tensor:
    """Adds up what the ranks have for every row of this one; as `peers.sum_rows`."""
    width, num_rows = like.shape[1], number_PU.shape[1]
    out_UD, columns = like.new_empty(num_rows, width), _columns(width)
    launch(
        _sum_rows,
        triton.cdiv(num_rows, _ROWS) * triton.cdiv(width, columns),
        *(peers.address_P, header_PW, number_PU, out_UD, num_rows, peers.rank),
        peers.layout.rows_at,
        COLUMN=column,
        NUM_ROWS=NUM_ROWS,
        **_shape(peers),
        D=width,
        SUM=tl.float64 if like.dtype is float64 else tl.float32,
        ROWS=_ROWS,
        COLUMNS=columns,
    )
    return out_UD


def take_weights(
    peers: Peers,
    header_PW: Tensor,
    destination_N: Tensor,
    place_N: Tensor,
    counts_P3: Tensor,
    like: Tensor,
) -> Tensor:
    """Fetches what the ranks say of every route of this one; as `peers.take_weights`."""
    num_routes = destination_N.shape[0]
    out_N = like.new_empty(num_routes)
    launch(
        _take_weights,
        triton.cdiv(num_routes, _BLOCK),
        *(peers.address_P, header_PW, destination_N, place_N, counts_P3, out_N),
        *(num_routes, peers.rank, peers.layout.routes_at),
        COLUMN=ROUTES,
        NUM_ROUTES=NUM_ROUTES,
        **_shape(peers),
        BLOCK=_BLOCK,
    )
    return out_N


def _shape(peers: Peers) -> dict[str, int]:
    return {"P": peers.layout.num_ranks, "W": peers.layout.words, "T": TABLE}


def _columns(width: int) -> int:
    return min(_COLUMNS, max(16, triton.next_power_of_2(width)))
