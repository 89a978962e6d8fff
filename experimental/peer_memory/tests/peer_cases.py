"""Messages of several ranks in one process, and what each rank is to find in them, by loops."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from send_cases import CASES, addresses
from torch import Tensor

from experimental.peer_memory import peers
from experimental.peer_memory.peers import Layout, Peers, ReceivedRoutes, Room
from moebius.kernels import sends
from moebius.kernels.calls import Addresses, PackedSends, SendCounts

ONE_CHUNK = [name for name in CASES if CASES[name][6] == 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@dataclass
class Ranks:
    """What every rank of a group has sent."""

    to: list[Addresses]
    counts: list[SendCounts]
    packed: list[PackedSends]
    rows: list[Tensor]
    weights: list[Tensor]


def ranks_of(name: str, dtype: torch.dtype, width: int) -> Ranks:
    """Every rank has routes of its own; one has none, and one has another number of rows."""
    base = addresses(name)
    found = Ranks([], [], [], [], [])
    weight_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    for rank in range(base.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        to = addresses(name, shuffled=rank == 0)
        if rank == 1:
            to = _first(to, 0)
        elif rank == 2:
            to = _first(to, len(to.expert_N) // 2)
        expert_N = to.expert_N[torch.randperm(len(to.expert_N), generator=generator)]
        to = replace(to, expert_N=expert_N)
        weight_N = torch.rand(len(to.expert_N), generator=generator, dtype=weight_dtype)
        counts = sends.count_sends(to)
        found.to.append(to)
        found.counts.append(counts)
        found.packed.append(sends.pack_sends(to, counts, weight_N))
        found.rows.append(torch.randn(to.num_sources, width, generator=generator).to(dtype))
        found.weights.append(weight_N)
    return found


def _first(to: Addresses, count: int) -> Addresses:
    source_N = to.source_N[:count]
    target_N = source_N if to.into_sources else to.target_N[:count]
    return replace(to, source_N=source_N, target_N=target_N, expert_N=to.expert_N[:count])


def message(layout: Layout, head: dict[int, int], table: Tensor) -> Tensor:
    """A message whose header has these words and this table; the rest is what nobody should read."""
    own = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
    words = own[: 8 * layout.words].view(torch.int64)
    for word, value in head.items():
        words[word] = value
    words[peers.TABLE : peers.TABLE + table.numel()] = table.flatten()
    return own


def write(own: Tensor, at: int, section: Tensor) -> None:
    """Writes a section."""
    raw = section.contiguous().flatten().view(torch.uint8)
    own[at : at + len(raw)] = raw


def out_messages(given: Ranks, *, targets: bool = False) -> list[Peers]:
    """Rows and routes of every rank, as each of them sees all; `targets`: rows by target instead."""
    num_ranks = len(given.to)
    layout = Layout(
        num_ranks,
        max(1, *(len(to.expert_N) for to in given.to)),
        max(rows.numel() * rows.element_size() for rows in given.rows) + 64,
    )
    messages = []
    for to, counts, packed, rows in zip(
        given.to, given.counts, given.packed, given.rows, strict=True
    ):
        head = {peers.NUM_ROWS: len(rows), peers.NUM_ROUTES: len(to.expert_N)}
        own = message(layout, head, counts.counts_V3)
        lists = packed.targets if targets and packed.targets is not None else packed.sources
        write(own, layout.list_at, lists.row_N)
        if not targets:
            write(own, layout.routes_at, packed.metadata_N4)
        write(own, layout.rows_at, rows)
        messages.append(own)
    address_P = torch.tensor([own.data_ptr() for own in messages])
    return [Peers(layout, messages, address_P, rank) for rank in range(num_ranks)]


def starts_of(given: Ranks, rank: int) -> Tensor:
    """Where every source's rows, routes and targets begin among those that come to a rank."""
    came_P3 = torch.stack([counts.counts_V3[rank] for counts in given.counts])
    return torch.cat((torch.zeros(1, 3, dtype=torch.int64), came_P3.cumsum(0))).T.contiguous()


