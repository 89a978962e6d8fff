"""Reads what the ranks of a node have written for each other into memory that all of them can read.

A rank writes a message into its own buffer: a header, and sections at places that are the same on
all ranks (`Layout`). Of these the others read what is theirs:
  out     rows, each once, and for every destination a list of those that it needs, with or without
          the routes that read them; the header counts rows, routes and targets by destination;
  back    rows by destination, with or without weights; the header says where each one's begin.
Who is to read when is not said here (peer_outbox.py).

On GPUs Triton's kernels read straight from the peers' memory (triton_peers.py); torch's operations
here stand for them on CPUs.

What comes is written where there is room for it, which may be more than comes (`Room`): so a
caller who does not know the numbers need not ask. What is more than there is room for is left out,
and said; nothing is read or written outside of a section, whatever the headers say.

Legend: P ranks, W words of a header, M room for rows, R room for routes, N routes, U rows, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebius.kernels.calls import INTEGERS, ROUTES, ROWS, TARGETS

# Words of a header, int64. What two ranks must agree about is compared by the reader.
NUMBER, ROW_BYTES, WEIGHT_BYTES, NUM_ROWS, NUM_TARGETS, NUM_ROUTES, TABLE = range(7)
_ALIGNED = 256


@dataclass(frozen=True)
class Layout:
    """Says where the sections of a message lie, in bytes; equal on all ranks of a group.

    Args:
        num_ranks: of the group.
        routes: for how many there is room.
        row_bytes: for all rows together.
    """

    num_ranks: int
    routes: int
    row_bytes: int

    @property
    def words(self) -> int:
        """Returns the words of a header: of an out message it ends with counts (P, 3), of a back
        message with starts (3, P + 1).
        """
        return TABLE + 3 * (self.num_ranks + 1)

    @property
    def list_at(self) -> int:
        """Returns where the list of rows begins, int32."""
        return _aligned(8 * self.words)

    @property
    def routes_at(self) -> int:
        """Returns where the routes' metadata begin, or their weights: at most 32 bytes each."""
        return _aligned(self.list_at + 4 * self.routes)

    @property
    def rows_at(self) -> int:
        """Returns where the rows begin."""
        return _aligned(self.routes_at + 32 * self.routes)

    @property
    def num_bytes(self) -> int:
        """Returns the length of a message."""
        return _aligned(self.rows_at + self.row_bytes)


class Room(NamedTuple):
    """Says for how many rows, routes and target rows there is room; in the order of a header."""

    rows: int
    routes: int
    targets: int


class ReceivedRoutes(NamedTuple):
    """Routes for this rank, in the order of ranks; a place that is unused has the first row, slot and
    target row past the end, and the weight 0.
    """

    places_3R: Tensor  # int64: source row and target row as they came, and between them the slot
    weight_R: Tensor
    starts_3P1: Tensor  # int64: where every rank's rows, routes and targets begin, and end
    is_over: Tensor  # bool, scalar: something had no room, and then all places are unused


@dataclass(frozen=True)
class Peers:
    """Holds the messages of all ranks, as this one sees them."""

    layout: Layout
    messages: Sequence[Tensor]  # uint8, by rank
    address_P: Tensor  # int64, on the device: of the messages
    rank: int  # this one

    def part(
        self, rank: int, at: int, count: int, dtype: torch.dtype, width: int | None = None
    ) -> Tensor:
        """Returns a rank's section as a tensor of so many values, or rows of a width."""
        length = count * (width or 1) * dtype.itemsize
        values = self.messages[rank][at : at + length].view(dtype)
        return values if width is None else values.view(count, width)


def read_headers(peers: Peers) -> Tensor:
    """Copies all ranks' headers, (P, W) int64."""
    return torch.ops.moebius.read_peer_headers(*_flat(peers))


def take_rows(peers: Peers, header_PW: Tensor, column: int, num_rows: int, like: Tensor) -> Tensor:
    """Copies the rows that the ranks' lists have for this one, in the order of ranks, (M, D).

    Args:
        column: of the header's counts: rows or targets.
        num_rows: M; rows past those that came are left as they are.
        like: has the rows' width and dtype.
    """
    return torch.ops.moebius.take_peer_rows(*_flat(peers), header_PW, column, num_rows, like)


def take_routes(
    peers: Peers, header_PW: Tensor, room: Room, num_slots: int, like: Tensor
) -> ReceivedRoutes:
    """Reads the routes for this rank; their weights are like `like`."""
    found = torch.ops.moebius.take_peer_routes(*_flat(peers), header_PW, room, num_slots, like)
    return ReceivedRoutes(*found)


