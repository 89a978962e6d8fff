"""Reads what the ranks of a node have written for each other into memory that all of them can read.

A rank writes a message into its own buffer: a header, and sections at places that are the same on
all ranks (`Layout`). Of these the others read what is theirs:
  out     rows, each once, and for every destination a list of those that it needs, with or without
          the routes that read them; the header counts rows, routes and targets by destination;
  back    rows by destination, with or without weights; the header says where each one's begin.
Who is to read when is not said here (distributed/symmetric/device_outbox.py).

On GPUs Triton's kernels read straight from the peers' memory (triton/peers.py); torch's operations
here stand for them on CPUs.

Legend: P ranks, W words of a header, M rows that came, R routes that came, N routes, U rows, D
width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .addresses import INTEGERS, ROUTES

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
    if _by_triton(peers):
        return _triton().read_headers(peers)
    words = peers.layout.words
    return torch.stack(
        [peers.part(rank, 0, words, torch.int64) for rank in range(len(peers.messages))]
    )


def take_rows(peers: Peers, header_PW: Tensor, column: int, num_rows: int, like: Tensor) -> Tensor:
    """Copies the rows that the ranks' lists have for this one, in the order of ranks, (M, D).

    Args:
        column: of the header's counts: rows or targets.
        like: has the rows' width and dtype.
    """
    if _by_triton(peers):
        return _triton().take_rows(peers, header_PW, column, num_rows, like)
    found = [like.new_empty(0, like.shape[1])]
    for rank, (first, count) in enumerate(_own_parts(peers, header_PW, column)):
        every = peers.part(
            rank, peers.layout.rows_at, int(header_PW[rank, NUM_ROWS]), like.dtype, like.shape[1]
        )
        listed = peers.part(rank, peers.layout.list_at, first + count, torch.int32)[first:]
        found.append(every.index_select(0, listed))
    taken = torch.cat(found)
    assert len(taken) == num_rows, f"{len(taken)} rows came, and {num_rows} were counted"
    return taken


def take_routes(
    peers: Peers, header_PW: Tensor, num_routes: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Reads the routes for this rank, in the order of ranks: source row, slot and target row as
    they came, (3, R) int64, and weights like `like`, (R,).
    """
    if _by_triton(peers):
        return _triton().take_routes(peers, header_PW, num_routes, like)
    counts_PP3 = _counts(peers, header_PW)
    own_P3 = counts_PP3[:, peers.rank]
    first_P3 = own_P3.cumsum(0) - own_P3
    places, weights = [like.new_empty(3, 0, dtype=torch.int64)], [like.new_empty(0)]
    for rank, (first, count) in enumerate(_own_parts(peers, header_PW, ROUTES)):
        metadata_R4 = peers.part(rank, peers.layout.routes_at, first + count, like.dtype, 4)[first:]
        integers_R3 = metadata_R4[:, :3].contiguous().view(INTEGERS[like.dtype]).long()
        slot_R, row_R, target_R = integers_R3.unbind(1)
        rows, _, targets = first_P3[rank]
        places.append(torch.stack((row_R + rows, slot_R, target_R + targets)))
        weights.append(metadata_R4[:, 3])
    places_3R, weight_R = torch.cat(places, 1), torch.cat(weights)
    assert len(weight_R) == num_routes, f"{len(weight_R)} routes came, not {num_routes}"
    return places_3R, weight_R


def sum_rows(
    peers: Peers, header_PW: Tensor, column: int, number_PU: Tensor, like: Tensor
) -> Tensor:
    """Adds up what the ranks have for every row of this one, in their order, (U, D).

    Args:
        column: of the headers' starts.
        number_PU: int32: a row's number among those that went to a rank, −1 where it did not.
    """
    if _by_triton(peers):
        return _triton().sum_rows(peers, header_PW, column, number_PU, like)
    starts_P = _starts(peers, header_PW)[:, column, peers.rank]
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    sums_UD = torch.zeros(number_PU.shape[1], like.shape[1], dtype=dtype, device=like.device)
    for rank, number_U in enumerate(number_PU):
        went = (number_U >= 0).nonzero().squeeze(1)
        place = number_U[went].long() + starts_P[rank]
        count = int(header_PW[rank, NUM_ROWS])
        rows = peers.part(rank, peers.layout.rows_at, count, like.dtype, like.shape[1])
        sums_UD.index_add_(0, went, rows.index_select(0, place).to(dtype))
    return sums_UD.to(like.dtype)


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
    if _by_triton(peers):
        return _triton().take_weights(peers, header_PW, destination_N, place_N, counts_P3, like)
    starts_P = _starts(peers, header_PW)[:, ROUTES, peers.rank]
    first_P = counts_P3[:, ROUTES].cumsum(0) - counts_P3[:, ROUTES]
    found_N = like.new_empty(len(destination_N))
    for rank in range(len(peers.messages)):
        mine = (destination_N == rank).nonzero().squeeze(1)
        count = int(header_PW[rank, NUM_ROUTES])
        weights = peers.part(rank, peers.layout.routes_at, count, like.dtype)
        found_N[mine] = weights[place_N[mine].long() - first_P[rank] + starts_P[rank]]
    return found_N


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
    return import_module(".triton.peers", __package__)