def back_messages(given: Ranks, column: int, width: int, dtype: torch.dtype) -> list[Peers]:
    """Rows by source, with weights, of every rank: random ones."""
    num_ranks = len(given.to)
    weight_dtype = given.weights[0].dtype
    starts = [starts_of(given, rank) for rank in range(num_ranks)]
    rows = [
        torch.randn(
            int(start[column, -1]), width, generator=torch.Generator().manual_seed(rank)
        ).to(dtype)
        for rank, start in enumerate(starts)
    ]
    weights = [torch.rand(int(start[1, -1]), dtype=weight_dtype) for start in starts]
    layout = Layout(
        num_ranks,
        max(1, *(len(each) for each in weights)),
        max(each.numel() * each.element_size() for each in rows) + 8,
    )
    messages = []
    for rank in range(num_ranks):
        head = {peers.NUM_ROWS: len(rows[rank]), peers.NUM_ROUTES: len(weights[rank])}
        own = message(layout, head, starts[rank])
        write(own, layout.rows_at, rows[rank])
        write(own, layout.routes_at, weights[rank])
        messages.append(own)
    address_P = torch.tensor([own.data_ptr() for own in messages])
    return [Peers(layout, messages, address_P, rank) for rank in range(num_ranks)]


def expected_rows(given: Ranks, rank: int, *, targets: bool = False) -> Tensor:
    """The rows that come to a rank."""
    found = [given.rows[0][:0]]
    for to, rows in zip(given.to, given.rows, strict=True):
        index_N = to.target_N if targets else to.source_N
        wanted = sorted(
            {
                int(index)
                for index, expert in zip(index_N, to.expert_N, strict=True)
                if to.rank_E[expert] == rank
            }
        )
        found += [rows[index : index + 1] for index in wanted]
    return torch.cat(found)


def expected_routes(given: Ranks, rank: int) -> tuple[Tensor, Tensor]:
    """The routes that come to a rank: source, slot, target as they come, and weights."""
    places, weights, first_row, first_target = [], [], 0, 0
    for to, weight_N in zip(given.to, given.weights, strict=True):
        here = [n for n, expert in enumerate(to.expert_N) if to.rank_E[expert] == rank]
        rows = sorted({int(to.source_N[n]) for n in here})
        targets = sorted({int(to.target_N[n]) for n in here})
        for n in here:
            places.append(
                (
                    first_row + rows.index(int(to.source_N[n])),
                    int(to.slot_E[to.expert_N[n]]),
                    first_target + targets.index(int(to.target_N[n])),
                )
            )
            weights.append(weight_N[n])
        first_row, first_target = first_row + len(rows), first_target + len(targets)
    if not places:
        return torch.zeros(3, 0, dtype=torch.int64), given.weights[0][:0]
    return torch.tensor(places).T, torch.stack(weights)