def sum_rows(
    peers: Peers, header_PW: Tensor, column: int, number_PU: Tensor, like: Tensor
) -> Tensor:
    """Adds up what the ranks have for every row of this one, in their order, (U, D).

    Args:
        column: of the headers' starts.
        number_PU: int32: a row's number among those that went to a rank, −1 where it did not.
    """
    return torch.ops.moebius.sum_peer_rows(*_flat(peers), header_PW, column, number_PU, like)


def take_weights(
    peers: Peers,
    header_PW: Tensor,
    destination_N: Tensor,
    place_N: Tensor,
    counts_P3: Tensor,
    like: Tensor,
) -> Tensor:
    """Fetches what the ranks say of every route of this one, like `like`, (N,).

    Args:
        destination_N, place_N: int32: a route's rank, and where it stood among all that were sent.
        counts_P3: int64: what was sent to every rank.
    """
    return torch.ops.moebius.take_peer_weights(
        *_flat(peers), header_PW, destination_N, place_N, counts_P3, like
    )


# As operators: flat arguments, an implementation for CPUs and GPUs, and shapes for tracers ------------------------------


_LIBRARY = torch.library.Library("moebius", "FRAGMENT")


def _operator(name: str, *schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of `Peers` as an operator of that name, for CPUs and GPUs.

    Args:
        schema: the other arguments, and at last what is returned.

    Without `custom_op`, whose checks of every call would cost as much as the kernel.
    """
    *more, returned = schema
    given = ", ".join(("Tensor address_P, Tensor[] messages, int[] layout, int rank", *more))
    _LIBRARY.define(f"{name}({given}) -> {returned}")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            address_P: Tensor, messages: list[Tensor], layout: list[int], rank: int, *rest: Any
        ) -> Any:
            return function(Peers(Layout(*layout), messages, address_P, rank), *rest)

        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, call, device)
        return function

    return register


def _flat(peers: Peers) -> tuple:
    layout = peers.layout
    sizes = [layout.num_ranks, layout.routes, layout.row_bytes]
    return peers.address_P, list(peers.messages), sizes, peers.rank


@_operator("read_peer_headers", "Tensor")
def _read_headers(peers: Peers) -> Tensor:
    if _by_triton(peers):
        return _triton().read_headers(peers)
    words = peers.layout.words
    return torch.stack(
        [peers.part(rank, 0, words, torch.int64) for rank in range(len(peers.messages))]
    )


@_operator("take_peer_rows", "Tensor header_PW, int column, int num_rows, Tensor like", "Tensor")
def _take_rows(peers: Peers, header_PW: Tensor, column: int, num_rows: int, like: Tensor) -> Tensor:
    if _by_triton(peers):
        return _triton().take_rows(peers, header_PW, column, num_rows, like)
    taken_MD, end = like.new_empty(num_rows, like.shape[1]), 0
    for rank, (first, count) in enumerate(_own_parts(peers, header_PW, column)):
        every = peers.part(
            rank, peers.layout.rows_at, int(header_PW[rank, NUM_ROWS]), like.dtype, like.shape[1]
        )
        listed = peers.part(rank, peers.layout.list_at, first + count, torch.int32)[first:]
        here_MD = taken_MD[end : end + count]
        here_MD.copy_(every.index_select(0, listed[: len(here_MD)]))
        end += count
    return taken_MD


@_operator(
    "take_peer_routes",
    "Tensor header_PW, int[] room, int num_slots, Tensor like",
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _take_routes(
    peers: Peers, header_PW: Tensor, sizes: list[int], num_slots: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    room = Room(*sizes)
    if _by_triton(peers):
        return _triton().take_routes(peers, header_PW, room, num_slots, like)
    own_P3 = _counts(peers, header_PW)[:, peers.rank]
    starts_3P1 = own_P3.new_zeros(3, peers.layout.num_ranks + 1)
    starts_3P1[:, 1:] = own_P3.cumsum(0).T
    is_over = (starts_3P1[:, -1] > starts_3P1.new_tensor(room)).any()
    unused = starts_3P1.new_tensor([[room.rows], [num_slots], [room.targets]])
    places_3R, weight_R = unused.repeat(1, room.routes), like.new_zeros(room.routes)
    parts = [] if is_over else _own_parts(peers, header_PW, ROUTES)
    for rank, (first, count) in enumerate(parts):
        metadata_C4 = peers.part(rank, peers.layout.routes_at, first + count, like.dtype, 4)[first:]
        integers_C3 = metadata_C4[:, :3].contiguous().view(INTEGERS[like.dtype]).long()
        slot_C, row_C, target_C = integers_C3.unbind(1)
        begin = int(starts_3P1[ROUTES, rank])
        places_3R[:, begin : begin + count] = torch.stack(
            (row_C + starts_3P1[ROWS, rank], slot_C, target_C + starts_3P1[TARGETS, rank])
        )
        weight_R[begin : begin + count] = metadata_C4[:, 3]
    return places_3R, weight_R, starts_3P1, is_over


@_operator("sum_peer_rows", "Tensor header_PW, int column, Tensor number_PU, Tensor like", "Tensor")
def _sum_rows(
    peers: Peers, header_PW: Tensor, column: int, number_PU: Tensor, like: Tensor
) -> Tensor:
    if _by_triton(peers):
        return _triton().sum_rows(peers, header_PW, column, number_PU, like)
    starts_P = _starts(peers, header_PW)[:, column, peers.rank]
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    sums_UD = torch.zeros(number_PU.shape[1], like.shape[1], dtype=dtype, device=like.device)
    for rank, number_U in enumerate(number_PU):
        count = int(header_PW[rank, NUM_ROWS])
        place_U = number_U.long() + starts_P[rank]
        went = ((number_U >= 0) & (place_U < count)).nonzero().squeeze(1)
        place = place_U[went]
        rows = peers.part(rank, peers.layout.rows_at, count, like.dtype, like.shape[1])
        sums_UD.index_add_(0, went, rows.index_select(0, place).to(dtype))
    return sums_UD.to(like.dtype)


@_operator(
    "take_peer_weights",
    "Tensor header_PW, Tensor destination_N, Tensor place_N, Tensor counts_P3, Tensor like",
    "Tensor",
)
def _take_weights(
    peers: Peers,
    header_PW: Tensor,
    destination_N: Tensor,
    place_N: Tensor,
    counts_P3: Tensor,
    like: Tensor,
) -> Tensor:
    if _by_triton(peers):
        return _triton().take_weights(peers, header_PW, destination_N, place_N, counts_P3, like)
    starts_P = _starts(peers, header_PW)[:, ROUTES, peers.rank]
    first_P = counts_P3[:, ROUTES].cumsum(0) - counts_P3[:, ROUTES]
    found_N = like.new_zeros(len(destination_N))
    for rank in range(len(peers.messages)):
        count = int(header_PW[rank, NUM_ROUTES])
        place_N_there = place_N.long() - first_P[rank] + starts_P[rank]
        mine = ((destination_N == rank) & (place_N_there < count)).nonzero().squeeze(1)
        weights = peers.part(rank, peers.layout.routes_at, count, like.dtype)
        found_N[mine] = weights[place_N_there[mine]]
    return found_N


@torch.library.register_fake("moebius::read_peer_headers")
def _(address_P: Tensor, messages: list[Tensor], layout: list[int], rank: int) -> Tensor:
    return address_P.new_empty(layout[0], Layout(*layout).words)


@torch.library.register_fake("moebius::take_peer_rows")
def _(*given: Any) -> Tensor:
    *_, num_rows, like = given
    return like.new_empty(num_rows, like.shape[1])


@torch.library.register_fake("moebius::take_peer_routes")
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, header_PW, room, _, like = given
    return (
        header_PW.new_empty(3, room[1]),
        like.new_empty(room[1]),
        header_PW.new_empty(3, header_PW.shape[0] + 1),
        header_PW.new_empty((), dtype=torch.bool),
    )


@torch.library.register_fake("moebius::sum_peer_rows")
def _(*given: Any) -> Tensor:
    *_, number_PU, like = given
    return like.new_empty(number_PU.shape[1], like.shape[1])


@torch.library.register_fake("moebius::take_peer_weights")
def _(*given: Any) -> Tensor:
    *_, destination_N, _, _, like = given
    return like.new_empty(destination_N.shape[0])


def _counts(peers: Peers, header_PW: Tensor) -> Tensor:
    """(P, P, 3): rows, routes and targets of every rank for every other."""
    num_ranks = peers.layout.num_ranks
    return header_PW[:, TABLE : TABLE + 3 * num_ranks].view(num_ranks, num_ranks, 3)


def _starts(peers: Peers, header_PW: Tensor) -> Tensor:
    """(P, 3, P + 1): where every rank's rows, routes and targets begin at every other, and end."""
    return header_PW[:, TABLE:].view(peers.layout.num_ranks, 3, peers.layout.num_ranks + 1)


def _own_parts(peers: Peers, header_PW: Tensor, column: int) -> list[tuple[int, int]]:
    """By rank: where this one's part of its list begins, and how long it is."""
    counts_PP = _counts(peers, header_PW)[:, :, column]
    first_PP = counts_PP.cumsum(1) - counts_PP
    return list(
        zip(first_PP[:, peers.rank].tolist(), counts_PP[:, peers.rank].tolist(), strict=True)
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _by_triton(peers: Peers) -> bool:
    return peers.address_P.device.type == "cuda"


def _triton() -> Any:
    return import_module("experimental.peer_memory.triton_peers")