def check_out(way: Any, name: str, dtype: torch.dtype, width: int) -> None:
    """Compares what every rank reads of rows and routes with the loops.

    `way`: a module with the functions of peers.py.
    """
    given = ranks_of(name, dtype, width)
    for own in out_messages(given):
        header_PW = way.read_headers(own)
        for rank, message_of in enumerate(own.messages):
            words = message_of[: 8 * own.layout.words].view(torch.int64)
            assert torch.equal(header_PW[rank], words)
        wanted = expected_rows(given, own.rank)
        taken = way.take_rows(own, header_PW, 0, len(wanted), given.rows[0][:0])
        assert torch.equal(taken, wanted)
        roomy = way.take_rows(own, header_PW, 0, len(wanted) + 9, given.rows[0][:0])
        assert torch.equal(roomy[:-9], wanted)
        tight = way.take_rows(own, header_PW, 0, len(wanted) // 2, given.rows[0][:0])
        assert torch.equal(tight, wanted[: len(wanted) // 2])
        check_routes(way, given, own, header_PW)
    if any(to.num_targets > to.num_sources for to in given.to):
        return  # there are not as many rows as targets in these messages
    for own in out_messages(given, targets=True):
        wanted = expected_rows(given, own.rank, targets=True)
        taken = way.take_rows(own, way.read_headers(own), 2, len(wanted), given.rows[0][:0])
        assert torch.equal(taken, wanted)


def check_routes(way: Any, given: Ranks, own: Peers, header_PW: Tensor) -> None:
    """Compares the routes that a rank reads where there is just room, more of it, and too little."""
    places, weights = expected_routes(given, own.rank)
    starts, num_slots = starts_of(given, own.rank), 9
    needed = Room(*starts[:, -1].tolist())
    like = given.weights[0][:0]
    for more in (0, 300):
        room = Room(*(count + more for count in needed))
        found = ReceivedRoutes(*way.take_routes(own, header_PW, room, num_slots, like))
        unused = torch.tensor([[room.rows], [num_slots], [room.targets]]).expand(3, more)
        assert torch.equal(found.places_3R, torch.cat((places, unused), 1))
        assert torch.equal(found.weight_R, torch.cat((weights, weights.new_zeros(more))))
        assert torch.equal(found.starts_3P1, starts)
        assert not found.is_over
    for column in range(3 if len(weights) else 0):
        room = Room(*(count + 1 - 2 * (at == column) for at, count in enumerate(needed)))
        found = ReceivedRoutes(*way.take_routes(own, header_PW, room, num_slots, like))
        assert found.is_over
        assert torch.equal(found.starts_3P1, starts)
        assert (found.places_3R == torch.tensor([[room.rows], [num_slots], [room.targets]])).all()
        assert not found.weight_R.any()


def check_back(way: Any, name: str, dtype: torch.dtype, width: int) -> None:
    """Compares what every rank adds up and fetches with loops over what was sent."""
    given = ranks_of(name, dtype, width)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for column in (0, 2):
        for own in back_messages(given, column, width, dtype):
            header_PW = way.read_headers(own)
            counts, to = given.counts[own.rank], given.to[own.rank]
            number_PU = counts.number_VU
            if column == 2 and counts.number_VT is not None:
                number_PU = counts.number_VT
            sums = torch.zeros(number_PU.shape[1], width, dtype=wide)
            weights = torch.zeros(len(to.expert_N), dtype=given.weights[0].dtype)
            for rank in range(len(own.messages)):
                starts = starts_of(given, rank)
                rows = own.part(rank, own.layout.rows_at, int(starts[column, -1]), dtype, width)
                for row, number in enumerate(number_PU[rank].tolist()):
                    if number >= 0:
                        sums[row] += rows[int(starts[column, own.rank]) + number].to(wide)
                values = own.part(rank, own.layout.routes_at, int(starts[1, -1]), weights.dtype)
                here = [n for n, expert in enumerate(to.expert_N) if to.rank_E[expert] == rank]
                for place, n in enumerate(here):
                    weights[n] = values[int(starts[1, own.rank]) + place]
            found = way.sum_rows(own, header_PW, column, number_PU, given.rows[0][:0])
            assert torch.equal(found, sums.to(dtype))
            fetched = way.take_weights(
                own,
                header_PW,
                counts.destination_N,
                given.packed[own.rank].place_N,
                counts.counts_V3,
                weights[:0],
            )
            assert torch.equal(fetched, weights)
            # of a rank that had no room nothing is read past what it has
            short_PW = header_PW.clone()
            short_PW[:, [peers.NUM_ROWS, peers.NUM_ROUTES]] = 0
            nothing = way.sum_rows(own, short_PW, column, number_PU, given.rows[0][:0])
            assert not nothing.any()
            nothing = way.take_weights(
                own,
                short_PW,
                counts.destination_N,
                given.packed[own.rank].place_N,
                counts.counts_V3,
                weights[:0],
            )
            assert not nothing.any()
